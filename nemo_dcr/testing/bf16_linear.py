"""BF16 projections with FP32 products and sums, at the speed of FP32 on processors without BF16 units.

Operands, results and gradients are BF16; each product is summed in FP32 and rounded once. That is what a BF16 unit
does. On a processor without one the stock BF16 backward pass is 20 to 40 times slower.
Operands are widened when they are used and not kept, so saved activations and weights stay BF16.
Not handled: other dtypes, which take the stock path.

Paper: Section 8 (BF16 compute of the trainer)
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class _Bf16Linear(torch.autograd.Function):
    """y = x w^T, with x of shape [..., inputs] and w of shape [outputs, inputs], both BF16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Round the FP32 product to BF16."""
        ctx.save_for_backward(x, weight)
        return (x.float() @ weight.float().t()).bfloat16()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both operands, each rounded once."""
        x, weight = ctx.saved_tensors
        grad = grads[0].float()
        rows = grad.flatten(0, -2).t() @ x.flatten(0, -2).float()
        return (grad @ weight.float()).bfloat16(), rows.bfloat16()


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    if x.dtype is not torch.bfloat16 or module.weight.dtype is not torch.bfloat16:
        return functional.linear(x, module.weight, module.bias)
    out: Tensor = _Bf16Linear.apply(x, module.weight)  # type: ignore[no-untyped-call]
    return out if module.bias is None else out + module.bias


def use_wide_products(model: nn.Module) -> None:
    """Let every `nn.Linear` of `model` compute BF16 operands this way; parameters and names stay as they are."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
