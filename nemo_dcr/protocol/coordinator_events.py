"""Events and effects of the coordinator, shared by the attempt (B.1) and the transition (B.2).

The runtime feeds events one at a time and performs effects in order. A call to an endpoint is repeated until it is
answered or the endpoint counts as lost; reports from status calls and pushes are fed as they come. Of the control plane
one call is outstanding at a time: it ends with ControlReplied, or with ControlUnknown when the reply never came.

Not handled: message loss, clocks and timers (runtime). Times in effects are durations in seconds.

Paper: Section 6.3; Appendix B   Spec: Channel
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation, OwnerId, ReceiverId, Version
from nemo_dcr.protocol.messages import (
    OwnerCall,
    OwnerReply,
    OwnerReport,
    ReceiverCall,
    ReceiverReply,
    ReceiverReport,
)
from nemo_dcr.record import Acquired, Committed, ControlView, Killed, Prepared, PrepareRequest, Record, Refused
from nemo_dcr.trace import Emit

# --------------------------------------------------------------------------------------------------- events: commands


@dataclass(frozen=True, slots=True)
class BecomeCoordinator:
    """Take over: acquire a new epoch, read the record, and do what it and the endpoints ask for."""


@dataclass(frozen=True, slots=True)
class LookAgain:
    """Something may have changed while ready: a candidate was frozen, a receiver came. Otherwise without meaning."""


@dataclass(frozen=True, slots=True)
class AbortRequested:
    """Give the open transition up instead of retrying it."""


# -------------------------------------------------------------------------------------------------- events: endpoints


@dataclass(frozen=True, slots=True)
class Surveyed:
    """Answer to Survey: the newest report of every endpoint that answered in time. Silent ones are missing."""

    receivers: tuple[ReceiverReport, ...]
    owners: tuple[OwnerReport, ...]


@dataclass(frozen=True, slots=True)
class ReceiverAnswered:
    """A call was answered."""

    call: ReceiverCall
    reply: ReceiverReply


@dataclass(frozen=True, slots=True)
class OwnerAnswered:
    """A call was answered."""

    call: OwnerCall
    reply: OwnerReply


@dataclass(frozen=True, slots=True)
class ReceiverReported:
    """A status reply or a push."""

    report: ReceiverReport


@dataclass(frozen=True, slots=True)
class OwnerReported:
    """A status reply or a push."""

    report: OwnerReport


@dataclass(frozen=True, slots=True)
class ReceiverLost:
    """The receiver is dead or silent for too long; its unanswered calls are given up."""

    receiver: ReceiverId
    incarnation: Incarnation
    """Of the process that is lost, as far as known; 0 when not known."""
    detail: str


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """The owner is dead or silent for too long; its unanswered calls are given up."""

    owner: OwnerId
    detail: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The attempt ran longer than ArmDeadline allowed."""

    attempt: AttemptId


# ---------------------------------------------------------------------------------------------- events: control plane

ControlReply = Acquired | ControlView | Prepared | Committed | Killed | Refused


@dataclass(frozen=True, slots=True)
class ControlReplied:
    """The control plane answered the outstanding call."""

    reply: ControlReply


@dataclass(frozen=True, slots=True)
class ControlUnknown:
    """No answer to the outstanding call came: it may have taken effect, or may still until its deadline."""


@dataclass(frozen=True, slots=True)
class CommitDeadlinePassed:
    """Answer to WaitCommitDeadline: the own clock is past the commit's deadline plus the skew bound (D14)."""

    attempt: AttemptId


CoordinatorEvent = (
    BecomeCoordinator
    | LookAgain
    | AbortRequested
    | Surveyed
    | ReceiverAnswered
    | OwnerAnswered
    | ReceiverReported
    | OwnerReported
    | ReceiverLost
    | OwnerLost
    | DeadlinePassed
    | ControlReplied
    | ControlUnknown
    | CommitDeadlinePassed
)
AttemptEvent = (
    ReceiverAnswered
    | OwnerAnswered
    | ReceiverReported
    | OwnerReported
    | ReceiverLost
    | OwnerLost
    | DeadlinePassed
    | AbortRequested
)


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class CallReceiver:
    """Send this call until it is answered (ReceiverAnswered) or the receiver is lost (ReceiverLost)."""

    call: ReceiverCall


@dataclass(frozen=True, slots=True)
class CallOwner:
    """Send this call until it is answered (OwnerAnswered) or the owner is lost (OwnerLost)."""

    call: OwnerCall


@dataclass(frozen=True, slots=True)
class Survey:
    """Ask every known endpoint for its status, wait for the answers, feed Surveyed."""

    delayed: bool
    """Wait a heartbeat first: the same question was just answered."""


@dataclass(frozen=True, slots=True)
class ArmDeadline:
    """Feed DeadlinePassed after so long, unless another attempt began."""

    attempt: AttemptId
    seconds: float


@dataclass(frozen=True, slots=True)
class AcquireEpoch:
    """Call the control plane."""


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """Call the control plane."""

    candidate: CandidateId


@dataclass(frozen=True, slots=True)
class AskPrepare:
    """Call the control plane."""

    request: PrepareRequest


@dataclass(frozen=True, slots=True)
class AskCommit:
    """Call the control plane with a deadline of now + `within_s`, and remember it for WaitCommitDeadline."""

    epoch: Epoch
    attempt: AttemptId
    expect: Record
    new: Record
    within_s: float


@dataclass(frozen=True, slots=True)
class WaitCommitDeadline:
    """Wait until the own clock is past the commit's deadline plus the skew bound; then feed CommitDeadlinePassed."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class AskKill:
    """Call the control plane."""

    epoch: Epoch
    candidate: CandidateId


@dataclass(frozen=True, slots=True)
class AskBootstrap:
    """Call the control plane."""

    epoch: Epoch
    record: Record


@dataclass(frozen=True, slots=True)
class Cleanup:
    """Delete payloads, manifests and relay state of every attempt up to this one."""

    through: AttemptId


# ------------------------------------------------------------------------------- effects: what a user of it looks at


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """One attempt is over: acknowledged when `reason` is empty."""

    attempt: AttemptId
    reason: str


@dataclass(frozen=True, slots=True)
class VersionCommitted:
    """The record is durable; baselines and gates follow."""

    record: Record


@dataclass(frozen=True, slots=True)
class TransitionEnded:
    """Baselines are updated, the candidate is thawed, gates are open."""

    version: Version
    candidate: CandidateId


@dataclass(frozen=True, slots=True)
class TransitionAborted:
    """The candidate is dead and dropped; an operator should read why."""

    candidate: CandidateId
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """Nothing is left to do for this record and the endpoints that answer."""

    record: Record


@dataclass(frozen=True, slots=True)
class Held:
    """Progress needs something from outside; the coordinator looks again every heartbeat."""

    reason: str


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """Another coordinator took over, or this one contradicts the control plane: it does nothing any more."""

    reason: str


Outcome = AttemptEnded | VersionCommitted | TransitionEnded | TransitionAborted | Ready | Held | SteppedDown
CoordinatorEffect = (
    Emit
    | CallReceiver
    | CallOwner
    | Survey
    | ArmDeadline
    | AcquireEpoch
    | ReadRecord
    | AskPrepare
    | AskCommit
    | WaitCommitDeadline
    | AskKill
    | AskBootstrap
    | Cleanup
    | Outcome
)
