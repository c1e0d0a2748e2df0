"""The control calls by name: the protocol's own, and those of the runtime for prewarm, timings and dumps.

A call of the protocol is named after its message class, so the wire and the code cannot drift apart. An engine with an
API of its own is driven by what `Engine` tells, and through `Serving` and `Trouble`.

Paper: Section 6.1 (prewarm call); Appendix B (control calls)
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_dcr.ids import AttemptId
from nemo_dcr.protocol.messages import OWNER_CALLS, RECEIVER_CALLS, OwnerReply, ReceiverReply, ReceiverReport
from nemo_dcr.runtime.rpc import Method
from nemo_dcr.runtime.timings import Timings, TimingsOf


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One canonical tensor on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Prewarm:
    """Discover loader paths for these canonical tensors on a shadow, and reserve the scratch.

    A process life remembers what it found for a tensor table, so that another coordinator may ask too.
    """

    tensors: tuple[TensorRow, ...]
    again: bool = False
    """Discover anew, also what this life remembers."""


@dataclass(frozen=True, slots=True)
class Prewarmed:
    """Path class of each canonical name on this rank; `problem` says why there are none."""

    classes: dict[str, str]
    reasons: dict[str, tuple[str, str]]
    """Condition code and detail of each unsupported name."""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Nothing:
    """A call without arguments."""


@dataclass(frozen=True, slots=True)
class Table:
    """Canonical tensors that an owner can emit records for, and sizes of its part of the source."""

    tensors: tuple[TensorRow, ...]
    source_elements: int
    baseline_bytes: int


@dataclass(frozen=True, slots=True)
class BoxRow:
    """Which elements of a canonical tensor a tracker holds: reshape to `view`, cut the box, transpose by `axes`."""

    view: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Storage:
    """Stored tensors of a node; the bytes of row i are bulk frame i."""

    tensors: tuple[TensorRow, ...]
    boxes: tuple[BoxRow, ...] = ()
    """Trackers only: one box for each row."""


@dataclass(frozen=True, slots=True)
class Done:
    """A call was carried out, or `problem` says why not."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class EngineView:
    """What the driver of an engine with an API of its own looks at."""

    report: ReceiverReport
    wanted: bool
    """The node has work that needs the engine's thread."""


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine may compute tokens from now on, or is known to compute none and to have dropped its caches."""

    begins: bool


@dataclass(frozen=True, slots=True)
class Trouble:
    """The engine could not do what an attempt needs, such as dropping its caches: the attempt fails."""

    attempt: AttemptId
    detail: str


RECEIVER_METHODS = {call: Method(call.__name__, call, ReceiverReply) for call in RECEIVER_CALLS}
OWNER_METHODS = {call: Method(call.__name__, call, OwnerReply) for call in OWNER_CALLS}

PREWARM = Method("Prewarm", Prewarm, Prewarmed)
TABLE = Method("Table", Nothing, Table)
TIMINGS = Method("Timings", TimingsOf, Timings)
DUMP = Method("Dump", Nothing, Storage)
ENGINE = Method("Engine", Nothing, EngineView)
SERVING = Method("Serving", Serving, Done)
TROUBLE = Method("Trouble", Trouble, Done)
STOP = Method("Stop", Nothing, Done)
