"""Engines in this process that keep a prefix cache by tokens, as vLLM does, over a toy model with real receivers.

A token is a digest of every stored bit and of the prompt, so that an answer tells which weights computed it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from nemo_dcr.adapters.vllm.rank import Loan, RankReceiver
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.testing.local_oracle import stored_bits
from nemo_dcr.testing.source_cases import changed_words, random_words
from nemo_dcr.testing.toy_loader import Composed, Slice, ToyModel

TENSORS = (TensorMeta("a.w", (8, 4), "BF16"), TensorMeta("b.w", (5, 6), "F32"))
RULES = {"a.w": Slice(0), "b.w": Composed()}
Version = dict[str, Words]


def versions(count: int) -> list[Version]:
    """Stored words of some versions; a part of every tensor differs from one to the next."""
    rng = np.random.default_rng(5)
    found = [{meta.name: random_words(rng, meta.dtype, meta.numel) for meta in TENSORS}]
    while len(found) < count:
        found.append({meta.name: changed_words(rng, meta.dtype, found[-1][meta.name], 0.4) for meta in TENSORS})
    return found


def tensors_of(version: Version) -> list[tuple[str, Any]]:
    """The version as a trainer hands it out."""
    return [(m.name, tensor_from_words(version[m.name].copy(), m.dtype, m.shape)) for m in TENSORS]


def model_of(*loaded: Version) -> ToyModel:
    """A model after dense loads of these versions, one after another."""
    model = ToyModel(TENSORS, RULES, 0, 1)
    for version in loaded:
        model.load_weights(tensors_of(version))
    return model


def token_of(model: ToyModel, prompt: str) -> str:
    """What the model answers."""
    return hashlib.sha256((repr(stored_bits(model)) + prompt).encode()).hexdigest()


class CachedEngine:
    """The calls that vLLM's `LLM` and its engine core share; `reset` is what a reset of the prefix cache answers."""

    def __init__(self, start: Version) -> None:
        self.model = model_of(start)
        self.cached: dict[str, str] = {}
        self.receiver: RankReceiver | None = None
        self.reset: Any = True
        self.refused_resets = 0

    def compute(self, prompt: str) -> str:
        """A forward pass, unless the cache knows the prompt."""
        if prompt not in self.cached:
            if self.receiver is not None:
                self.receiver.fence()
            self.cached[prompt] = token_of(self.model, prompt)
        return self.cached[prompt]

    def open(self, info: dict[str, Any]) -> None:
        """vLLM's `init_weight_transfer_engine`, on the one rank."""
        self.receiver = RankReceiver(Settings(**info), 0, 1, self.model)

    def lend(self, info: dict[str, Any]) -> None:
        """vLLM's `update_weights`, on the one rank."""
        assert self.receiver is not None
        self.receiver.lend(Loan(**info))

    def reset_cache(self) -> Any:
        """Empty the prefix cache, or say that it cannot be done."""
        if self.refused_resets:
            self.refused_resets -= 1
            return False
        self.cached.clear()
        return self.reset

    def close(self) -> None:
        """End the receiver."""
        if self.receiver is not None:
            self.receiver.close()


class CachedLlm:
    """As `vllm.LLM`."""

    def __init__(self, engine: CachedEngine) -> None:
        self._engine = engine
        self.llm_engine = SimpleNamespace(reset_encoder_cache=lambda: None)

    def generate(self, prompts: list[str], sampling_params: Any = None) -> list[str]:
        return [self._engine.compute(prompt) for prompt in prompts]

    def reset_prefix_cache(self, *, reset_connector: bool) -> Any:
        return self._engine.reset_cache()

    def reset_mm_cache(self) -> None:
        return None

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self._engine.open(request["init_info"])

    def start_weight_update(self) -> None:
        return None

    def update_weights(self, request: dict[str, Any]) -> None:
        self._engine.lend(request["update_info"])

    def finish_weight_update(self) -> None:
        return None

    def update_weight_version(self, version: str) -> None:
        return None


class CachedAsyncLlm:
    """As `vllm.AsyncLLM`; its calls run beside each other on one loop."""

    def __init__(self, engine: CachedEngine) -> None:
        self._engine = engine

    async def generate(self, prompt: str, sampling_params: Any, request_id: str) -> AsyncIterator[str]:
        yield self._engine.compute(prompt)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        return None

    async def resume_generation(self) -> None:
        return None

    async def reset_prefix_cache(self, running: bool, connector: bool) -> Any:
        return self._engine.reset_cache()

    async def reset_mm_cache(self) -> None:
        return None

    async def reset_encoder_cache(self) -> None:
        return None

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._engine.open(request.init_info)

    async def start_weight_update(self) -> None:
        return None

    async def update_weights(self, request: Any) -> None:
        await asyncio.to_thread(self._engine.lend, request.update_info)

    async def finish_weight_update(self) -> None:
        return None

    async def update_weight_version(self, version: str) -> None:
        return None


class LoopThread:
    """An event loop on a thread of its own, as a server has one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, made: Any, timeout_s: float = 30.0) -> Any:
        """Run a coroutine there and wait for it."""
        return asyncio.run_coroutine_threadsafe(made, self.loop).result(timeout_s)

    def close(self) -> None:
        """End the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
