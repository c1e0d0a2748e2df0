"""BF16 projections with FP32 products: values, gradients, names and the stock path for other dtypes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.testing.bf16_linear import use_wide_products


def layer(dtype, bias):
    torch.manual_seed(0)
    linear = nn.Linear(16, 24, bias=bias, dtype=dtype)
    use_wide_products(nn.Sequential(linear))
    return linear


def test_result_and_gradients_are_the_fp32_ones_rounded_once():
    linear = layer(torch.bfloat16, bias=False)
    x = torch.randn(2, 3, 16).bfloat16().requires_grad_()
    out = linear(x)
    grad = torch.randn(2, 3, 24).bfloat16()
    out.backward(grad)
    wide_x, wide_w = x.detach().float().requires_grad_(), linear.weight.detach().float().requires_grad_()
    wide = functional.linear(wide_x, wide_w)
    wide.backward(grad.float())
    for found, expected in ((out.detach(), wide.detach()), (x.grad, wide_x.grad), (linear.weight.grad, wide_w.grad)):
        assert found.dtype is torch.bfloat16
        assert found.shape == expected.shape
        # The order of the FP32 sums may differ, so a result may round to the neighbouring BF16 value.
        assert float((found.float() - expected).abs().max()) <= 2**-8 * float(expected.abs().max())


def test_bias_gets_its_gradient():
    linear = layer(torch.bfloat16, bias=True)
    linear(torch.ones(5, 16, dtype=torch.bfloat16)).sum().backward()
    assert linear.bias.grad.tolist() == [5.0] * 24


def test_other_dtypes_take_the_stock_path():
    linear = layer(torch.float32, bias=True)
    x = torch.randn(5, 16)
    assert equal_words(copied_words(linear(x)), copied_words(functional.linear(x, linear.weight, linear.bias)))


def test_names_and_parameters_stay_as_they_were():
    linear = layer(torch.bfloat16, bias=True)
    assert list(dict(linear.named_parameters())) == ["weight", "bias"]
