"""The asynchronous engine inside this very process: a `vllm.AsyncLLM`, which serves on an event loop.

Generate through this class, on that loop: every output comes with the one committed version that computed it. The
driver's calls come on other threads and wait for the loop, so nothing that waits for a refit may run on the loop itself
(call `WholeTrainer` by `asyncio.to_thread`); a call from the loop is refused, since it would wait for itself.
Not handled: `vllm.LLM` (see in_process).

Paper: Section 7 (gate)   Spec: AdmitRequest, FinishRequest
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import asdict
from typing import Any

from nemo_dcr.adapters.vllm.admission import Admission
from nemo_dcr.adapters.vllm.client import EngineClient
from nemo_dcr.adapters.vllm.engine_api import CALL_S, PAUSE_S
from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.ids import Version


class AsyncLlmEngine:
    """Drives a `vllm.AsyncLLM` and generates through it; made on the loop that the AsyncLLM serves on."""

    def __init__(self, llm: Any, name: str = "AsyncLLM") -> None:
        """`llm` was made with `weight_transfer_config=WeightTransferConfig(backend="nemo_dcr")`."""
        self._llm = llm
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._admission = Admission()
        self._client = EngineClient(llm, self._admission, name)

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[tuple[Version, Any]]:
        """The outputs of `AsyncLLM.generate`, each with the version that computes all of them. Waits while paused."""
        async with self._admission.admitted() as version:
            async for output in self._llm.generate(prompt, sampling_params, request_id, **options):
                yield Version(int(version)), output

    def attach(self, settings: Settings) -> None:
        """As `EngineApi.attach`. Raises: EngineTrouble."""
        self._call("attach", self._client.attach(settings.init_info()), PAUSE_S)

    def pause(self) -> None:
        """As `EngineApi.pause`. Raises: EngineTrouble."""
        self._call("pause", self._client.pause(), PAUSE_S)

    def lend(self, loan: Loan) -> None:
        """As `EngineApi.lend`. Raises: EngineTrouble."""
        self._call("lend", self._client.lend(asdict(loan)), loan.at_most_s + CALL_S)

    def resume(self, version: Version) -> None:
        """As `EngineApi.resume`. Raises: EngineTrouble."""
        self._call("resume", self._client.resume(str(version)), CALL_S)

    def checksums(self) -> dict[str, str]:
        """vLLM's own checksum of every parameter of every rank."""
        ranks = self._call("checksums", self._llm.compute_weight_checksums(), PAUSE_S)
        return {name: digest for rank in ranks for name, digest in rank.items()}

    def _call(self, operation: str, made: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        if _running_loop() is self._loop:
            made.close()
            raise EngineTrouble(self._name, operation, "it was called on the event loop; use asyncio.to_thread")
        called = asyncio.run_coroutine_threadsafe(made, self._loop)
        try:
            return called.result(timeout_s)
        except EngineTrouble:
            raise
        except Exception as problem:  # vLLM's own calls raise anything
            called.cancel()
            raise EngineTrouble(self._name, operation, f"{type(problem).__name__}: {problem}") from problem


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
