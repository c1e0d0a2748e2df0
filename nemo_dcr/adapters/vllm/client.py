"""The driver's four calls on vLLM's asynchronous engine client, as coroutines of the loop that serves.

The order is that of `EngineApi`: the gate closes and running requests end before vLLM is paused, caches are reset while
nothing runs, and the gate opens after vLLM was resumed under the new version.
Not handled: how a driver reaches the loop (see control for a socket, async_in_process for a thread).

Paper: Section 7 (gate); Appendix B (control calls)
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from nemo_dcr.errors import EngineTrouble


class Gate(Protocol):
    """The request gate in front of the engine."""

    async def close(self) -> int:
        """Admit nothing more; returns how many requests still run after the wait for them."""
        ...

    async def open(self, version: str) -> None:
        """Admit requests, under this version."""
        ...


class EngineClient:
    """An `AsyncLLM`, or what vLLM's API server holds in its place, behind a gate. vLLM's own errors come through."""

    def __init__(self, client: Any, gate: Gate, name: str) -> None:
        self._client = client
        self._gate = gate
        self._name = name

    async def attach(self, info: dict[str, Any]) -> None:
        """Pause, and let every rank open its receiver. Raises: as `pause`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.pause()
        await self._client.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def pause(self) -> None:
        """Return once nothing runs and every cache is empty. Raises: EngineTrouble when a cache was not reset."""
        running = await self._gate.close()
        if running:
            raise EngineTrouble(self._name, "close the gate", f"{running} requests still run")
        await self._client.pause_generation(mode="wait", clear_cache=True)
        if not await self._client.reset_prefix_cache(False, True):
            raise EngineTrouble(self._name, "reset the prefix cache", "the engine refused")
        await self._client.reset_mm_cache()
        await self._client.reset_encoder_cache()

    async def lend(self, info: dict[str, Any]) -> None:
        """Lend the main loops. A session that another driver left open is closed first, as in `open_session`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        try:
            await self._client.start_weight_update()
        except Exception:  # vLLM's own errors, whichever client this is
            with contextlib.suppress(Exception):
                await self._client.finish_weight_update()
            await self._client.start_weight_update()
        await self._client.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._client.finish_weight_update()

    async def resume(self, version: str) -> None:
        """Compute again, under this committed version."""
        await self._client.update_weight_version(version)
        await self._client.resume_generation()
        await self._gate.open(version)
