"""The commit record K, what the control plane is asked and answers, and the interface of its back ends.

The control plane hands out epochs and attempt ids and changes the record only by compare-and-set. Every operation is
one atomic durable step. A refusal is a reply, never an exception. An unknown outcome exists only at the caller, as a
reply that never came: the caller waits for the deadline and reads once (D14). What each step answers and writes is
decided by `control_rules`: a back end reads `Facts`, calls the rule and writes the `Decision`, in one transaction.

Not handled: durability and mutual exclusion (back ends in control/); when to call what (protocol.transition).

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
Proofs: joint_commit_binds   Conditions: SC3, SC7
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Epoch, Member, OwnerId, Version
from nemo_dcr.trace import Action, Scalar

R = TypeVar("R")


class AttemptMode(StrEnum):
    """What an attempt carries. Its mode and required set are fixed by the control plane's prepare (D1)."""

    XOR = "xor"
    """Mixed XOR and overwrite records; only the first attempt of a candidate (D9)."""
    OVERWRITE = "overwrite"
    """The complete changed set, every record an absolute overwrite."""
    DENSE = "dense"
    """All elements of the candidate, every record an overwrite; after a lost tracker (D12)."""
    FINISH = "finish"
    """No payloads: a new coordinator fences the old one, rolls forward and opens gates (D21)."""
    RESTORE = "restore"
    """All elements of the committed baseline, to new or restarted receivers; ends without a commit (D19)."""


DELTA_MODES = frozenset({AttemptMode.XOR, AttemptMode.OVERWRITE, AttemptMode.DENSE})
"""Modes that may end in a commit."""


@dataclass(frozen=True, slots=True)
class Record:
    """The commit record K of one version: one policy, one source baseline, one set of receivers that hold it."""

    version: Version
    candidate: CandidateId
    """The candidate whose bits this version is; the empty string for the first record."""
    digest: bytes
    """BLAKE2b-128 over the parent's digest and the sorted payload digests; for the first record, of the baseline."""
    attempt: AttemptId
    """The attempt that was acknowledged."""
    required: tuple[Member, ...]
    """Sorted. Each of them acknowledged `attempt` in that incarnation."""
    baseline: Version
    """The baseline version that the attempt compared with: version - 1, and 0 for the first record."""
    epoch: Epoch
    """The coordinator run that committed."""
    time: float = field(default=0.0, compare=False)
    """Control-plane clock, seconds since 1970, when the record was written; stamped by the control plane, whatever a
    request says. It binds nothing: two records are the same when all other fields are."""


@dataclass(frozen=True, slots=True)
class AttemptEntry:
    """Row A[t] of the attempt table. Ids count from 1 without a gap."""

    attempt: AttemptId
    epoch: Epoch
    candidate: CandidateId
    mode: AttemptMode
    baseline: Version | None
    """Version of the record that prepare expected; None before the first record."""
    required: tuple[Member, ...]
    owners: tuple[OwnerId, ...]
    deadline: float
    """Control-plane clock, seconds: no commit of this attempt after it."""


class Refusal(StrEnum):
    """Why the control plane refused. All but XOR_RETRY and MALFORMED mean: read again before anything else."""

    STALE_EPOCH = "stale_epoch"
    """Another coordinator took over: step down."""
    RECORD_MOVED = "record_moved"
    """The record is not the expected one; the reply carries it."""
    DEAD_CANDIDATE = "dead_candidate"
    """The candidate was killed by an abort (D27)."""
    COMMITTED_CANDIDATE = "committed_candidate"
    """The candidate is the committed one: roll forward."""
    NOT_LATEST = "not_latest"
    """A later prepare fenced this attempt (D15)."""
    DEADLINE = "deadline"
    """The request arrived after its deadline (D14)."""
    XOR_RETRY = "xor_retry"
    """The candidate had an attempt before: only overwrites repair (D9)."""
    MALFORMED = "malformed"
    """The request contradicts itself or the attempt table: a fault of the caller."""


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Ask for an attempt: its mode, candidate and members are fixed by the answer."""

    epoch: Epoch
    expect: Record | None
    """The record that the caller read; None before the first record."""
    candidate: CandidateId
    """Delta modes: the frozen candidate. Finish and restore: the committed one or none."""
    mode: AttemptMode
    required: tuple[Member, ...]
    """Sorted, not empty, one incarnation a receiver."""
    owners: tuple[OwnerId, ...]
    """Sorted. Not empty unless the mode is finish."""
    lifetime_s: float
    """The attempt may be committed for so many seconds from now."""


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """Compare-and-set of the record: `expect` becomes `new`, not later than `deadline`."""

    epoch: Epoch
    attempt: AttemptId
    expect: Record
    new: Record
    deadline: float
    """Control-plane clock, seconds."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """A new epoch; it fences every older one for prepare and commit."""

    epoch: Epoch
    clock: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The attempt exists and is the latest."""

    attempt: AttemptId
    deadline: float
    clock: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The record is now `record`, durably."""

    record: Record
    clock: int


@dataclass(frozen=True, slots=True)
class Killed:
    """The candidate can never be prepared or committed again. Repeating the call gives the same answer."""

    candidate: CandidateId
    clock: int


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing changed."""

    reason: Refusal
    detail: str
    record: Record | None
    """The record as it stands."""
    clock: int


@dataclass(frozen=True, slots=True)
class ControlView:
    """One consistent read."""

    record: Record | None
    epoch: Epoch
    last_attempt: AttemptId
    candidate_attempts: int
    """Attempts in a delta mode of the candidate that was asked for."""
    candidate_dead: bool
    clock: int


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One control-plane action, stamped inside the critical section; becomes one trace line (docs/trace.md)."""

    seq: int
    """Gapless from 0."""
    clock: int
    """Lamport clock of the control plane: max(its own, the caller's) + 1."""
    action: Action
    attempt: AttemptId
    args: Mapping[str, Scalar]
    post: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Facts:
    """The rows that one control-plane step looks at, read inside its critical section."""

    record: Record | None
    epoch: Epoch
    last: AttemptId
    """The latest attempt id, 0 before the first."""
    entry: AttemptEntry | None
    """Row of the attempt that the request names, if any."""
    candidate_attempts: int
    """Rows in a delta mode for the candidate that the request names."""
    candidate_dead: bool
    clock: int
    """Lamport clock of the control plane before the step."""
    journal_seq: int
    """Number of journal entries so far."""


@dataclass(frozen=True, slots=True)
class Decision(Generic[R]):
    """What one step answers and what it writes, all in one transaction. Fields that are None change nothing."""

    reply: R
    clock: int
    """New Lamport clock of the control plane; stored by every step, reads included, so that clocks order them."""
    journal: JournalEntry | None = None
    """To append."""
    epoch: Epoch | None = None
    entry: AttemptEntry | None = None
    record: Record | None = None
    dead: CandidateId | None = None
    not_after: float | None = None
    """Control-plane clock, seconds: a back end that can refuse the write once this has passed does so (D14)."""


class ControlPlane(Protocol):
    """A durable control plane, shared by all coordinators.

    `clock` is the caller's Lamport clock; each reply carries the control plane's. Methods block until the step is
    durable. They raise only when the back end cannot be reached or its store is damaged; after such an error the
    outcome of prepare, commit, kill and bootstrap is unknown.
    """

    def read(self, candidate: CandidateId = NO_CANDIDATE, *, clock: int = 0) -> ControlView:
        """Read the record and what is known of `candidate`."""
        ...

    def acquire_epoch(self, *, clock: int = 0) -> Acquired:
        """Become the active coordinator (D2)."""
        ...

    def prepare(self, request: PrepareRequest, *, clock: int = 0) -> Prepared | Refused:
        """Allocate an attempt."""
        ...

    def commit(self, request: CommitRequest, *, clock: int = 0) -> Committed | Refused:
        """Publish the next record."""
        ...

    def kill(self, epoch: Epoch, candidate: CandidateId, *, clock: int = 0) -> Killed | Refused:
        """Declare a candidate dead for ever (D27)."""
        ...

    def bootstrap(self, epoch: Epoch, record: Record, *, clock: int = 0) -> Committed | Refused:
        """Write the first record."""
        ...

    def history(self) -> tuple[Record, ...]:
        """Every record in order."""
        ...

    def journal(self, start: int = 0) -> tuple[JournalEntry, ...]:
        """Journal entries with seq >= start, in order."""
        ...


class WatchedControlPlane(ControlPlane, Protocol):
    """A control plane that others than its coordinators may look at: people, monitors, a standby that waits."""

    def peek(self, candidate: CandidateId = NO_CANDIDATE) -> ControlView:
        """Look at what `read` reads and change nothing: for people and monitors.

        A commit that is under way may still take effect after it, so it settles no outcome; only `read` does.
        """
        ...

    def watch(self, after: Version | None = None, *, timeout_s: float) -> Record | None:
        """Wait until there is a record with a later version than `after` (None: any), and return the latest one.

        None when there was none within `timeout_s` seconds. Versions that follow each other quickly may be skipped.
        """
        ...
