"""Torch tensors as unsigned words and back.

`resident_words` aliases the storage and refuses what it cannot alias; `copied_words` always copies, in row-major
order of the tensor's own shape, whatever its strides are.

Paper: Section 5 (stored bit pattern)
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.errors import UnsupportedDtype

_TORCH_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn_x2": "F4",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "complex32": "C32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
}
_NAME_OF: dict[torch.dtype, str] = {
    getattr(torch, attribute): name for attribute, name in _TORCH_NAMES.items() if hasattr(torch, attribute)
}
_TORCH_OF: dict[str, torch.dtype] = {name: dtype for dtype, name in _NAME_OF.items()}
_VIEW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name of a torch dtype.

    Raises: UnsupportedDtype where no unsigned view of 1, 2, 4 or 8 bytes exists.
    """
    try:
        return _NAME_OF[dtype]
    except KeyError:
        raise UnsupportedDtype(str(dtype)) from None


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name.

    Raises: UnsupportedDtype for a name that this torch does not know.
    """
    try:
        return _TORCH_OF[name]
    except KeyError:
        raise UnsupportedDtype(name) from None


def integer_view(tensor: Tensor) -> Tensor:
    """The same storage, shape and strides as integers of the same width (torch dispatches no float operator on it).

    Raises: UnsupportedDtype; ValueError for a lazily conjugated or negated tensor, whose storage holds other bits.
    """
    dtype_name(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a lazily conjugated or negated tensor has no storage of its own; resolve it first")
    return tensor.detach().view(_VIEW[tensor.itemsize])


def resident_words(tensor: Tensor) -> Words:
    """Flat words that alias a contiguous CPU tensor of any shape; a write to them is a write to the tensor.

    Raises: UnsupportedDtype; ValueError when the tensor is not contiguous, not on the CPU, or lazily conjugated or
    negated.
    """
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError("resident_words() needs a contiguous CPU tensor")
    name = dtype_name(tensor.dtype)
    if tensor.numel() == 0:
        return np.empty(0, dtype=unsigned(name))
    flat: Words = integer_view(tensor).reshape(-1).numpy()
    return flat.view(unsigned(name))


def copied_words(tensor: Tensor) -> Words:
    """A copy of the tensor's words in row-major order; any strides, any device.

    Raises: UnsupportedDtype.
    """
    name = dtype_name(tensor.dtype)
    if tensor.numel() == 0:
        return np.empty(0, dtype=unsigned(name))
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat: Words = integer_view(tensor).cpu().contiguous().reshape(-1).clone().numpy()
    return flat.view(unsigned(name))


def tensor_from_words(flat: Words, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of `dtype` and `shape` over the given words, without a copy where numpy allows it.

    Raises: UnsupportedDtype; ValueError when the words have another width or their number does not fit the shape.
    """
    target = torch_dtype(dtype)
    if flat.dtype != unsigned(dtype):
        raise ValueError(f"{flat.dtype} words cannot be elements of {dtype}")
    contiguous = np.ascontiguousarray(flat)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()
    # numpy and torch agree on signed words of every width; torch has no complete set of unsigned ones.
    signed = torch.from_numpy(contiguous.view(f"i{contiguous.itemsize}"))
    if prod(shape) != signed.numel():
        raise ValueError(f"{signed.numel()} words do not fill shape {list(shape)}")
    return signed.view(target).reshape(shape)
