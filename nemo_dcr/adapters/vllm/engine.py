"""The weight-transfer engine `nemo_dcr` that vLLM makes in every worker.

vLLM's own calls only open the receiver and lend it the worker's main loop; payloads, control calls and errors travel
beside them. So no call raises on one rank alone: vLLM's replies would be misaligned after that. Each loan is
start, update, finish; nothing is left open between two of them.
Not handled: draft models (refused at start-up, see support).

Paper: Section 7 (engines)   Spec: ReceiverProgress, GateSafe
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader import get_model_loader

from nemo_dcr.adapters.vllm.loaded import load_and_digest
from nemo_dcr.adapters.vllm.rank import Loan, RankReceiver
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.adapters.vllm.support import require_supported
from nemo_dcr.adapters.vllm.transforms import Transform, require_loader_layout, transforms_of
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.runtime.rpc import LOOPBACK

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Init(WeightTransferInitInfo):
    """The `init_info` of vLLM's API: the fields of `Settings`, which checks them."""

    instance: str
    directory: str
    store: str
    run: str
    prove_load: bool = True
    post_apply_check: bool = False
    listen: str = LOOPBACK
    keys: str = ""
    metrics: str = ""


@dataclass
class Update(WeightTransferUpdateInfo):
    """The `update_info` of vLLM's API: lend the worker's main loop, see `Loan`."""

    idle_s: float
    at_most_s: float


class NemoDcrEngine(WeightTransferEngine[Init, Update]):
    """One worker's part: opens the receiver, lends it the main loop, and fences forward passes."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        """Refuse what cannot be exact before the server answers. Raises: OperatorNeeded, UnsupportedLoaderPath."""
        super().__init__(config, vllm_config, device, model)
        require_supported(vllm_config)
        require_loader_layout(_transforms(model))
        self.receiver: RankReceiver | None = None
        self._hook = model.register_forward_pre_hook(self._before_forward)

    def init_transfer_engine(self, init_info: Init) -> None:
        """Open the receiver; the same settings again change nothing. A rank that fails publishes no address."""
        try:
            settings = Settings(**asdict(init_info))
            if self.receiver is not None and self.receiver.alive and self.receiver.settings == settings:
                return
            self._close()
            rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
            digest = self._prove_load() if settings.prove_load else b""
            model: Any = self.model
            self.receiver = RankReceiver(settings, rank, ranks, model, loaded_digest=digest)
        except (
            Exception
        ):  # whatever it is: raising on one rank alone misaligns vLLM's replies; the driver sees no address
            logger.exception("the receiver of %s did not open", init_info.instance)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the receiver writes in place, under the protocol's own permits."""

    def receive_weights(self, update_info: Update) -> None:
        """Lend this thread to the receiver."""
        if self.receiver is not None:
            self.receiver.lend(Loan(update_info.idle_s, update_info.at_most_s))

    def finish_weight_update(self) -> None:
        """Nothing to finish: acknowledgements travel by the protocol."""

    def shutdown(self) -> None:
        """Close the receiver; serving goes on with what is in the storage."""
        self._close()

    def _close(self) -> None:
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def _prove_load(self) -> bytes:
        if self.vllm_config.load_config.load_format == "dummy":
            return b""
        loader: Any = get_model_loader(self.vllm_config.load_config)
        if not hasattr(loader, "get_all_weights"):
            return b""
        model: Any = self.model
        return load_and_digest(model, loader.get_all_weights(self.model_config, self.model))

    def _before_forward(self, module: torch.nn.Module, arguments: Any) -> None:
        if self.receiver is not None:
            self.receiver.fence()


def _transforms(model: torch.nn.Module) -> list[Transform]:
    found = transforms_of(model)
    if found is None:
        raise OperatorNeeded(
            "nobody watched what vLLM did to the weights after it loaded them",
            "let vLLM load the general plugin nemo_dcr (VLLM_PLUGINS)",
        )
    return found
