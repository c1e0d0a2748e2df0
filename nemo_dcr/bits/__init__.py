"""The one place where a dtype becomes an unsigned view: names, widths and numpy views.

An element is a stored word of 1, 2, 4 or 8 bytes; equality of weights is equality of these words and nothing else.
Dtypes carry their safetensors names. `F4` counts stored bytes (two values each), as torch does.
Not handled: elements of 16 bytes (complex128) and torch's legacy quantized dtypes: `UnsupportedDtype`.
Torch tensors: see `nemo_dcr.bits.tensors`.

Paper: Section 5 (I(X)_j, the stored bit pattern)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_dcr.errors import UnsupportedDtype

Words = NDArray[Any]
"""A one-dimensional array of little-endian unsigned words."""

WIDTHS: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F4"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32", "C32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""Bytes of one stored element by dtype name."""

_UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


def width(dtype: str) -> int:
    """Bytes of one stored element of `dtype` (a safetensors name).

    Raises: UnsupportedDtype for any other name.
    """
    try:
        return WIDTHS[dtype]
    except KeyError:
        raise UnsupportedDtype(dtype) from None


def unsigned(dtype: str) -> np.dtype[Any]:
    """The little-endian unsigned numpy dtype that has the width of `dtype`.

    Raises: UnsupportedDtype for an unknown name.
    """
    return _UNSIGNED[width(dtype)]


def unsigned_of_width(nbytes: int) -> np.dtype[Any]:
    """The unsigned numpy dtype of `nbytes` (1, 2, 4 or 8) bytes.

    Raises: UnsupportedDtype for any other width.
    """
    try:
        return _UNSIGNED[nbytes]
    except KeyError:
        raise UnsupportedDtype(f"{nbytes}-byte element") from None


def words(data: bytes | bytearray | memoryview | NDArray[Any], dtype: str) -> Words:
    """View contiguous `data` as the flat words of `dtype`, without a copy.

    Raises: UnsupportedDtype for an unknown name; ValueError when the bytes are not contiguous or not whole elements.
    """
    if isinstance(data, np.ndarray):
        if not data.flags.c_contiguous:
            raise ValueError("words() needs a C-contiguous array; copy it first")
        return data.reshape(-1).view(np.uint8).view(unsigned(dtype))
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("words() needs contiguous bytes; copy them first")
    return np.frombuffer(view, dtype=unsigned(dtype))


def equal_words(left: Words, right: Words) -> bool:
    """True iff both arrays have the same width, length and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and bool(np.array_equal(left, right))
