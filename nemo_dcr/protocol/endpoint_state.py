"""State, events and effects of a receiver endpoint: one rank of one engine instance.

Events are what the runtime observed, in one order. Effects are what it then does, in the order given; the outcome of
StartIntake, PermitApply, Flush and Drain comes back as later events. Nothing here blocks.

The gate of the rank that admits requests (rank 0 of an instance) is the gate of the instance: its requests run on all
ranks. Other ranks have a gate without requests. That is why the coordinator sends open_apply only after every required
rank is quiet, and takes an instance into an attempt only as a whole.

Paper: Section 6.3; Section 7 (gate); Appendix B   Spec: rcv
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_dcr.ids import NO_ATTEMPT, AttemptId, Member, OwnerId, PayloadKey
from nemo_dcr.protocol.messages import PrepareReceiver, ReceiverCall, ReceiverReply, ReceiverReport, StopReceiver
from nemo_dcr.protocol.tags import Tag
from nemo_dcr.trace import Emit


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """What one owner's manifest says."""

    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Waiting:
    """A call whose reply waits for a drain."""

    call_id: int
    call: PrepareReceiver | StopReceiver


@dataclass(frozen=True, slots=True)
class EndpointState:
    """Everything that one receiver knows. Lost with the process; a new process has a new incarnation."""

    member: Member
    ranks: int
    revision: int = 0
    tag: Tag = field(default_factory=Tag)
    loaded_digest: bytes = b""
    """Digest of the checkpoint that storage was loaded from, until the first write; empty when unknown."""
    gate_open: bool = False
    requests: frozenset[str] = frozenset()
    asleep: bool = False
    attempt: AttemptId = NO_ATTEMPT
    """The installed attempt (att)."""
    fenced: AttemptId = NO_ATTEMPT
    """stop_and_wait was seen for an attempt up to this id: none of them may be installed later."""
    current: PrepareReceiver | None = None
    """The prepare that installed `attempt`."""
    install: PrepareReceiver | None = None
    """A prepare that waits for the drain of `attempt`."""
    waiting: tuple[Waiting, ...] = ()
    seen: Mapping[OwnerId, Mapping[int, bytes]] = field(default_factory=dict)
    """Accepted payloads of `attempt`: owner, payload number, digest (the deduplication set)."""
    manifests: Mapping[OwnerId, ManifestEntry] = field(default_factory=dict)
    pending: frozenset[PayloadKey] = frozenset()
    """Accepted and not yet applied."""
    writing: frozenset[PayloadKey] = frozenset()
    """Permitted to write; the outcome is not known yet."""
    apply_open: bool = False
    started: bool = False
    """The first write of `attempt` was permitted, and the tag lowered for it."""
    flushing: bool = False
    acked: bool = False
    applied_digest: bytes = b""
    stopped: bool = False
    draining: bool = False
    drained: bool = True
    """Nothing of `attempt` can take effect any more; of a finish attempt or a proved restore nothing ever can."""
    failure: str = ""


# ------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Called:
    """A control call arrived. `call_id` names it for the reply; each delivery of a repeated call has its own."""

    call_id: int
    call: ReceiverCall


@dataclass(frozen=True, slots=True)
class PayloadStaged:
    """A payload arrived and its digest, header and bounds are valid. It is not decoded yet."""

    key: PayloadKey
    digest: bytes


@dataclass(frozen=True, slots=True)
class PayloadRejected:
    """A payload of this attempt is missing or not valid; nothing of it was used."""

    attempt: AttemptId
    detail: str


@dataclass(frozen=True, slots=True)
class ManifestSeen:
    """END of one owner: how many payloads there are, and the manifest's digest over them."""

    attempt: AttemptId
    owner: OwnerId
    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class ApplyRequested:
    """The apply thread wants to write these staged payloads next. It writes only after PermitApply."""

    attempt: AttemptId
    keys: tuple[PayloadKey, ...]


@dataclass(frozen=True, slots=True)
class ItemApplied:
    """One item of a permitted payload took effect; recorded, no other meaning."""

    attempt: AttemptId
    key: PayloadKey
    name: str
    """Canonical tensor name."""


@dataclass(frozen=True, slots=True)
class PayloadsApplied:
    """All items of these permitted payloads were written; device work may still be queued until the flush."""

    attempt: AttemptId
    keys: tuple[PayloadKey, ...]


@dataclass(frozen=True, slots=True)
class ApplyFailed:
    """A loader condition, a write or a post-apply check failed."""

    attempt: AttemptId
    detail: str


@dataclass(frozen=True, slots=True)
class Flushed:
    """The device is synchronised and the optional checks passed."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Drained:
    """Intake is off, the queue is dropped, and every issued write of the attempt took effect or never will."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A request wants to start; answered by AdmitRequest or RefuseRequest."""

    request: str


@dataclass(frozen=True, slots=True)
class RequestDone:
    """An admitted request ended, in any way. Ignored when it does not run."""

    request: str


@dataclass(frozen=True, slots=True)
class EngineSlept:
    """The engine sleeps: no writes, no requests. `keeps_storage` is false when weights were released."""

    keeps_storage: bool


@dataclass(frozen=True, slots=True)
class EngineWoke:
    """The engine is back; its gate stays closed until the coordinator opens it."""


EndpointEvent = (
    Called
    | PayloadStaged
    | PayloadRejected
    | ManifestSeen
    | ApplyRequested
    | ItemApplied
    | PayloadsApplied
    | ApplyFailed
    | Flushed
    | Drained
    | RequestArrived
    | RequestDone
    | EngineSlept
    | EngineWoke
)


# ------------------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer one call."""

    call_id: int
    reply: ReceiverReply


@dataclass(frozen=True, slots=True)
class PushReport:
    """Staged, acknowledged or failed: tell the coordinator now instead of at its next status call. May be lost."""

    report: ReceiverReport


@dataclass(frozen=True, slots=True)
class StartIntake:
    """Subscribe to the payloads of these owners under this attempt."""

    attempt: AttemptId
    owners: tuple[OwnerId, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The payload is new: keep it for application. A staged payload without this effect is dropped undecoded."""

    key: PayloadKey


@dataclass(frozen=True, slots=True)
class WakeApply:
    """Writes are allowed from now on: the apply thread may ask."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class PermitApply:
    """Write these payloads now; storage is marked dirty already (D25)."""

    attempt: AttemptId
    keys: tuple[PayloadKey, ...]


@dataclass(frozen=True, slots=True)
class DenyApply:
    """Do not write; ask again after the next WakeApply, or never when the attempt was stopped."""

    attempt: AttemptId
    keys: tuple[PayloadKey, ...]


@dataclass(frozen=True, slots=True)
class Flush:
    """Synchronise the device and run the optional checks; then feed Flushed or ApplyFailed."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop intake, drop the queue, wait for issued writes and synchronise the device; then feed Drained."""

    attempt: AttemptId


@dataclass(frozen=True, slots=True)
class SetGate:
    """Admit requests from now on, or stop admitting."""

    open: bool


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """Start the request."""

    request: str


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """The gate is closed or the name is taken: hold the request or send it elsewhere."""

    request: str


EndpointEffect = (
    Emit
    | Reply
    | PushReport
    | StartIntake
    | Stage
    | WakeApply
    | PermitApply
    | DenyApply
    | Flush
    | Drain
    | SetGate
    | AdmitRequest
    | RefuseRequest
)
