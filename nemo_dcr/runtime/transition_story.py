"""What a coordinator did, as entries of a chronicle and as one line for each transition.

It looks at every effect of the transition machine, on the coordinator's thread, and changes nothing. A transition that
ended is one line at INFO, with its figures as fields of the log record for programs (`nemo_dcr_...`); a transition that
was given up is told by whoever runs the coordinator, with what to do about it.
Not handled: what happens at endpoints (they tell their own part).

Paper: Section 6.3; Algorithm B.2   Spec: StartAttempt, ResolveCommit, RollForward
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Epoch, Version
from nemo_dcr.protocol.coordinator_events import (
    AttemptEnded,
    CallOwner,
    CallReceiver,
    CoordinatorEffect,
    SteppedDown,
    TransitionAborted,
    TransitionEnded,
    VersionCommitted,
)
from nemo_dcr.protocol.messages import PrepareOwner, PrepareReceiver
from nemo_dcr.record import DELTA_MODES
from nemo_dcr.runtime.chronicle import (
    AttemptBegan,
    AttemptOver,
    CandidateGivenUp,
    CommitResolved,
    SteppedAside,
    Told,
    TookOver,
    TransitionOver,
    VersionDurable,
    tell_nobody,
)
from nemo_dcr.runtime.timings import now as wall
from nemo_dcr.trace import Action, Emit

logger = logging.getLogger(__name__)

_DELTA = frozenset(mode.value for mode in DELTA_MODES)


class TransitionStory:
    """Takes effects of one coordinator by `see`. Used by one thread."""

    def __init__(self, told: Told = tell_nobody, *, now: Callable[[], float] = wall) -> None:
        """`told` gets the entries; `now` gives seconds since the epoch."""
        self._told = told
        self._now = now
        self._started: Emit | None = None
        self._candidate = NO_CANDIDATE
        self._began = 0.0
        self._attempts: list[AttemptId] = []
        self._reasons: list[str] = []
        self._committed = (AttemptId(0), 0)
        self._sent: AttemptId | None = None
        """The attempt whose commit was asked for and has no outcome yet."""

    def see(self, effect: CoordinatorEffect) -> None:
        """Take note of one effect."""
        at = self._now()
        match effect:
            case Emit(Action.BECOME_COORDINATOR, _, _, post):
                self._told(TookOver(at=at, epoch=Epoch(int(post["epoch"] or 0))))
            case Emit(Action.START_ATTEMPT):
                self._started = effect
            case CallReceiver(PrepareReceiver(candidate=candidate)) | CallOwner(PrepareOwner(candidate=candidate)):
                self._begin(at, candidate)  # the line of the attempt names no candidate, its first call does
            case AttemptEnded(attempt, reason):
                self._told(AttemptOver(at=at, attempt=attempt, reason=reason))
                if reason and attempt in self._attempts:
                    self._reasons.append(reason)
            case Emit(Action.SEND_COMMIT, attempt):
                self._sent = attempt
            case Emit(Action.RESOLVE_COMMIT, attempt, args):
                self._sent = None
                self._told(CommitResolved(at=at, attempt=attempt, outcome=str(args["outcome"])))
            case VersionCommitted(record):
                names = tuple(member.receiver for member in record.required)
                self._committed = record.attempt, len(names)
                self._told(
                    VersionDurable(
                        at=at,
                        version=record.version,
                        candidate=record.candidate,
                        attempt=record.attempt,
                        receivers=names,
                    )
                )
            case TransitionEnded(version, candidate):
                self._told(TransitionOver(at=at, version=version, candidate=candidate))
                self._say(at, version, candidate)
            case TransitionAborted(candidate, reason):
                self._told(CandidateGivenUp(at=at, candidate=candidate, reason=reason))
            case SteppedDown(reason):
                if self._sent is not None:  # it was refused, or nobody here will learn of it
                    self._told(CommitResolved(at=at, attempt=self._sent, outcome=reason))
                    self._sent = None
                self._told(SteppedAside(at=at, reason=reason))
            case _:
                pass

    def _begin(self, at: float, candidate: CandidateId) -> None:
        if self._started is None:
            return
        started, self._started = self._started, None
        args = started.args
        receivers = tuple(_name(member) for member in str(args["required"]).split(",") if member)
        self._told(
            AttemptBegan(
                at=at,
                attempt=started.attempt,
                mode=str(args["mode"]),
                gate=str(args["gate"]),
                base=Version(int(args["base"] or 0)),
                candidate=candidate,
                receivers=receivers,
                owners=len([owner for owner in str(args["owners"]).split(",") if owner]),
            )
        )
        if args["mode"] not in _DELTA:
            return
        if candidate != self._candidate:
            self._candidate, self._began, self._attempts, self._reasons = candidate, at, [], []
        self._attempts.append(started.attempt)

    def _say(self, at: float, version: Version, candidate: CandidateId) -> None:
        """The line of a transition. A coordinator that took over late knows only what it saw itself."""
        (attempt, receivers), known = self._committed, candidate == self._candidate
        attempts, reasons = (self._attempts, self._reasons) if known else ([], [])
        seconds = at - self._began if known else None
        text = f"version {version} (candidate {candidate!r}): transition ended"
        if attempt in attempts:
            text += f", committed by attempt {attempt} on {receivers} receivers"
        text += f", {len(attempts)} {'attempt' if len(attempts) == 1 else 'attempts'} seen here"
        text += "" if seconds is None else f", {seconds:.3f} s"
        text += "".join(f"; failed: {reason}" for reason in reasons)
        fields = {"version": version, "candidate": candidate, "attempts": len(attempts), "seconds": seconds}
        logger.info(
            "%s", text, extra={f"nemo_dcr_{name}": value for name, value in {**fields, "failures": reasons}.items()}
        )


def _name(member: str) -> str:
    """`engine/0@3` without its incarnation."""
    return member.rsplit("@", 1)[0]
