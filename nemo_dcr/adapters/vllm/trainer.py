"""The trainer side in vLLM's own trainer API, `WeightTransferTrainerFactory.trainer_init(NemoDcrTrainerInit(...))`.

The weights that the source yields at `trainer_init` are version 0; each `send_weights` is one whole transition: the
changes are sent, applied on every rank, committed and served when it returns. Rank 0 holds the weights and coordinates;
the other ranks only take part in the collectives of the source. The client tells where the engine is; its four calls
have no pause, no caches and no replies, so the engine is driven over its HTTP address.
Not handled: clients without an address (Ray handles); several engines for one trainer (use `WholeTrainer`).

Paper: Section 5; Section 7
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from nemo_dcr.adapters.vllm.engine_api import HttpEngine
from nemo_dcr.adapters.vllm.settings import BACKEND
from nemo_dcr.adapters.vllm.whole_source import WholeTrainer
from nemo_dcr.config import GateMode
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import Version


@dataclass
class NemoDcrTrainerInit(TrainerInitInfo):
    """Where a run lives, and how many ranks its engine has."""

    backend: ClassVar[str] = BACKEND

    directory: str
    """Run directory, shared with the engine: addresses, traces, payloads, commit record."""
    ranks: int = 1
    """Tensor-parallel size of the engine."""
    instance: str = "engine"
    asynchronous: bool = False
    """Serve the old version until every payload is staged."""


class NemoDcrTrainer(TrainerWeightTransferEngine[NemoDcrTrainerInit]):
    """One engine and one trainer; made on every trainer rank."""

    init_info_cls = NemoDcrTrainerInit

    def __init__(self, init_info: NemoDcrTrainerInit, client: VLLMWeightSyncClient, source: WeightSource) -> None:
        """Attach, prewarm and bring the engine to version 0. Raises: as `WholeTrainer`, and InvalidConfig."""
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self._gate = GateMode.ASYNC if init_info.asynchronous else GateMode.SYNC
        self._source = source
        self._trainer: WholeTrainer | None = None
        if not self.is_sender:
            self._take_part()
            return
        url = getattr(client, "base_url", None)
        if not isinstance(url, str):
            raise InvalidConfig("client", f"{type(client).__name__} has no base_url; use vLLM's HTTP client")
        self._trainer = WholeTrainer(Path(init_info.directory), source)
        self._trainer.add_engine(HttpEngine(url), init_info.instance, init_info.ranks)
        self._trainer.begin()

    @classmethod
    def trainer_init(
        cls, init_info: NemoDcrTrainerInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """As the factory calls it. Raises: InvalidConfig without a source."""
        if source is None:
            raise InvalidConfig("source", "whole weights are compared with the committed ones; give a WeightSource")
        return cls(init_info, client, source)

    def send_weights(self) -> None:
        """One transition to the weights that the source yields now; returns when they are committed and served."""
        if self._trainer is None:
            self._take_part()
        else:
            self._trainer.refit(self._source, self._gate)

    @property
    def version(self) -> Version:
        """The committed version; 0 on ranks that do not coordinate."""
        return Version(0) if self._trainer is None else self._trainer.version

    def shutdown(self) -> None:
        """End owner and coordinator; the engine goes on serving."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _take_part(self) -> None:
        for _ in self._source:
            pass
