"""Schedules that bring a weakened guard to the point where it matters, where a drawn walk would need luck.

Each starts with everybody serving version 0, does a few things at chosen moments, and lets the cluster settle. Sound
code keeps every property on all of them. `names` are the properties that are looked at after every step.

Spec: Mutants
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_tests.adversary import Adversary
from nemo_dcr.ids import OwnerId, ReceiverId
from nemo_dcr.protocol import messages
from nemo_dcr.protocol.owner_state import StreamStatus
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.protocol.transition_state import Phase
from tests.unit.protocol.cluster import Step
from tests.unit.protocol.invariants import check

Names = tuple[str, ...]
Schedule = Callable[[Adversary, Names], None]
OWNER = OwnerId(0)
LIMIT = 3000
"""Steps until something is believed never to happen."""


def kinds(*names: str) -> Callable[[Step], bool]:
    """Steps of these kinds."""
    return lambda step: step[0] in names


def of_coordinator(c: int) -> Callable[[Step], bool]:
    """What a coordinator does, and the calls that it sent."""
    own = ("send", "survey", "control", "control_reply", "wait", "look", "poll", "poll_owner", "lost")
    return lambda step: (step[0] in own and step[1] == c) or (step[0] == "call" and step[1][0] == c)


def calls_to(**field: Any) -> Callable[[Step], bool]:
    """Deliveries of calls to one endpoint: `receiver=` or `owner=`."""
    ((name, value),) = field.items()
    return lambda step: step[0] == "call" and getattr(step[1][1], name, None) == value


def step_until(
    c: Adversary, names: Names, wanted: Callable[[], bool], *, avoid: Callable[[Step], bool] = lambda step: False
) -> None:
    """Steps without faults, oldest first, until `wanted`, or until nothing is left to do."""
    for _ in range(LIMIT):
        if wanted():
            return
        steps = [step for step in c.progress() if not avoid(step)]
        if not steps:
            return
        c.do(steps[0])
        check(c, names)


def settle(c: Adversary, names: Names) -> None:
    step_until(c, names, c.settled)


def phase(c: Adversary, of: int = 0) -> Phase:
    return c.coordinators[of].state.phase


def until_phase(c: Adversary, names: Names, *wanted: Phase, of: int = 0, **rest: Any) -> None:
    step_until(c, names, lambda: phase(c, of) in wanted, **rest)


def receiver(c: Adversary, name: str) -> Any:
    return c.receivers[ReceiverId(name)]


def is_dirty(r: Any) -> bool:
    return r.state.tag.kind is TagKind.DIRTY


def again(c: Adversary, names: Names, kind: type) -> None:
    """Every call of a kind that was ever sent arrives once more."""
    for message in [message for message in c.sent if isinstance(message[1], kind)]:
        c._do_call(message, keep=True)
        check(c, names)


# ------------------------------------------------------------------------------------------- attempts and retries


def expire_after_first_write(c: Adversary, names: Names) -> None:
    """The first attempt fails when one receiver has written one of its items."""
    c.train(0b111)
    step_until(c, names, lambda: any(is_dirty(r) and len(r.issued) == 1 for r in c.receivers.values()))
    c.expire(0)
    settle(c, names)


def payload_arrives_twice(c: Adversary, names: Names) -> None:
    """A payload arrives again after it was written and before the receiver acknowledges."""
    c.train(0b001)
    step_until(c, names, lambda: is_dirty(receiver(c, "e0/0")), avoid=kinds("manifest"))
    step_until(c, names, lambda: not receiver(c, "e0/0").state.pending, avoid=kinds("manifest"))
    for key in c.payloads_of(2):
        c._do_payload(ReceiverId("e0/0"), key)
        check(c, names)
    settle(c, names)


def attempt_is_replaced(c: Adversary, names: Names) -> None:
    """An attempt expires while its writes are issued, and they take effect as late as they can."""
    c.train(0b111)
    _expire_with_issued_writes(c, names, "e0/0")


def restore_is_replaced(c: Adversary, names: Names) -> None:
    """The same with a restore."""
    c.restart_instance("e1")
    _expire_with_issued_writes(c, names, "e1/0")


def _expire_with_issued_writes(c: Adversary, names: Names, name: str) -> None:
    step_until(c, names, lambda: bool(receiver(c, name).issued))
    c.expire(0)
    step_until(c, names, c.settled, avoid=kinds("write"))
    settle(c, names)


def abort_then_retry_of_next(c: Adversary, names: Names) -> None:
    """e0 holds a part of an aborted candidate when the next candidate's first attempt fails too."""
    c.train(0b001)
    step_until(c, names, lambda: is_dirty(receiver(c, "e0/0")) and not receiver(c, "e0/0").issued)
    c.abort(0)
    step_until(c, names, lambda: not c.owners[OWNER].state.candidate)
    c.train(0b100)
    step_until(c, names, lambda: is_dirty(receiver(c, "e1/0")))
    c.expire(0)
    settle(c, names)


def late_payload_after_survey(c: Adversary, names: Names) -> None:
    """A zombie's payload makes e0 dirty after the new coordinator saw it clean and before it prepares it."""
    c.train(0b001)
    held = kinds("payload", "manifest")
    step_until(c, names, lambda: receiver(c, "e0/0").state.apply_open, avoid=held)
    step_until(c, names, lambda: bool(c.payloads_of(2)), avoid=held)
    c.coordinators[0].up = False
    c.become(1)
    until_phase(c, names, Phase.SURVEYING, of=1, avoid=held)
    c.abort(1)
    step_until(c, names, lambda: not c.owners[OWNER].state.candidate, avoid=held)
    c.train(0b100)
    until_phase(c, names, Phase.PREPARING, of=1, avoid=held)
    for key in c.payloads_of(2):
        c._do_payload(ReceiverId("e0/0"), key)
    c._do_apply(ReceiverId("e0/0"))
    while receiver(c, "e0/0").issued:
        c._do_write(ReceiverId("e0/0"))
        check(c, names)
    settle(c, names)


def restart_during_dense_prepare(c: Adversary, names: Names) -> None:
    """e1 restarts while the prepare of a dense attempt is on its way to it."""
    c.train(0b111)
    c.lose_baseline(OWNER)
    until_phase(c, names, Phase.RUNNING)
    step_until(c, names, lambda: False, avoid=calls_to(receiver="e1/0"))
    c.restart_instance("e1")
    settle(c, names)


def step_inside_transition(c: Adversary, names: Names) -> None:
    """The trainer asks for another optimizer step after a partial first attempt, which then fails."""
    c.train(0b001)
    step_until(c, names, lambda: any(is_dirty(r) and not r.issued for r in c.receivers.values()))
    c.step_again(2)
    c.expire(0)
    settle(c, names)


# --------------------------------------------------------------------- the set that an acknowledgement speaks for


def manifest_of_the_attempt_before(c: Adversary, names: Names) -> None:
    """A candidate that changes nothing is committed; its empty manifest arrives in the attempt of the next one."""
    c.train(5)
    settle(c, names)
    c.train(0b111)
    held = kinds("payload", "manifest")
    step_until(c, names, lambda: receiver(c, "e0/0").state.attempt == 3, avoid=held)
    c._do_manifest(ReceiverId("e0/0"), (c.record().attempt, OWNER))
    check(c, names)
    step_until(c, names, c.settled, avoid=held)
    settle(c, names)


def damaged_payload(c: Adversary, names: Names) -> None:
    """A payload arrives with a changed byte."""
    _arrives(c, names, damaged=True)


def foreign_payload(c: Adversary, names: Names) -> None:
    """A payload arrives that is whole, and not the one that its owner listed."""
    _arrives(c, names, damaged=False)


def _arrives(c: Adversary, names: Names, *, damaged: bool) -> None:
    c.train(0b111)
    step_until(c, names, lambda: bool(c.payloads_of(2)) and receiver(c, "e0/0").state.attempt == 2)
    c.arrive(ReceiverId("e0/0"), c.payloads_of(2)[0], damaged=damaged)
    check(c, names)
    settle(c, names)


# ------------------------------------------------------------------------------------------------------------ commit


def prepare_never_arrives(c: Adversary, names: Names) -> None:
    """e1 acknowledged the attempt before; the prepare of the next one reaches it late."""
    c.train(0b111)
    until_phase(c, names, Phase.RUNNING)
    c._do_poll(0, ReceiverId("e1/0"))
    step_until(c, names, lambda: len(c.versions) > 1, avoid=calls_to(receiver="e1/0"))
    settle(c, names)


def commit_request_arrives_twice(c: Adversary, names: Names) -> None:
    """The same commit request reaches the control plane twice."""
    c.train(0b111)
    step_until(c, names, lambda: bool(c.commits))
    c._execute(c.commits[-1])
    check(c, names)
    settle(c, names)


def commit_of_a_zombie(c: Adversary, names: Names) -> None:
    """A new coordinator read the record when the commit request of the old one arrives."""
    c.train(0b111)
    until_phase(c, names, Phase.COMMITTING)
    c.become(1)
    until_phase(c, names, Phase.PREPARING, of=1, avoid=of_coordinator(0))
    c.do(("control", 0))
    check(c, names)
    settle(c, names)


def prepare_of_a_zombie(c: Adversary, names: Names) -> None:
    """The old coordinator prepares a retry; that arrives when a new one prepared an attempt."""
    c.train(0b111)
    until_phase(c, names, Phase.RUNNING)
    c.expire(0)
    until_phase(c, names, Phase.PREPARING)
    c.become(1)
    until_phase(c, names, Phase.RUNNING, of=1, avoid=of_coordinator(0))
    c.do(("control", 0))
    check(c, names)
    settle(c, names)


def late_commit(c: Adversary, names: Names) -> None:
    """The reply of a commit does not come; the request arrives when the coordinator has settled the question."""
    c.train(0b111)
    until_phase(c, names, Phase.COMMITTING)
    c.unknown(0)
    until_phase(c, names, Phase.SURVEYING)
    c._do_late_control(0)
    check(c, names)
    settle(c, names)


def drop_arrives_after_takeover(c: Adversary, names: Names) -> None:
    """Coordinator 0 killed the candidate; its message to the owner is late; coordinator 1 goes on (D27)."""
    c.train(0b111)
    until_phase(c, names, Phase.RUNNING)
    c.abort(0)
    step_until(c, names, lambda: any(isinstance(call, messages.DropCandidate) for call in c.coordinators[0].calls))
    late = next((0, call) for call in c.coordinators[0].calls if isinstance(call, messages.DropCandidate))
    c.coordinators[0].up = False
    c.become(1)
    until_phase(c, names, Phase.COMMITTING, of=1)
    c._do_call(late, keep=True)
    check(c, names)
    settle(c, names)


def abort_while_committing(c: Adversary, names: Names) -> None:
    """The abort comes when the commit is on its way; calls to owners overtake it."""
    c.train(0b111)
    until_phase(c, names, Phase.COMMITTING)
    c.abort(0)
    step_until(c, names, c.settled, avoid=kinds("control"))
    settle(c, names)


# ---------------------------------------------------------------------------------------------------------- baseline


def update_overtakes_commit(c: Adversary, names: Names) -> None:
    """Whatever a committing coordinator sends to owners arrives before its commit."""
    c.train(0b111)
    until_phase(c, names, Phase.COMMITTING)
    step_until(c, names, c.settled, avoid=kinds("control"))
    settle(c, names)


def late_update_meets_new_candidate(c: Adversary, names: Names) -> None:
    """Version 1 is committed; in the next transition the tracker is lost and the old update arrives again."""
    c.train(0b111)
    settle(c, names)
    old = next(m for m in c.sent if isinstance(m[1], messages.UpdateBaseline))
    c.train(6)
    c.crash_owner(OWNER)
    c._do_call(old, keep=True)
    settle(c, names)


def baseline_lost_before_restore(c: Adversary, names: Names) -> None:
    """The tracker is lost after an owner was prepared for a restore, before it streams; the process lives on."""
    c.restart_instance("e1")
    step_until(c, names, lambda: c.owners[OWNER].state.status is StreamStatus.PREPARED)
    c.lose_baseline(OWNER)
    settle(c, names)


def baseline_lost_before_stream(c: Adversary, names: Names) -> None:
    """The tracker is lost after it was looked at, before the stream starts; the process lives on."""
    c.train(0b111)
    until_phase(c, names, Phase.RUNNING)
    c.lose_baseline(OWNER)
    settle(c, names)


def late_rebuild_meets_candidate(c: Adversary, names: Names) -> None:
    """An idle owner rebuilt its tracker; in the next transition it loses it again and the old call arrives again."""
    c.crash_owner(OWNER)
    step_until(c, names, lambda: any(isinstance(m[1], messages.RebuildBaseline) for m in c.sent))
    old = next(m for m in c.sent if isinstance(m[1], messages.RebuildBaseline))
    step_until(c, names, lambda: c.owners[OWNER].state.tracker.kind is TrackerKind.AT)
    c.train(6)
    c.crash_owner(OWNER)
    c._do_call(old, keep=True)
    while c.owners[OWNER].copying is not None:
        c.do(("copy", OWNER))
        check(c, names)
    settle(c, names)


def zombie_prepares_the_next_candidate(c: Adversary, names: Names) -> None:
    """The old coordinator's prepare reaches the owner after its candidate was dropped and another one frozen."""
    c.train(0b001)
    until_phase(c, names, Phase.RUNNING)
    late = next((0, call) for call in c.coordinators[0].calls if isinstance(call, messages.PrepareOwner))
    held = calls_to(owner=OWNER)
    step_until(c, names, lambda: all(r.state.attempt == 2 for r in c.receivers.values()), avoid=held)
    c.become(1)
    c.abort(1)
    step_until(c, names, lambda: not c.owners[OWNER].state.candidate, avoid=of_coordinator(0))
    c.train(0b110)
    c._do_call(late)
    step_until(c, names, lambda: bool(c.payloads_of(2)), avoid=of_coordinator(1))
    settle(c, names)


# ---------------------------------------------------------------------------------------------------- gate, progress


def takeover_after_commit(c: Adversary, names: Names) -> None:
    """The coordinator dies right after its commit; a new one takes over."""
    c.train(0b111)
    step_until(c, names, lambda: bool(c.commits))
    c.coordinators[0].up = False
    c.become(1)
    settle(c, names)


def close_arrives_again(c: Adversary, names: Names) -> None:
    """A copy of the call that closes an asynchronous gate arrives after the transition."""
    c.train(0b111)
    settle(c, names)
    again(c, names, messages.CloseGate)
    settle(c, names)


def late_finish_restore(c: Adversary, names: Names) -> None:
    """The FinishRestore of the bootstrap arrives again after version 1."""
    c.train(0b111)
    settle(c, names)
    again(c, names, messages.FinishRestore)
    settle(c, names)


def owner_restarts_in_transition(c: Adversary, names: Names) -> None:
    """An owner restarts with a frozen candidate: its tracker is lost until a dense attempt is committed."""
    c.train(0b111)
    until_phase(c, names, Phase.RUNNING)
    c.crash_owner(OWNER)
    settle(c, names)
