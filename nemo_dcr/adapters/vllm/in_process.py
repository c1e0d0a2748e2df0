"""The engine inside this very process: a `vllm.LLM`, which only computes while `generate` is called.

One lock orders generation and the driver's calls, which come on another thread. A pause is the lock with empty caches;
requests that come meanwhile wait for it, so a batch is computed by one committed version from its first token to its
last. Generate through this class, not through the LLM that it holds.
Not handled: AsyncLLM.

Paper: Section 7 (gate)   Spec: AdmitRequest, FinishRequest
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from nemo_dcr.adapters.vllm.engine_api import open_session
from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.ids import Version


class LlmEngine:
    """Drives a `vllm.LLM` and generates through it."""

    def __init__(self, llm: Any, name: str = "LLM") -> None:
        """`llm` was made with `weight_transfer_config=WeightTransferConfig(backend="nemo_dcr")`."""
        self._llm = llm
        self._name = name
        self._changed = threading.Condition()
        self._version: Version | None = None

    def generate(self, prompts: Any, sampling_params: Any = None, **options: Any) -> tuple[Version, list[Any]]:
        """The outputs of `LLM.generate`, and the one committed version that computed them. Waits while paused."""
        with self._changed:
            self._changed.wait_for(lambda: self._version is not None)
            version = self._version or Version(0)
            return version, self._llm.generate(prompts, sampling_params, **options)

    def attach(self, settings: Settings) -> None:
        """As `EngineApi.attach`. Raises: EngineTrouble."""
        self.pause()
        info = settings.init_info()
        self._call("init_weight_transfer_engine", lambda llm: llm.init_weight_transfer_engine({"init_info": info}))

    def pause(self) -> None:
        """As `EngineApi.pause`. Raises: EngineTrouble."""
        with self._changed:
            self._version = None
            reset = self._call("reset_prefix_cache", lambda llm: llm.reset_prefix_cache(reset_connector=True))
            if reset is not True:
                raise EngineTrouble(self._name, "reset the prefix cache", f"it answered {reset!r}")
            self._call("reset_mm_cache", lambda llm: llm.reset_mm_cache())
            self._call("reset_encoder_cache", lambda llm: llm.llm_engine.reset_encoder_cache())

    def lend(self, loan: Loan) -> None:
        """As `EngineApi.lend`. Raises: EngineTrouble."""
        with self._changed:
            open_session(self._start, self._finish)
            self._call("update_weights", lambda llm: llm.update_weights({"update_info": asdict(loan)}))
            self._finish()

    def resume(self, version: Version) -> None:
        """As `EngineApi.resume`. Raises: EngineTrouble."""
        with self._changed:
            self._call("update_weight_version", lambda llm: llm.update_weight_version(str(version)))
            self._version = version
            self._changed.notify_all()

    def checksums(self) -> dict[str, str]:
        """vLLM's own checksum of every parameter of every rank."""
        found: dict[str, str] = {}
        for rank in self._call("compute_weight_checksums", lambda llm: llm.collective_rpc("compute_weight_checksums")):
            found |= rank
        return found

    def _start(self) -> None:
        self._call("start_weight_update", lambda llm: llm.start_weight_update())

    def _finish(self) -> None:
        self._call("finish_weight_update", lambda llm: llm.finish_weight_update())

    def _call(self, operation: str, call: Callable[[Any], Any]) -> Any:
        with self._changed:
            try:
                return call(self._llm)
            except Exception as problem:
                raise EngineTrouble(self._name, operation, f"{type(problem).__name__}: {problem}") from problem
