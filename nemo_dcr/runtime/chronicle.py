"""What the processes of a run lived through, told with times of the wall: the entries, and one file for each life.

A trace says what the protocol did and in which order, without times; a chronicle says when, and how long each stage
took. Coordinators tell attempts, commits and transitions, owners and receivers the timings of each attempt, receivers
also when their gate moved and over which version. Nothing is decided by it: it is for people, metrics and the report.
Times are seconds since the epoch, by the monotonic clock and one anchor of each process. An entry is told once; the
intervals of an attempt may come in several entries, of which each brings those that are new. A torn last line is
dropped when a file is read.
Not handled: removal of old files (a run directory is removed as a whole); clocks of hosts that differ.

Paper: Appendix C (timed window, stages); Section 8.7 (failures and recovery)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation, Version
from nemo_dcr.runtime.line_file import LineFile, whole_lines
from nemo_dcr.runtime.timings import Timings
from nemo_dcr.runtime.timings import now as wall

DIRECTORY = "chronicle"
"""Where the files lie in a run directory."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="what"):
    """One thing that happened."""

    at: float
    """Seconds since the epoch."""


class LifeBegan(Entry, frozen=True, kw_only=True):
    """The first entry of a file: whose life it is."""

    node: str
    """`owner-0`, `engine/0`, or a coordinator's name."""
    incarnation: Incarnation


class TookOver(Entry, frozen=True, kw_only=True):
    """A coordinator holds a new epoch."""

    epoch: Epoch


class SteppedAside(Entry, frozen=True, kw_only=True):
    """A coordinator was replaced."""

    reason: str


class AttemptBegan(Entry, frozen=True, kw_only=True):
    """An attempt has an id; endpoints are prepared next."""

    attempt: AttemptId
    mode: str
    """As `AttemptMode`."""
    gate: str
    base: Version
    """The committed version that it starts from; 0 before the first record."""
    candidate: CandidateId
    receivers: tuple[str, ...]
    """Who has to acknowledge it, without incarnations."""
    owners: int
    """How many send."""


class AttemptOver(Entry, frozen=True, kw_only=True):
    """An attempt is over: acknowledged when `reason` is empty."""

    attempt: AttemptId
    reason: str


class CommitResolved(Entry, frozen=True, kw_only=True):
    """The outcome of a compare-and-set is known."""

    attempt: AttemptId
    outcome: str
    """`committed`, or why it is not."""


class VersionDurable(Entry, frozen=True, kw_only=True):
    """The record is durable; baselines and gates follow."""

    version: Version
    candidate: CandidateId
    attempt: AttemptId
    receivers: tuple[str, ...]
    """Who holds the version."""


class TransitionOver(Entry, frozen=True, kw_only=True):
    """Baselines are updated, the candidate is thawed, gates are open."""

    version: Version
    candidate: CandidateId


class CandidateGivenUp(Entry, frozen=True, kw_only=True):
    """A transition was aborted."""

    candidate: CandidateId
    reason: str


class Measured(Entry, frozen=True, kw_only=True):
    """What a node measured in an attempt so far; of the intervals those that no entry before told."""

    attempt: AttemptId
    timings: Timings


class GateMoved(Entry, frozen=True, kw_only=True):
    """A receiver opened or closed its gate."""

    attempt: AttemptId
    """Installed attempt, 0 for none."""
    is_open: bool
    tag: str
    """What its storage holds, as traces write tags."""
    version: Version | None
    """With an open gate: the version that it serves."""


Told = Callable[[Entry], None]
"""Where entries go. It is called under the node's lock: it may append to a file, and must not wait for anybody."""

Line = (
    LifeBegan
    | TookOver
    | SteppedAside
    | AttemptBegan
    | AttemptOver
    | CommitResolved
    | VersionDurable
    | TransitionOver
    | CandidateGivenUp
    | Measured
    | GateMoved
)


def tell_nobody(entry: Entry) -> None:
    """Drop the entry; the default."""


def tell_all(*listeners: Told) -> Told:
    """Hand each entry to every listener, in order."""

    def tell(entry: Entry) -> None:
        for listener in listeners:
            listener(entry)

    return tell


class Chronicle:
    """The file of one process life; hand its `tell` to a node."""

    def __init__(
        self, directory: Path, node: str, incarnation: Incarnation, *, now: Callable[[], float] = wall
    ) -> None:
        """Make the file in `directory`, and the directory; `now` gives seconds since the epoch."""
        self._file = LineFile(directory / f"{node.replace('/', '-')}-{incarnation}.ndjson", "entries of the chronicle")
        self._file.append(LifeBegan(at=now(), node=node, incarnation=incarnation))

    def tell(self, entry: Entry) -> None:
        """Append an entry, unless the disk was full before."""
        self._file.append(entry)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


def read_life(path: Path) -> Iterator[Line]:
    """The entries of one file, in order.

    Raises: OperatorNeeded when a whole line is damaged.
    """
    decoder = msgspec.json.Decoder(Line)
    for number, line in enumerate(whole_lines(path), 1):
        try:
            yield decoder.decode(line)
        except msgspec.MsgspecError as problem:
            raise OperatorNeeded(
                f"{path}: line {number} is damaged: {problem}", "move the file away; what its process told is lost"
            ) from None
