"""Parameters stay in the loader's layout on vLLM's CPU backend, when the engine `nemo_dcr` is selected.

The stock backend packs weights once after loading. A later load then fails, or writes loader layout into packed bytes,
or writes a parameter that nothing reads any more. Here dense layers read their parameter at every call, and experts are
packed at every call, in the order and by the kernels of the stock backend. Convolutions stay unpacked; their kernels
take both. Under expert parallelism, ids of experts are made local first, which the stock class leaves out.
Not handled: experts with a bias whose width has to be padded (refused); MLA on AMX (the transform watch refuses it).

Paper: Section 6.1 (native loader; resident layout)   Conditions: LC9, LC10
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from vllm.config.vllm import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe

from nemo_dcr.adapters.vllm.settings import BACKEND
from nemo_dcr.errors import OperatorNeeded

_MARK = "keeps_loader_layout"


def is_selected() -> bool:
    """The worker that runs now was started with this engine."""
    config = get_current_vllm_config_or_none()
    return config is not None and selects(config)


def selects(config: VllmConfig) -> bool:
    """The configuration selects this engine."""
    transfer = config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def keep_loader_layout() -> None:
    """Let layers that are processed from now on keep their layout where the engine is selected. Re-entrant."""
    if not hasattr(utils.dispatch_cpu_unquantized_gemm, _MARK):
        _keep_dense_layers()
        _keep_experts()


def _keep_dense_layers() -> None:
    stock = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if layer.weight.is_meta or not is_selected():
            stock(layer, remove_weight)
        elif layer.weight.ndim == 2:
            # `weight` is what the caller read at some time; the layer knows what is resident now.
            layer.cpu_linear = lambda x, weight, bias: functional.linear(x, layer.weight, bias)

    setattr(dispatch, _MARK, True)
    utils.dispatch_cpu_unquantized_gemm = dispatch


def _keep_experts() -> None:
    experts: Any = cpu_moe.CPUUnquantizedExperts
    stock_process, stock_apply = experts.process_weights_after_loading, experts.apply

    def process(self: Any, layer: torch.nn.Module) -> None:
        setattr(self, _MARK, is_selected())
        if not is_selected():
            stock_process(self, layer)
            return
        self._use_zentorch = False
        if _padding(self) and hasattr(layer, "w13_bias"):
            raise OperatorNeeded(
                f"experts of width {self.moe_config.intermediate_size_per_partition} have a bias, and this processor's "
                "kernels would pad both",
                "choose a tensor parallel size that leaves a multiple of 32",
            )

    def apply(self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, *rest: Any) -> None:
        if not getattr(self, _MARK, False):
            stock_apply(self, output, hidden_states, w1, w2, *rest)
            return
        weights, ids, activation, number, expert_map, *others = rest
        if expert_map is not None:
            local = expert_map.to(torch.long)[ids.long()]
            weights = torch.where(local < 0, torch.zeros_like(weights), weights)
            ids = local.clamp(min=0).to(ids.dtype)
        padding = _padding(self)
        if padding:
            gate, up = w1.chunk(2, dim=1)
            w1 = torch.cat([functional.pad(half, (0, 0, 0, padding)) for half in (gate, up)], dim=1)
            w2 = functional.pad(w2, (0, padding))
        packed = [cpu_moe.cpu_prepack_moe_weight(weight, self.isa) for weight in (w1, w2)]
        stock_apply(self, output, hidden_states, *packed, weights, ids, activation, number, None, *others)

    def apply_by_name(self: Any, *args: Any, **named: Any) -> None:
        apply(self, *args, *(named[name] for name in _ARGUMENTS[len(args) :]))

    experts.process_weights_after_loading, experts.apply = process, apply_by_name


_ARGUMENTS = (
    *("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "global_num_experts"),
    *("expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2", "expert_tokens_meta"),
    "apply_router_weight_on_input",
)
"""Of `FusedMoEExperts.apply`, in order."""


def _padding(experts: Any) -> int:
    """Columns that the stock class would add to each half of the experts' width."""
    padded: int = experts._padded_intermediate_size(experts.moe_config)
    return padded - int(experts.moe_config.intermediate_size_per_partition)
