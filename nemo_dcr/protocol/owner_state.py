"""State, events, effects and guards of an owner: one trainer process with its trackers and residual baseline.

The baseline carries a version tag and is the only thing that change detection compares with (SC3). The candidate is
frozen from the begin of a transition to its end (SC4). `resident` says which committed candidate the live weights are,
and is forgotten as soon as they change: a lost baseline is refilled only from weights that are known to be committed.

Paper: Section 6.3; Appendix A (source conditions), B   Spec: own, MayStream, MayUpdateBaseline, MayRebuild
Proofs: baseline_follows_commit   Conditions: SC3, SC4
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId, Incarnation, OwnerId, Version
from nemo_dcr.protocol.messages import (
    DropCandidate,
    EndTransition,
    OwnerCall,
    OwnerReply,
    OwnerReport,
    PrepareOwner,
    RebuildBaseline,
    StopOwner,
    StreamEnd,
    StreamStatus,
    UpdateBaseline,
)
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.record import DELTA_MODES, AttemptMode
from nemo_dcr.trace import Emit


@dataclass(frozen=True, slots=True)
class OwnerWaiting:
    """A call whose reply waits until the stream stopped."""

    call_id: int
    call: PrepareOwner | StopOwner | DropCandidate


@dataclass(frozen=True, slots=True)
class OwnerState:
    """Everything that one owner knows. A restarted process begins with a lost tracker unless it kept its baseline."""

    owner: OwnerId
    incarnation: Incarnation
    tracker: TrackerTag
    candidate: CandidateId = NO_CANDIDATE
    resident: CandidateId | None = None
    baseline_digest: bytes = b""
    ended: CandidateId = NO_CANDIDATE
    """The candidate of the last transition that ended here, as far as this process knows."""
    revision: int = 0
    attempt: AttemptId = NO_ATTEMPT
    fenced: AttemptId = NO_ATTEMPT
    current: PrepareOwner | None = None
    install: PrepareOwner | None = None
    waiting: tuple[OwnerWaiting, ...] = ()
    status: StreamStatus = StreamStatus.IDLE
    stopping: bool = False
    published: tuple[bytes, ...] = ()
    end: StreamEnd | None = None
    filling: Version | None = None
    """A copy into the baseline runs: CopyCandidate or RefillBaseline."""
    reloading: bool = False
    """The weights of a dropped candidate are being replaced by the committed ones."""
    failure: str = ""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class OwnerCalled:
    """A control call arrived. `call_id` names it for the reply."""

    call_id: int
    call: OwnerCall


@dataclass(frozen=True, slots=True)
class CandidateFrozen:
    """The trainer paused and offers its weights as `candidate`: the begin of a transition."""

    candidate: CandidateId


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """The optimizer is about to step: the resident weights will be no committed version any more."""


@dataclass(frozen=True, slots=True)
class PayloadFormed:
    """Payload `number` of the attempt goes out next; recorded, no other meaning."""

    attempt: AttemptId
    number: int
    names: tuple[str, ...]
    """Canonical tensor names of its items."""
    xor: int
    """How many of them are XOR masks."""


@dataclass(frozen=True, slots=True)
class PayloadPublished:
    """Payload `number` of the attempt is out."""

    attempt: AttemptId
    number: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The manifest is out; `digest` is the manifest's own."""

    attempt: AttemptId
    digest: bytes


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """Change detection, conversion or publishing failed."""

    attempt: AttemptId
    detail: str


@dataclass(frozen=True, slots=True)
class StreamStopped:
    """Nothing of the attempt reads candidate or baseline, or can be published, any more."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class ItemCopied:
    """One tensor's part of the baseline holds `version`. Ignored unless that copy is running."""

    version: Version
    name: str
    """Canonical tensor name."""


@dataclass(frozen=True, slots=True)
class BaselineFilled:
    """CopyCandidate or RefillBaseline ended: every item holds `version`. Ignored unless that copy is running."""

    version: Version


@dataclass(frozen=True, slots=True)
class BaselineLost:
    """The baseline can not be trusted: a copy broke off for good, or memory was lost. No payload was formed since."""

    detail: str


@dataclass(frozen=True, slots=True)
class WeightsReloaded:
    """After a drop: the live weights are committed candidate `candidate` again (empty: version 0)."""

    candidate: CandidateId


OwnerEvent = (
    OwnerCalled
    | CandidateFrozen
    | WeightsChanged
    | PayloadFormed
    | PayloadPublished
    | StreamEnded
    | StreamFailed
    | StreamStopped
    | ItemCopied
    | BaselineFilled
    | BaselineLost
    | WeightsReloaded
)


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class OwnerAnswer:
    """Answer one call."""

    call_id: int
    reply: OwnerReply


@dataclass(frozen=True, slots=True)
class PushOwnerReport:
    """The stream ended or failed, or the baseline moved: tell the coordinator now. May be lost."""

    report: OwnerReport


@dataclass(frozen=True, slots=True)
class AnswerTrainer:
    """Whether the trainer may step, or its candidate is frozen now; if not, it must leave the weights as they are."""

    candidate: CandidateId
    refusal: str


@dataclass(frozen=True, slots=True)
class StartStream:
    """Publish every payload of the attempt from number 0 on, then the manifest."""

    attempt: AttemptId
    mode: AttemptMode
    version: Version
    """Baseline version that records are formed against; restore: the version that is sent."""
    candidate: CandidateId
    classes: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def every_element(self) -> bool:
        """All elements as overwrites: dense sends those of the candidate, restore those of the baseline."""
        return self.mode in (AttemptMode.DENSE, AttemptMode.RESTORE)


@dataclass(frozen=True, slots=True)
class StopStream:
    """Stop the stream, wait for it; then feed StreamStopped."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class CopyCandidate:
    """Copy the frozen candidate into the baseline in place; feed ItemCopied for each tensor, then BaselineFilled."""

    candidate: CandidateId
    version: Version
    digest: bytes = b""
    """K.digest, with which the complete baseline is sealed."""


@dataclass(frozen=True, slots=True)
class RefillBaseline:
    """Fill the lost baseline from the resident weights before they may change; feed as for CopyCandidate."""

    candidate: CandidateId
    version: Version
    digest: bytes = b""
    """As in `CopyCandidate`."""


@dataclass(frozen=True, slots=True)
class ThawCandidate:
    """The transition ended: training may go on."""

    candidate: CandidateId


@dataclass(frozen=True, slots=True)
class ReloadCommitted:
    """The candidate is dead: load the committed version before training goes on; then feed WeightsReloaded."""

    dropped: CandidateId


OwnerEffect = (
    Emit
    | OwnerAnswer
    | PushOwnerReport
    | AnswerTrainer
    | StartStream
    | StopStream
    | CopyCandidate
    | RefillBaseline
    | ThawCandidate
    | ReloadCommitted
)


# ------------------------------------------------------------------------------------------------------------- guards


def holds_version(tracker: TrackerTag, version: Version) -> bool:
    """The baseline is exactly `version` (SC3)."""
    return tracker == TrackerTag(TrackerKind.AT, version)


def is_frozen(state: OwnerState, candidate: CandidateId) -> bool:
    """`candidate` is this owner's frozen candidate (SC4)."""
    return candidate == state.candidate != NO_CANDIDATE


def owner_is_newer(state: OwnerState, attempt: AttemptId) -> bool:
    """No attempt that is as new was installed, stopped or is about to be installed."""
    installing = state.install.attempt if state.install else state.attempt
    return attempt > max(state.attempt, state.fenced, installing)


def owner_raises_fence(state: OwnerState, attempt: AttemptId) -> bool:
    """A stop of an attempt that was neither installed nor stopped yet: it only keeps a late prepare out."""
    return attempt > max(state.attempt, state.fenced)


def may_stream(state: OwnerState, call: PrepareOwner) -> bool:
    """Base binding: records are formed between the committed baseline and the attempt's own candidate."""
    if call.mode is AttemptMode.FINISH:
        return True
    if call.mode is AttemptMode.DENSE:
        return is_frozen(state, call.candidate) and state.tracker.kind is not TrackerKind.UPDATING
    if call.mode in DELTA_MODES and not is_frozen(state, call.candidate):
        return False
    return holds_version(state.tracker, call.version)


def may_update_baseline(state: OwnerState, call: UpdateBaseline) -> bool:
    """Only the frozen candidate becomes the baseline (D11), never under a running stream, never backwards."""
    forward = state.tracker.kind is TrackerKind.LOST or state.tracker.version < call.version
    undisturbed = state.status is not StreamStatus.STREAMING and state.filling is None
    return is_frozen(state, call.candidate) and undisturbed and forward


def may_rebuild(state: OwnerState, call: RebuildBaseline) -> bool:
    """A lost baseline is refilled only from resident weights that are the committed version (D12)."""
    lost = state.tracker.kind is TrackerKind.LOST and state.filling is None
    return lost and state.candidate == NO_CANDIDATE and state.resident == call.candidate


def may_end_transition(state: OwnerState, call: EndTransition) -> bool:
    """The baseline holds the candidate before it is thawed."""
    return is_frozen(state, call.candidate) and holds_version(state.tracker, call.version)


def has_ended(state: OwnerState, call: EndTransition) -> bool:
    """The transition ended before; another coordinator may have done it (D22)."""
    at_least = state.tracker.kind is TrackerKind.AT and state.tracker.version >= call.version
    return state.candidate != call.candidate and at_least


def may_step(state: OwnerState) -> bool:
    """The optimizer may change the weights: they are no frozen candidate (SC4), and nothing is loaded into them.

    A refill of a lost baseline from them does not hinder training: it is lost again.
    """
    return state.candidate == NO_CANDIDATE and not state.reloading


def may_freeze(state: OwnerState, candidate: CandidateId) -> bool:
    """A transition begins only after the last one ended, and when nothing copies from or into the weights.

    Never under the name of the committed candidate: the record would say that its refit is done already (D10).
    """
    return candidate not in (NO_CANDIDATE, state.ended) and may_step(state) and state.filling is None


def may_drop(state: OwnerState) -> bool:
    """A candidate whose copy began is committed; it can not be given up."""
    return state.filling is None and state.tracker.kind is not TrackerKind.UPDATING
