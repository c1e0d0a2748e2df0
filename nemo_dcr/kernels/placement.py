"""Which loops place entries: the compiled ones once they were asked for, the numpy ones until then.

Both give the same bits. Loading the compiled loops takes half a second of a processor, and some seconds once on a
machine to compile them, which a few megabytes are not worth; prewarm knows how many bytes a rank's tensors have.
Not handled: choosing for one call.

Paper: Section 6.1 (destination view)   Proofs: L5 inactive_unchanged
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Collection
from types import ModuleType
from typing import Any

from nemo_dcr.kernels import placement_plain

WORTH_BYTES = 64 << 20
"""The numpy loops place the changes of so many bytes in some tens of milliseconds."""


class _Choice:
    """The loops of this process."""

    def __init__(self) -> None:
        self.loops: ModuleType = placement_plain
        self.missing = ""
        self.lock = threading.Lock()


_CHOICE = _Choice()


def loops() -> Any:
    """The module to call now; `placement_plain` says what its functions do."""
    return _CHOICE.loops


def warm(nbytes: int, widths: Collection[int]) -> str:
    """Load and compile the loops for words of these many bytes, if tensors of `nbytes` bytes are worth it.

    Returns why the numpy loops run, empty when the compiled ones do. Repeatable; never raises for a missing compiler.
    """
    with _CHOICE.lock:
        if nbytes < WORTH_BYTES:
            return f"{nbytes} bytes are not worth loading compiled loops"
        if not _CHOICE.missing:
            try:
                fast = importlib.import_module("nemo_dcr.kernels.placement_fast")
                fast.warm(widths)
                _CHOICE.loops = fast
            except (ImportError, RuntimeError) as problem:
                _CHOICE.missing = f"compiled loops cannot be loaded: {problem}"
        return _CHOICE.missing


def cool() -> None:
    """Back to the numpy loops, for tests and comparisons."""
    with _CHOICE.lock:
        _CHOICE.loops, _CHOICE.missing = placement_plain, ""
