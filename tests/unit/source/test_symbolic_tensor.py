"""A framework's import code on symbolic tensors gives the map of what it does to real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.symbolic import SymbolicTensor

ROWS, COLUMNS = 12, 8
BASE = 1000
IMPORTS: dict[str, Callable[[Any, Any], Any]] = {
    "cat": lambda a, b: torch.cat([a, b], dim=1),
    "stack of transposed": lambda a, b: torch.stack([a.T, b.T]).contiguous(),
    "interleaved heads": lambda a, b: torch.cat([a.view(3, 4, -1), b.reshape(3, -1, COLUMNS)], 1).flatten(0, 1),
    "chunks the other way": lambda a, b: torch.cat([*torch.chunk(a, 5), *b.split([5, 7])][::-1]),
    "rows and columns": lambda a, b: torch.cat([a[2:9, 1:3], b[3:, -2:]]),
    "one row": lambda a, b: torch.stack((a[3], b[-1]), 1),
    "axes": lambda a, b: torch.stack([a, b]).permute(2, 0, 1).unsqueeze(1).squeeze().reshape((-1, 4)),
    "moved": lambda a, b: torch.transpose(torch.cat((a, b)), 0, 1).narrow(0, 1, 5).clone().detach(),
    "flat": lambda a, b: torch.cat([a.flatten(), torch.flatten(b)]).unsqueeze(0),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_import_code_says_where_it_puts_each_element(name: str) -> None:
    metas = [TensorMeta(each, (ROWS, COLUMNS), "F32") for each in "ab"]
    real = [torch.arange(m.numel, dtype=torch.int64).reshape(m.shape) + BASE * n for n, m in enumerate(metas)]
    expected = IMPORTS[name](*real)
    found = IMPORTS[name](*(SymbolicTensor.of(meta) for meta in metas))
    assert (tuple(found.shape), found.ndim, found.numel(), found.dtype) == (
        tuple(expected.shape),
        expected.dim(),
        expected.numel(),
        torch.float32,
    )
    which, flat = found.map.destinations(np.arange(expected.numel()))
    assert (which * BASE + flat).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("code", "named"),
    [
        (lambda a, b: torch.add(a, b), "torch.add"),
        (lambda a, b: torch.exp(a), "torch.exp"),
        (lambda a, b: torch.kron(a, b), "torch.kron"),
        (lambda a, b: a[[0, 2]], r"takes \[\[0, 2\]\]"),
        (lambda a, b: a[::2], "takes"),
    ],
)
def test_code_that_computes_is_refused_with_its_name(code: Callable[[Any, Any], Any], named: str) -> None:
    with pytest.raises(UnsupportedMapping, match=named):
        code(*(SymbolicTensor.of(TensorMeta(each, (4, 4), "F32")) for each in "ab"))


def test_tensors_of_two_dtypes_are_not_joined() -> None:
    with pytest.raises(UnsupportedMapping, match=r"bfloat16.*float32"):
        torch.cat([SymbolicTensor.of(TensorMeta(d, (2,), d)) for d in ("F32", "BF16")])  # type: ignore[misc]
