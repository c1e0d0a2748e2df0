"""Which loops run: the compiled ones once they were asked for, the numpy ones until then and wherever they are missing.

Both give the same bits and refuse the same input, so nobody has to know which ones run. Loading the compiled loops
takes half a second of a processor, and some seconds once on a machine, to compile them; a few megabytes are not worth
that. So whoever sets a node up says how many bytes a refit will look at, before the first refit.
Not handled: choosing for one call.

Paper: Section 5 (compare step), Section 6.1 (entries of an item)
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Protocol, cast

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.kernels import plain
from nemo_dcr.kernels.plain import Bytes, Indices, Locations, Planes

WORTH_BYTES = 64 << 20
"""The numpy loops compare so much in a tenth of a second."""


class Loops(Protocol):
    """The loops; `nemo_dcr.kernels.plain` says what each does."""

    def changes(self, new: Words, old: Words, *, masks: bool) -> tuple[Indices, Words]: ...  # noqa: D102
    def changed_indices(self, new: Words, old: Words) -> Indices: ...  # noqa: D102
    def xor_scatter(self, resident: Words, at: Locations, masks: Words) -> None: ...  # noqa: D102
    def overwrite_scatter(self, resident: Words, at: Locations, values: Words) -> None: ...  # noqa: D102
    def gap_bounds(self, indices: Indices) -> tuple[int, int]: ...  # noqa: D102
    def chain_of(self, indices: Indices) -> Bytes: ...  # noqa: D102
    def bitmap_of(self, indices: Indices) -> Bytes: ...  # noqa: D102
    def chain_locations(self, chain: Bytes, start: int, count: int) -> Indices: ...  # noqa: D102
    def bitmap_locations(self, bitmap: Bytes, start: int, count: int) -> Indices: ...  # noqa: D102
    def split_planes(self, words: Words, planes: Planes) -> None: ...  # noqa: D102
    def join_planes(self, planes: Planes, dtype: np.dtype[Any]) -> Words: ...  # noqa: D102


class _Choice:
    """The loops of this process."""

    def __init__(self) -> None:
        self.loops: Loops = plain
        self.missing = ""
        self.lock = threading.Lock()


_CHOICE = _Choice()


def loops() -> Loops:
    """The loops to call now."""
    return _CHOICE.loops


def warm(nbytes: int) -> str:
    """Load the compiled loops if a refit looks at `nbytes` bytes or more that make it worth while.

    Returns why the numpy loops run, empty when the compiled ones do. Repeatable; never raises for a missing compiler.
    """
    with _CHOICE.lock:
        if _CHOICE.loops is not plain:
            return ""
        if nbytes < WORTH_BYTES:
            return f"{nbytes} bytes are not worth loading compiled loops"
        if not _CHOICE.missing:
            try:
                _CHOICE.loops = cast(Loops, importlib.import_module("nemo_dcr.kernels.fast"))
            except (ImportError, RuntimeError) as problem:  # the second: no directory to keep compiled loops in
                _CHOICE.missing = f"compiled loops cannot be loaded: {problem}"
        return _CHOICE.missing


def cool() -> None:
    """Back to the numpy loops, for tests and comparisons."""
    with _CHOICE.lock:
        _CHOICE.loops, _CHOICE.missing = plain, ""
