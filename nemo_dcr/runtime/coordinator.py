"""The coordinator process: performs the effects of the transition machine and feeds it what happens.

One thread, one loop. Each round sends every endpoint its oldest unanswered call, or asks for its status, and feeds the
answers. A broken connection is a lost endpoint at once; silence is one after `lost_after_s`. Control-plane calls are
made in place: their outcome is a reply, or unknown when the back end could not be reached.
Not handled: when to begin a transition (the trainer freezes a candidate; `look` notices it); which endpoints exist.

Paper: Section 6.3; Appendix B   Spec: CoordinatorProgress   Decisions: D10, D14, D22
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from nemo_dcr.config import GateMode
from nemo_dcr.errors import AttemptFailed, ControlPlaneUnavailable, EndpointLost
from nemo_dcr.ids import AttemptId, Incarnation, OwnerId, ReceiverId
from nemo_dcr.protocol import transition
from nemo_dcr.protocol.coordinator_events import (
    AcquireEpoch,
    ArmDeadline,
    AskBootstrap,
    AskCommit,
    AskKill,
    AskPrepare,
    BecomeCoordinator,
    CallOwner,
    CallReceiver,
    Cleanup,
    CommitDeadlinePassed,
    ControlReplied,
    ControlReply,
    ControlUnknown,
    CoordinatorEffect,
    CoordinatorEvent,
    DeadlinePassed,
    LookAgain,
    Outcome,
    OwnerAnswered,
    OwnerLost,
    OwnerReported,
    ReadRecord,
    ReceiverAnswered,
    ReceiverLost,
    ReceiverReported,
    Survey,
    Surveyed,
    WaitCommitDeadline,
)
from nemo_dcr.protocol.messages import (
    OwnerCall,
    OwnerReply,
    OwnerReport,
    OwnerStatus,
    PrepareOwner,
    ReceiverCall,
    ReceiverReply,
    ReceiverReport,
    ReceiverStatus,
)
from nemo_dcr.protocol.transition_state import CoordinatorConfig, CoordinatorState
from nemo_dcr.record import CommitRequest, ControlPlane
from nemo_dcr.runtime.chronicle import Told, tell_nobody
from nemo_dcr.runtime.endpoints import Endpoints
from nemo_dcr.runtime.rpc import NoReply
from nemo_dcr.runtime.transition_story import TransitionStory
from nemo_dcr.trace import Emit, LamportClock, NullTracer, Tracer
from nemo_dcr.transport.base import Transport

logger = logging.getLogger(__name__)

OUTCOMES_KEPT = 256
"""Outcomes that wait for `run_until`; more push the oldest out, so that an unasked coordinator does not grow."""

Observer = Callable[[CoordinatorEffect], None]


class Coordinator:
    """Runs transitions over endpoints, a control plane and a transport. Used by one thread."""

    def __init__(
        self,
        config: CoordinatorConfig,
        endpoints: Endpoints,
        control: ControlPlane,
        transport: Transport,
        *,
        classes: Mapping[str, str] | None = None,
        tracer: Tracer | None = None,
        clock: LamportClock | None = None,
        observer: Observer = lambda effect: None,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        told: Told = tell_nobody,
    ) -> None:
        """`classes`: path class of each canonical name over all receivers; `observer` sees every effect first.

        `now` is the wall clock that commit deadlines are written in; `monotonic` and `sleep` pace everything else.
        `told` gets the entries of its chronicle; each transition that ends is a line of the log too, at INFO.
        """
        self.classes = dict(classes or {})
        self._refit = config.refit
        self._endpoints = endpoints
        self._control = control
        self._transport = transport
        self._tracer = tracer or NullTracer()
        self._clock = clock or LamportClock()
        self._observer = observer
        self._story = TransitionStory(told, now=now)
        self._now = now
        self._monotonic = monotonic
        self._sleep = sleep
        self._state = transition.start(config)
        self._events: deque[CoordinatorEvent] = deque()
        self._outcomes: deque[Outcome] = deque(maxlen=OUTCOMES_KEPT)
        self._unknown = False
        self._surveys = False
        self._known: dict[ReceiverId, Incarnation] = {}
        self._receiver_calls: dict[ReceiverId, deque[ReceiverCall]] = {}
        self._owner_calls: dict[OwnerId, deque[OwnerCall]] = {}
        self._heard: dict[str, float] = {}
        self._lost: set[str] = set()
        self._attempt_deadline: tuple[AttemptId, float] | None = None
        self._commit_deadline = 0.0

    # -------------------------------------------------------------------------------------------------- commands

    def become(self) -> None:
        """Take over: acquire an epoch, read the record, and do what it asks for."""
        self._unknown = self._surveys = False
        self.feed(BecomeCoordinator())

    def look(self) -> None:
        """Something may have changed: a candidate was frozen, a receiver came."""
        self.feed(LookAgain())

    def set_gate(self, gate: GateMode) -> None:
        """Use this gate from the next prepare on."""
        config = self._state.config
        self._state = replace(self._state, config=replace(config, refit=replace(config.refit, gate=gate)))

    @property
    def state(self) -> CoordinatorState:
        """The machine as it stands; a value, so any thread may read it."""
        return self._state

    def owner_reports(self) -> tuple[OwnerReport, ...]:
        """Newest reports of the owners, for progress displays."""
        running = self._state.attempt
        newest: dict[OwnerId, OwnerReport] = {}
        for report in (*self._state.owners.values(), *(() if running is None else running.owners.values())):
            known = newest.get(report.owner)
            if known is None or (report.incarnation, report.revision) > (known.incarnation, known.revision):
                newest[report.owner] = report
        return tuple(newest[owner] for owner in sorted(newest))

    def run_until(
        self,
        done: Callable[[Outcome], bool],
        timeout_s: float,
        *,
        each_round: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run rounds until an outcome satisfies `done`, and return it; outcomes of earlier rounds come first.

        Raises: EndpointLost naming the coordinator when `timeout_s` seconds pass first.
        """
        deadline = self._monotonic() + timeout_s
        while self._monotonic() < deadline:
            while self._outcomes:
                outcome = self._outcomes.popleft()
                if done(outcome):
                    return outcome
            self.round()
            if each_round is not None:
                each_round()
        raise EndpointLost("coordinator", f"no end after {timeout_s:g} s; it is {self._state.phase} {self._state.held}")

    def feed(self, event: CoordinatorEvent) -> None:
        """Step the machine and perform its effects; events that they cause follow in order."""
        self._events.append(event)
        while self._events:
            self._state, effects = transition.step(self._state, self._events.popleft())
            for effect in effects:
                self._observer(effect)
                self._story.see(effect)
                if isinstance(effect, Outcome):
                    self._outcomes.append(effect)
                self._perform(effect)

    # ---------------------------------------------------------------------------------------------------- rounds

    def round(self) -> None:
        """Ask every endpoint once and feed the answers; then wait until the next heartbeat if nothing is open.

        What the machine wants to wait for is done here and not inside `feed`: a coordinator that is held looks again
        and again, and its caller gets a turn in between.
        """
        begin = self._monotonic()
        if self._unknown:
            self._unknown = False
            self._sleep(self._refit.heartbeat_s)
            self.feed(ControlUnknown())
        if self._surveys:
            self._surveys = False
            self._sleep(self._refit.heartbeat_s)
            self.feed(self._survey())
            return
        self._notice_departures()
        if self._attempt_deadline is not None and begin > self._attempt_deadline[1]:
            attempt, self._attempt_deadline = self._attempt_deadline[0], None
            self.feed(DeadlinePassed(attempt))
        receivers: dict[ReceiverId, ReceiverCall] = {}
        for receiver in self._endpoints.receivers():
            open_calls = self._receiver_calls.get(receiver)
            receivers[receiver] = open_calls[0] if open_calls else ReceiverStatus(receiver)
        owners: dict[OwnerId, OwnerCall] = {}
        for owner in self._endpoints.owners():
            owner_calls = self._owner_calls.get(owner)
            owners[owner] = owner_calls[0] if owner_calls else OwnerStatus(owner)
        receiver_answers, owner_answers = self._endpoints.ask(receivers, owners, self._patience)
        for receiver, answer in receiver_answers.items():
            self._take_receiver(receiver, receivers[receiver], answer)
        for owner, owner_answer in owner_answers.items():
            self._take_owner(owner, owners[owner], owner_answer)
        if not any(self._receiver_calls.values()) and not any(self._owner_calls.values()):
            self._sleep(max(0.0, self._refit.heartbeat_s - (self._monotonic() - begin)))

    def _notice_departures(self) -> None:
        """A receiver that left the endpoints answers nothing any more: that is a loss, not a silence to wait out."""
        known = self._endpoints.receivers()
        for receiver in [receiver for receiver in self._known if receiver not in known]:
            self._receiver_calls.pop(receiver, None)
            self.feed(ReceiverLost(receiver, self._known[receiver], "it left the endpoints"))
        self._known = known

    @property
    def _patience(self) -> float:
        """Limit of one round: short enough that a silent endpoint is noticed in time."""
        return min(self._refit.call_timeout_s, self._refit.lost_after_s / 2)

    def _take_receiver(self, receiver: ReceiverId, call: ReceiverCall, answer: ReceiverReply | NoReply) -> None:
        if isinstance(answer, NoReply):
            incarnation = self._endpoints.receivers().get(receiver, Incarnation(0))
            if self._is_lost(receiver, answer):
                self._receiver_calls.pop(receiver, None)
                self.feed(ReceiverLost(receiver, incarnation, answer.reason))
            return
        self._hear(receiver)
        if isinstance(call, ReceiverStatus):
            self.feed(ReceiverReported(answer.report))
            return
        open_calls = self._receiver_calls.get(receiver)
        if open_calls and open_calls[0] == call:
            open_calls.popleft()
        self.feed(ReceiverAnswered(call, answer))

    def _take_owner(self, owner: OwnerId, call: OwnerCall, answer: OwnerReply | NoReply) -> None:
        name = _owner_name(owner)
        if isinstance(answer, NoReply):
            if self._is_lost(name, answer):
                self._owner_calls.pop(owner, None)
                self.feed(OwnerLost(owner, answer.reason))
            return
        self._hear(name)
        if isinstance(call, OwnerStatus):
            self.feed(OwnerReported(answer.report))
            return
        open_calls = self._owner_calls.get(owner)
        if open_calls and open_calls[0] == call:
            open_calls.popleft()
        self.feed(OwnerAnswered(call, answer))

    def _hear(self, name: str) -> None:
        self._heard[name] = self._monotonic()
        self._lost.discard(name)

    def _is_lost(self, name: str, answer: NoReply) -> bool:
        """True once for each silence that became too long; calls to a lost endpoint stay lost."""
        if not self._is_silent(name, answer):
            return False
        if name in self._lost and not self._has_open_calls(name):
            return False
        self._lost.add(name)
        return True

    def _is_silent(self, name: str, answer: NoReply) -> bool:
        """The connection broke, or nothing was heard for too long."""
        heard = self._heard.setdefault(name, self._monotonic())
        return answer.disconnected or self._monotonic() - heard >= self._refit.lost_after_s

    def _has_open_calls(self, name: str) -> bool:
        owner = name.removeprefix("owner ")
        if owner != name:
            return bool(self._owner_calls.get(OwnerId(int(owner))))
        return bool(self._receiver_calls.get(ReceiverId(name)))

    # --------------------------------------------------------------------------------------------------- effects

    def _perform(self, effect: CoordinatorEffect) -> None:
        match effect:
            case Emit():
                self._tracer.emit(effect)
            case CallReceiver(call):
                self._receiver_calls.setdefault(call.receiver, deque()).append(call)
            case CallOwner(call):
                if isinstance(call, PrepareOwner):
                    call = replace(call, classes=self.classes)
                self._owner_calls.setdefault(call.owner, deque()).append(call)
            case Survey(delayed):
                if delayed:
                    self._surveys = True
                else:
                    self._events.append(self._survey())
            case ArmDeadline(attempt, seconds):
                self._attempt_deadline = (attempt, self._monotonic() + seconds)
            case Cleanup(through):
                self._cleanup(through)
            case WaitCommitDeadline(attempt):
                while self._now() <= self._commit_deadline + self._refit.clock_skew_s:
                    self._sleep(0.05)
                self._events.append(CommitDeadlinePassed(attempt))
            case AcquireEpoch():
                self._ask_control(lambda clock: self._control.acquire_epoch(clock=clock))
            case ReadRecord(candidate):
                self._ask_control(lambda clock: self._control.read(candidate, clock=clock))
            case AskPrepare(request):
                self._ask_control(lambda clock: self._control.prepare(request, clock=clock))
            case AskCommit():
                self._commit_deadline = self._now() + effect.within_s
                commit = CommitRequest(effect.epoch, effect.attempt, effect.expect, effect.new, self._commit_deadline)
                self._ask_control(lambda clock: self._control.commit(commit, clock=clock))
            case AskKill(epoch, candidate):
                self._ask_control(lambda clock: self._control.kill(epoch, candidate, clock=clock))
            case AskBootstrap(epoch, record):
                self._ask_control(lambda clock: self._control.bootstrap(epoch, record, clock=clock))
            case _:
                pass  # for whoever runs this coordinator, see run_until

    def _cleanup(self, through: AttemptId) -> None:
        try:
            self._transport.cleanup(through)
        except AttemptFailed as problem:
            # The transition is over and correct; every later cleanup tries again.
            logger.warning("payloads up to attempt %d are left behind: %s", through, problem)

    def _ask_control(self, ask: Callable[[int], ControlReply]) -> None:
        try:
            reply = ask(self._clock.tick())
        except ControlPlaneUnavailable:
            self._unknown = True  # fed in the next round: what follows may be the same call again
        else:
            self._clock.merge(reply.clock)
            self._events.append(ControlReplied(reply))

    def _survey(self) -> Surveyed:
        """Ask everybody for a report; an endpoint that does not answer is asked again until it counts as lost."""
        receivers: dict[ReceiverId, ReceiverStatus] = {r: ReceiverStatus(r) for r in self._endpoints.receivers()}
        owners: dict[OwnerId, OwnerStatus] = {o: OwnerStatus(o) for o in self._endpoints.owners()}
        receiver_reports: list[ReceiverReport] = []
        owner_reports: list[OwnerReport] = []
        while receivers or owners:
            receiver_answers, owner_answers = self._endpoints.ask(receivers, owners, self._patience)
            for receiver, answer in receiver_answers.items():
                if not isinstance(answer, NoReply):
                    self._hear(receiver)
                    receiver_reports.append(answer.report)
                if not isinstance(answer, NoReply) or self._is_silent(receiver, answer):
                    del receivers[receiver]
            for owner, owner_answer in owner_answers.items():
                if not isinstance(owner_answer, NoReply):
                    self._hear(_owner_name(owner))
                    owner_reports.append(owner_answer.report)
                if not isinstance(owner_answer, NoReply) or self._is_silent(_owner_name(owner), owner_answer):
                    del owners[owner]
        return Surveyed(tuple(receiver_reports), tuple(owner_reports))


def _owner_name(owner: OwnerId) -> str:
    return f"owner {owner}"
