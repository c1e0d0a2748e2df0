"""Group E of the known failures: what an engine keeps around its weights. Those that need vLLM are in a file beside.

Derived tensors, addresses, caches, requests, draft models and quantized weights: each either follows a refit to the
last bit, or the engine is refused before it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nemo_dcr.adapters.vllm.admission import Admission
from nemo_dcr.adapters.vllm.async_in_process import AsyncLlmEngine
from nemo_dcr.adapters.vllm.in_process import LlmEngine
from nemo_dcr.adapters.vllm.support import require_supported
from nemo_dcr.adapters.vllm.transforms import reachable_tensors, require_loader_layout, transforms_of, watching
from nemo_dcr.adapters.vllm.whole_source import WholeTrainer
from nemo_dcr.bits.tensors import copied_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import choose_encoding
from nemo_dcr.config import CodecConfig, RefitConfig
from nemo_dcr.errors import ConditionViolated, OperatorNeeded, UnsupportedLoaderPath
from nemo_dcr.ids import AttemptId
from nemo_dcr.protocol.coordinator_events import AttemptEnded
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.runtime.trace_file import read_trace
from nemo_dcr.testing.refit_outcome import Version, change_items, dense_load
from tests.failures.kinds import versions
from tests.failures.toy_engines import (
    CachedAsyncLlm,
    CachedEngine,
    CachedLlm,
    LoopThread,
    model_of,
    tensors_of,
    token_of,
)
from tests.failures.toy_engines import versions as engine_versions

REFIT = RefitConfig(heartbeat_s=0.02, call_timeout_s=2.0, lost_after_s=3.0)
CODEC = CodecConfig(chunk_target_bytes=64, bucket_target_bytes=128)


class Layer(nn.Module):
    """Two weights with loaders, and a loader that copies them."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        for name in ("kv", "w1"):
            weight = nn.Parameter(torch.zeros(4, 6, dtype=torch_dtype(dtype)), requires_grad=False)
            weight.weight_loader = Tensor.copy_  # type: ignore[attr-defined]
            self.register_parameter(name, weight)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        with torch.no_grad():
            return [name for name, tensor in weights if self.get_parameter(name).data.copy_(tensor) is not None]


def metas_of(dtype: str) -> list[TensorMeta]:
    return [TensorMeta(name, (4, 6), dtype) for name in ("kv", "w1")]


def reachable_bits(model: nn.Module) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Every tensor that the model holds anywhere, not only its parameters."""
    return {path: (tuple(t.shape), copied_words(t).tobytes()) for path, t in reachable_tensors(model)}


def refit(model: nn.Module, metas: list[TensorMeta], old: Version, new: Version) -> None:
    """A delta in the encodings that the paths allow."""
    layer: Any = model
    table = prewarm(layer, metas)
    encodings = {
        name: choose_encoding(overwrite_attempt=False, bits_preserved=True, path=path)
        for name, path in table.classes.items()
    }
    Applier(layer, table).apply(change_items(metas, old, new, encodings), attempt=AttemptId(1))


# -- E1: derived tensors go stale


def absorbed_product(layer: Any) -> None:
    layer.w_uk = layer.kv.float() @ torch.arange(12.0).reshape(6, 2)


def transposed_copy(layer: Any) -> None:
    layer.w_uk = layer.kv.t().contiguous()


def packed_in_a_closure(layer: Any) -> None:
    packed = layer.w1.float() * 2
    layer.kernel = lambda x: x @ packed


def swapped_halves(layer: Any) -> None:
    layer.w1.data.copy_(torch.cat([layer.w1.data[2:], layer.w1.data[:2]]))


def absorbed_view(layer: Any) -> None:
    layer.w_uk = nn.Parameter(layer.kv.data[:, :3].t(), requires_grad=False)


def rotary_table(layer: Any) -> None:
    layer.table = torch.arange(24.0).reshape(4, 6).sin()


def four_dimensional(layer: Any) -> None:
    layer.w1.data = layer.w1.data.reshape(2, 2, 2, 3).permute(2, 0, 1, 3).contiguous()


def requantised(layer: Any) -> None:
    layer.w1 = nn.Parameter(layer.w1.data.to(torch.float8_e4m3fn), requires_grad=False)
    layer.w1_scale = nn.Parameter(torch.ones(1), requires_grad=False)


def emptied(layer: Any) -> None:
    layer.packed = layer.w1.float()
    layer.w1 = nn.Parameter(torch.empty(0, dtype=layer.w1.dtype), requires_grad=False)


GO_STALE: dict[str, Callable[[Any], None]] = {
    step.__name__: step for step in (absorbed_product, transposed_copy, packed_in_a_closure, swapped_halves)
}
FOLLOW: dict[str, Callable[[Any], None]] = {step.__name__: step for step in (absorbed_view, rotary_table)}
QUANTIZE: dict[str, Callable[[Any], None]] = {step.__name__: step for step in (four_dimensional, requantised, emptied)}


def after_loading(step: Callable[[Any], None], dtype: str) -> tuple[Layer, Layer, Version, Version]:
    """An engine that holds the old version and one that loaded the new one densely, both after their step."""
    metas = metas_of(dtype)
    old, new = versions(metas)
    engine, twin = Layer(dtype), Layer(dtype)
    for layer, version in ((engine, old), (twin, new)):
        dense_load(layer, metas, version)
        with torch.no_grad():
            watching(step)(layer)
    return engine, twin, old, new


def is_refused(engine: Layer) -> bool:
    """Whether the engine would be refused before it serves."""
    try:
        require_loader_layout(transforms_of(engine) or [])
    except UnsupportedLoaderPath:
        return True
    return False


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("step", [*GO_STALE, *FOLLOW])
def test_e1_what_is_made_of_weights_after_loading_follows_a_refit_or_is_refused(step: str, dtype: str) -> None:
    engine, twin, old, new = after_loading({**GO_STALE, **FOLLOW}[step], dtype)
    if is_refused(engine):
        assert step in GO_STALE
        return
    refit(engine, metas_of(dtype), old, new)
    assert reachable_bits(engine) == reachable_bits(twin)
    assert step in FOLLOW


# -- E2: captured graphs keep old addresses


def addresses(model: nn.Module) -> dict[str, int]:
    return {path: tensor.data_ptr() for path, tensor in reachable_tensors(model)}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "I64"])
def test_e2_every_tensor_keeps_its_address_and_a_captured_view_sees_the_new_bits(dtype: str) -> None:
    metas = metas_of(dtype)
    old, new = versions(metas)
    engine = Layer(dtype)
    dense_load(engine, metas, old)
    before, captured = addresses(engine), engine.kv.data.view(torch.uint8).numpy()
    refit(engine, metas, old, new)
    assert addresses(engine) == before
    assert captured.tobytes() == new["kv"].tobytes()


MOVES: dict[str, Callable[[Layer], None]] = {
    "rebound": lambda layer: setattr(layer.kv, "data", layer.kv.data.clone()),
    "rebound in another layout": lambda layer: setattr(layer.kv, "data", layer.kv.data.t().clone().t()),
    "replaced": lambda layer: setattr(layer, "kv", nn.Parameter(layer.kv.data.clone(), requires_grad=False)),
}


@pytest.mark.parametrize("move", MOVES)
def test_e2_storage_that_moved_between_refits_is_refused_before_any_write(move: str) -> None:
    """What a graph captured earlier reads is no longer what a refit would write."""
    metas = metas_of("BF16")
    old, new = versions(metas)
    engine: Any = Layer("BF16")
    dense_load(engine, metas, old)
    table = prewarm(engine, metas)
    encodings = {
        name: choose_encoding(overwrite_attempt=True, bits_preserved=True, path=path)
        for name, path in table.classes.items()
    }
    captured = engine.kv.data
    MOVES[move](engine)
    before = reachable_bits(engine), copied_words(captured).tobytes()
    with pytest.raises(ConditionViolated, match="LC9"):
        Applier(engine, table).apply(change_items(metas, old, new, encodings), attempt=AttemptId(1))
    assert (reachable_bits(engine), copied_words(captured).tobytes()) == before


# -- E4: stale caches

DRIVERS = ("LLM", pytest.param("AsyncLLM", marks=pytest.mark.vllm))  # its requests are types of vLLM


class Served:
    """A trainer and one engine with a prefix cache, driven as vLLM's `LLM` or as its `AsyncLLM`."""

    def __init__(self, directory: Path, driver: str) -> None:
        self.versions = engine_versions(3)
        self.engine = CachedEngine(self.versions[0])
        self._loop = LoopThread() if driver == "AsyncLLM" else None
        self.driver = self._made() if self._loop is None else self._loop.run(self._made_on_loop())
        self.trainer = WholeTrainer(directory, tensors_of(self.versions[0]), refit=REFIT, codec=CODEC)

    def _made(self) -> Any:
        return LlmEngine(CachedLlm(self.engine))

    async def _made_on_loop(self) -> Any:
        return AsyncLlmEngine(CachedAsyncLlm(self.engine))

    def ask(self, prompt: str) -> tuple[int, str]:
        """The version that is told with the answer, and the answer."""
        if self._loop is None:
            version, (answer,) = self.driver.generate([prompt])
            return version, answer

        async def first() -> tuple[int, str]:
            answers = self.driver.generate(prompt, None, "request")
            found = [answer async for answer in answers]
            return found[-1]

        answered: tuple[int, str] = self._loop.run(first())
        return answered

    def begin(self) -> None:
        self.trainer.add_engine(self.driver, "one")
        self.trainer.begin()

    def refit(self, version: int) -> None:
        self.trainer.refit(tensors_of(self.versions[version]))

    def dense(self, version: int, prompt: str) -> tuple[int, str]:
        """What a fresh engine of that version answers."""
        return version, token_of(model_of(*self.versions[: version + 1]), prompt)

    def close(self) -> None:
        self.trainer.close()
        self.engine.close()
        if self._loop is not None:
            self._loop.close()


@contextmanager
def served(directory: Path, driver: str) -> Iterator[Served]:
    found = Served(directory, driver)
    try:
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("driver", DRIVERS)
def test_e4_a_cached_answer_of_one_version_never_serves_the_next(driver: str, tmp_path: Path) -> None:
    with served(tmp_path, driver) as story:
        story.begin()
        for version in range(3):
            if version:
                story.refit(version)
            for _ in range(2):
                assert story.ask("the same prompt") == story.dense(version, "the same prompt")
            assert story.engine.cached


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("answer", [False, None, "unsupported", {"success": False}])
def test_e4_a_reset_that_is_not_confirmed_fails_the_attempt_before_any_write(
    answer: Any, driver: str, tmp_path: Path
) -> None:
    with served(tmp_path, driver) as story:
        story.begin()
        story.ask("the same prompt")
        story.engine.refused_resets = 2
        story.refit(1)
        assert story.ask("the same prompt") == story.dense(1, "the same prompt")
        ended = [effect for effect in story.trainer.outcomes if isinstance(effect, AttemptEnded) and effect.reason]
        assert ended
        assert all("reset the prefix cache" in effect.reason for effect in ended)
        events = read_trace(next((tmp_path / "traces").glob("one-0-*.ndjson")))
        written = {event.attempt for event in events if event.action in ("StartApply", "ApplyItem")}
        assert not written & {effect.attempt for effect in ended}


@pytest.mark.parametrize("driver", DRIVERS)
def test_e4_nothing_is_computed_or_cached_over_storage_that_is_not_committed(driver: str, tmp_path: Path) -> None:
    with served(tmp_path, driver) as story:
        story.trainer.add_engine(story.driver, "one")
        with pytest.raises(OperatorNeeded, match="was told to compute tokens with storage"):
            story.engine.compute("asked behind the gate")
        assert story.engine.cached == {}


# -- E5: requests admitted during the drain


@pytest.mark.parametrize("clients", [1, 8])
@pytest.mark.parametrize("tokens", [1, 5])
def test_e5_no_token_is_computed_between_the_first_write_and_reopening(tokens: int, clients: int) -> None:
    asyncio.run(_drain(tokens, clients))


async def turns(count: int) -> None:
    """Let every task run, so many times."""
    loop = asyncio.get_running_loop()
    for _ in range(count):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


async def _drain(tokens: int, clients: int) -> None:
    """Clients submit without a pause while the gate closes; each token tells the weights that computed it."""
    gate, weights, stopping = Admission(), ["0"], asyncio.Event()
    answers: list[tuple[str, list[str]]] = []

    async def client() -> None:
        while not stopping.is_set():
            async with gate.admitted() as version:
                computed = []
                for _ in range(tokens):
                    await asyncio.sleep(0)
                    computed.append(weights[0])
                answers.append((version, computed))
            await asyncio.sleep(0)

    await gate.open("0")
    running = [asyncio.create_task(client()) for _ in range(clients)]
    for version in ("1", "2", "3"):
        await turns(50)
        assert await gate.close() == 0
        weights[0] = "mixed"
        await turns(50)
        weights[0] = version
        await gate.open(version)
    await turns(50)
    stopping.set()
    await asyncio.gather(*running)
    assert {version for version, _ in answers} == {"0", "1", "2", "3"}
    assert [(version, computed) for version, computed in answers if set(computed) != {version}] == []


# -- E6 and E8: draft models, quantized engines


def configuration(**changed: Any) -> Any:
    """The parts of vLLM's configuration that are looked at, with dotted names for changes."""
    found = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, enable_eplb=False),
        model_config=SimpleNamespace(quantization=None, enable_sleep_mode=False),
        lora_config=None,
        speculative_config=None,
    )
    for name, value in changed.items():
        *path, last = name.split("__")
        target: Any = found
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return found


@pytest.mark.parametrize("method", ["mtp", "eagle3", "draft_model", "ngram"])
def test_e6_an_engine_with_a_draft_model_is_refused_at_start_up(method: str) -> None:
    drafting = configuration(speculative_config=SimpleNamespace(method=method))
    with pytest.raises(OperatorNeeded, match="a draft model or MTP head"):
        require_supported(drafting)


class WithDraft(nn.Module):
    """A target and a frozen draft that shares the embedding; the loader leaves out names of the draft."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(6, 4).bfloat16(), requires_grad=False)
        self.w = nn.Parameter(torch.zeros(4, 4).bfloat16(), requires_grad=False)
        self.draft = nn.Module()
        self.draft.embed = self.embed
        self.draft.w = nn.Parameter(torch.randn(4, 4).bfloat16(), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if not name.startswith("mtp."):
                self.get_parameter(name).data.copy_(tensor)
                loaded.add(name)
        return loaded


def test_e6_a_frozen_draft_keeps_its_bits_and_shares_the_embedding_through_three_refits() -> None:
    metas = [TensorMeta("embed", (6, 4), "BF16"), TensorMeta("mtp.w", (4, 4), "BF16"), TensorMeta("w", (4, 4), "BF16")]
    old, _ = versions(metas)
    engine = WithDraft()
    dense_load(engine, metas, old)
    frozen = copied_words(engine.draft.w).tobytes()
    for number in range(3):
        new = {name: words ^ words.dtype.type(1 << number) for name, words in old.items()}
        refit(engine, metas, old, new)
        old = new
    assert copied_words(engine.draft.w).tobytes() == frozen
    assert copied_words(engine.draft.embed).tobytes() == copied_words(engine.embed).tobytes() == old["embed"].tobytes()
    assert copied_words(engine.w).tobytes() == old["w"].tobytes()


@pytest.mark.parametrize("quantization", ["fp8", "awq", "gptq_marlin", "compressed-tensors", "mxfp4"])
def test_e8_a_quantized_engine_is_refused_at_start_up(quantization: str) -> None:
    with pytest.raises(OperatorNeeded, match=f"quantization '{quantization}'"):
        require_supported(configuration(model_config__quantization=quantization))


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("step", QUANTIZE)
def test_e8_a_weight_whose_shape_or_dtype_changes_after_loading_is_refused(step: str, dtype: str) -> None:
    engine, _, _, _ = after_loading(QUANTIZE[step], dtype)
    found = {transform.name: transform.code for transform in transforms_of(engine) or []}
    assert found.get("w1") == "LC9"
    assert is_refused(engine)


def test_e8_the_words_of_a_version_differ_in_every_tensor() -> None:
    """What these tests compare would otherwise prove nothing."""
    for made in (versions(metas_of("BF16")), tuple(engine_versions(2))):
        old, new = made
        assert all(bool(np.any(old[name] != new[name])) for name in old)
