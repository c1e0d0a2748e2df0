"""Control calls to receivers and owners, their replies, and the reports that every reply carries.

Every call is idempotent and may be lost, repeated or late. Every reply is a value: accepted or refused with a reason,
and a full report of the endpoint as it stands. Receiver calls carry the attempt and the addressed incarnation (D5). A
call of a replaced attempt is ignored at the endpoint and answered `stale`; only its stop_and_wait counts as done.
Progress (quiet, staged, acked, drained) is read from reports, so a lost reply is repaired by the next status call.
A message is encoded by its class name and its fields; fields are plain values, no unions.

Not handled: transport of messages, Lamport clocks on them (runtime/); what to do with them (the machines beside this).

Paper: Section 6.3; Appendix B (control calls)   Spec: Channel   Conditions: SC3, SC4, SC7
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_dcr.config import GateMode
from nemo_dcr.ids import AttemptId, CandidateId, Incarnation, OwnerId, ReceiverId, Version
from nemo_dcr.protocol.tags import Tag, TrackerTag
from nemo_dcr.record import AttemptMode


class StreamStatus(StrEnum):
    """Where an owner stands in its attempt."""

    IDLE = "idle"
    """No attempt since start."""
    PREPARED = "prepared"
    STREAMING = "streaming"
    ENDED = "ended"
    """The manifest is published."""
    STOPPED = "stopped"
    """Stopped and drained; emits nothing until the next prepare."""


# ---------------------------------------------------------------------------------------------------- receiver calls


@dataclass(frozen=True, slots=True)
class PrepareReceiver:
    """Install an attempt: drain everything older, check the own tag, then take `attempt`. Sync: close the gate too."""

    receiver: ReceiverId
    incarnation: Incarnation
    attempt: AttemptId
    mode: AttemptMode
    gate: GateMode
    version: Version
    """K.ver; 0 before the first record."""
    record_attempt: AttemptId
    """K.att, which resolves a `done` tag; 0 before the first record."""
    candidate: CandidateId
    owners: tuple[OwnerId, ...]
    """Whose manifests complete the expected set; empty for finish."""
    baseline_digest: bytes = b""
    """Restore: digest of the checkpoint that the owners' baseline is. An untouched receiver that loaded the same is
    done without payloads. Empty: unknown."""


@dataclass(frozen=True, slots=True)
class CloseGate:
    """Stop admitting requests (async gate, after everything is staged). Report says `quiet` when the last one ended."""

    receiver: ReceiverId
    incarnation: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class OpenApply:
    """Allow writes of this attempt. Sent only after every required receiver is quiet."""

    receiver: ReceiverId
    incarnation: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class StopReceiver:
    """stop_and_wait: drop the queue, wait for issued writes, stay stopped until the next prepare (D28)."""

    receiver: ReceiverId
    incarnation: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class OpenGate:
    """Admit requests again; accepted only for the current attempt and a clean or committed tag (D20)."""

    receiver: ReceiverId
    incarnation: Incarnation
    attempt: AttemptId
    record_attempt: AttemptId
    """K.att: a `done` tag of that attempt becomes clean."""
    version: Version
    """K.ver."""


@dataclass(frozen=True, slots=True)
class FinishRestore:
    """The record was read again and is unchanged: the restored storage is `version`."""

    receiver: ReceiverId
    incarnation: Incarnation
    attempt: AttemptId
    version: Version


@dataclass(frozen=True, slots=True)
class ReceiverStatus:
    """Ask for a report; changes nothing. Not bound to an incarnation: this is how a new one is found."""

    receiver: ReceiverId


ReceiverCall = PrepareReceiver | CloseGate | OpenApply | StopReceiver | OpenGate | FinishRestore | ReceiverStatus
RECEIVER_CALLS = (PrepareReceiver, CloseGate, OpenApply, StopReceiver, OpenGate, FinishRestore, ReceiverStatus)


@dataclass(frozen=True, slots=True)
class ReceiverReport:
    """One receiver as it stands."""

    receiver: ReceiverId
    incarnation: Incarnation
    revision: int
    """Grows with every step of this incarnation: of two reports the higher one is newer."""
    ranks: int
    """Ranks of the instance; it takes part only as a whole."""
    attempt: AttemptId
    """Last installed attempt, 0 for none."""
    tag: Tag
    gate_open: bool
    requests: int
    """Admitted and not finished; always 0 on ranks that do not admit requests."""
    quiet: bool
    """Gate closed and no request in flight."""
    asleep: bool
    """The engine sleeps: it takes part in nothing until it wakes."""
    apply_open: bool
    """open_apply was seen for `attempt`."""
    staged: bool
    """Every manifest and every payload of `attempt` is in."""
    acked: bool
    """Everything of `attempt` is applied and flushed, and it was not stopped."""
    applied_digest: bytes
    """With `acked`: see `digests.applied_digest`; empty before, and for a restore proved by `baseline_digest`."""
    stopped: bool
    """`attempt` was stopped or failed: intake and acknowledgement are off."""
    drained: bool
    """With `stopped`: no write of `attempt` can take effect any more."""
    failure: str
    """Why `attempt` failed here; empty while it did not."""
    payloads: int
    """Distinct payloads of `attempt` accepted."""
    loaded_digest: bytes
    """Digest of the checkpoint loaded at start, while storage is untouched; empty when unknown or written to."""


@dataclass(frozen=True, slots=True)
class ReceiverReply:
    """Answer to any receiver call."""

    accepted: bool
    """For stop_and_wait of a replaced attempt: true, at once."""
    refusal: str
    """Why not; empty when accepted. `stale: ...` for a replaced attempt."""
    report: ReceiverReport


# ------------------------------------------------------------------------------------------------------- owner calls


@dataclass(frozen=True, slots=True)
class PrepareOwner:
    """Install an attempt at an owner: stop an older stream, check tracker tag and frozen candidate (SC3, SC4)."""

    owner: OwnerId
    incarnation: Incarnation
    attempt: AttemptId
    mode: AttemptMode
    version: Version
    """K.ver: the tracker must hold it (dense: or be lost)."""
    candidate: CandidateId
    classes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Path class of each canonical name, united over receivers. The machines leave it empty; the runtime fills it."""


@dataclass(frozen=True, slots=True)
class StreamOwner:
    """Compare, encode and publish everything of this attempt, then close the set."""

    owner: OwnerId
    incarnation: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class StopOwner:
    """Stop the stream of this attempt and wait until nothing of it can be published."""

    owner: OwnerId
    incarnation: Incarnation
    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class UpdateBaseline:
    """Copy the committed candidate into the baseline in place; refused unless it is the frozen one (D11)."""

    owner: OwnerId
    candidate: CandidateId
    version: Version
    """K.ver, which the baseline will hold."""
    digest: bytes = b""
    """K.digest, with which a baseline in files is sealed; empty: it is not sealed."""


@dataclass(frozen=True, slots=True)
class RebuildBaseline:
    """Refill a lost baseline from resident weights; refused unless they are exactly the committed version (D12)."""

    owner: OwnerId
    candidate: CandidateId
    """K.cand; the empty string for version 0."""
    version: Version
    digest: bytes = b""
    """As in `UpdateBaseline`."""


@dataclass(frozen=True, slots=True)
class EndTransition:
    """Thaw the candidate; refused before the baseline holds it. Repeating it changes nothing (D22)."""

    owner: OwnerId
    candidate: CandidateId
    version: Version


@dataclass(frozen=True, slots=True)
class DropCandidate:
    """Give up a candidate. Sent only after the control plane declared it dead (D27)."""

    owner: OwnerId
    candidate: CandidateId


@dataclass(frozen=True, slots=True)
class OwnerStatus:
    """Ask for a report; changes nothing."""

    owner: OwnerId


OwnerCall = (
    PrepareOwner
    | StreamOwner
    | StopOwner
    | UpdateBaseline
    | RebuildBaseline
    | EndTransition
    | DropCandidate
    | OwnerStatus
)
OWNER_CALLS = (
    PrepareOwner,
    StreamOwner,
    StopOwner,
    UpdateBaseline,
    RebuildBaseline,
    EndTransition,
    DropCandidate,
    OwnerStatus,
)


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """END of one owner's stream (D24): what its manifest says."""

    payload_digests: tuple[bytes, ...]
    """Digest of payload i at index i; empty when nothing changed."""
    digest: bytes
    """The manifest's digest, see `digests.manifest_digest`."""


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """One owner as it stands."""

    owner: OwnerId
    incarnation: Incarnation
    revision: int
    attempt: AttemptId
    status: StreamStatus
    tracker: TrackerTag
    candidate: CandidateId
    """The frozen candidate; empty outside a transition."""
    resident: CandidateId | None
    """The committed candidate that the resident weights are (empty: version 0); None when they are something else."""
    end: StreamEnd | None
    """Once `status` is ended."""
    failure: str
    """Why `attempt` failed here; empty while it did not."""
    payloads: int
    """Payloads of `attempt` published so far."""
    baseline_digest: bytes
    """Digest of the checkpoint that the baseline still equals; empty after the first update or when unknown."""
    filling: bool = False
    """A copy into the baseline runs."""


@dataclass(frozen=True, slots=True)
class OwnerReply:
    """Answer to any owner call."""

    accepted: bool
    refusal: str
    report: OwnerReport
