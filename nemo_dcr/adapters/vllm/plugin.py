"""The entry point of vLLM's general plugins: makes the engine `nemo_dcr` known in every process of vLLM.

vLLM calls `register` in the front end, the engine core and every worker, and may call it again. For a server that
selects the engine, what cannot be exact is refused before a model is built, parameters keep the loader's layout, and
the step after loading is watched. For every other server nothing changes.

Paper: Section 7 (engines)
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory
from vllm.model_executor.model_loader import base_loader

from nemo_dcr.adapters.vllm.cpu_layout import is_selected, keep_loader_layout, selects
from nemo_dcr.adapters.vllm.settings import BACKEND
from nemo_dcr.adapters.vllm.support import require_supported
from nemo_dcr.adapters.vllm.transforms import watching

_MARK = "watched_for_nemo_dcr"


def register() -> None:
    """Register engine and trainer side by name, and keep and watch the layout of parameters. Re-entrant."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "nemo_dcr.adapters.vllm.engine", "NemoDcrEngine")
    if BACKEND not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(BACKEND, "nemo_dcr.adapters.vllm.trainer", "NemoDcrTrainer")
    keep_loader_layout()
    _refuse_before_a_model_is_built()
    _watch_the_step_after_loading()


def _refuse_before_a_model_is_built() -> None:
    """A quantized model may end in an error of some kernel while it is built, which says nothing about refits."""
    module: Any = base_loader
    stock = module.initialize_model
    if hasattr(stock, _MARK):
        return

    def initialize(vllm_config: VllmConfig, *arguments: Any, **named: Any) -> Any:
        if selects(vllm_config):
            require_supported(vllm_config)
        return stock(vllm_config, *arguments, **named)

    setattr(initialize, _MARK, True)
    module.initialize_model = initialize


def _watch_the_step_after_loading() -> None:
    module: Any = base_loader
    stock = module.process_weights_after_loading
    if hasattr(stock, _MARK):
        return
    watched = watching(stock)

    def process(model: Any, *arguments: Any, **named: Any) -> None:
        (watched if is_selected() else stock)(model, *arguments, **named)

    setattr(process, _MARK, True)
    module.process_weights_after_loading = process
