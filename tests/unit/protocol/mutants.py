"""Single weakenings of the machines: each one must make the invariant fall that it names.

A mutant replaces named functions; `schedule` drives it where a random walk would need luck. Redundant guards are
weakened together, otherwise the second one hides the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from nemo_dcr import control_rules
from nemo_dcr.ids import OwnerId, ReceiverId
from nemo_dcr.protocol import (
    alignment,
    attempt,
    endpoint,
    endpoint_fence,
    endpoint_guards,
    membership,
    owner_state,
    transition,
)
from nemo_dcr.protocol.coordinator_events import CallOwner, CallReceiver
from nemo_dcr.protocol.messages import DropCandidate, FinishRestore, OpenGate, RebuildBaseline, UpdateBaseline
from nemo_dcr.protocol.tags import Tag, TagKind, TrackerKind
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.record import AttemptMode, Decision, Killed
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import check

Patch = tuple[ModuleType, str, Callable[..., Any]]
Schedule = Callable[[Cluster, tuple[str, ...]], None]


@dataclass(frozen=True)
class Mutant:
    name: str
    invariant: str
    patches: tuple[Patch, ...]
    schedule: Schedule | None = None
    """Without one: seeded random walks."""
    faults: tuple[str, ...] = ()


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


_IS_ELIGIBLE = alignment.is_eligible
_COMMIT = transition._commit
_START = endpoint.start


def xor_like_overwrite(tag: Tag, *, mode: AttemptMode, **rest: Any) -> bool:
    return _IS_ELIGIBLE(tag, mode=AttemptMode.OVERWRITE if mode is AttemptMode.XOR else mode, **rest)


def some_acks(state: Any) -> bool:
    reports = [(m, state.receivers.get(m.receiver)) for m in state.plan.required]
    return any(r is not None and attempt.is_acked(state.plan, m, r) for m, r in reports)


def commit_and_update(state: Any, plan: Any, record: Any) -> Any:
    state, effects = _COMMIT(state, plan, record)
    early = [CallOwner(UpdateBaseline(o, plan.candidate, record.version + 1)) for o in state.config.owners]
    return state, (*effects, *early)


def commit_and_open(state: Any, plan: Any, record: Any) -> Any:
    state, effects = _COMMIT(state, plan, record)
    early = [
        CallReceiver(OpenGate(m.receiver, m.incarnation, plan.attempt, plan.attempt, record.version + 1))
        for m in plan.required
    ]
    return state, (*effects, *early)


def drained_at_once(state: Any) -> Any:
    return endpoint_fence.drained(replace(state, stopped=True), state.attempt)


def start_clean(member: Any, **rest: Any) -> Any:
    state, effects = _START(member, **rest)
    return replace(state, tag=Tag(TagKind.CLEAN)), effects


def stays_clean(tag: Tag, call: Any) -> Tag:
    return tag


def open_any(state: Any, call: Any) -> bool:
    return state.tag == Tag(TagKind.CLEAN, call.version) or alignment.is_committed_done(state.tag, call.record_attempt)


def gate_only(state: Any) -> bool:
    return not state.gate_open


def update_without_match(state: Any, call: Any) -> bool:
    return state.tracker.kind is TrackerKind.LOST or state.tracker.version < call.version


def any_mixture(tag: Tag, version: Any, candidate: Any) -> bool:
    return tag.kind in (TagKind.DIRTY, TagKind.DONE)


def lost_tracker(state: Any, call: Any) -> bool:
    return state.tracker.kind is TrackerKind.LOST


# ---------------------------------------------------------------------------------------------------------- schedules


def step_until(c: Cluster, names: tuple[str, ...], wanted: Callable[[], bool], *, avoid: tuple[str, ...] = ()) -> None:
    """Fault-free steps, oldest first, until `wanted`, or until nothing is left to do."""
    for _ in range(3000):
        if wanted():
            return
        steps = [step for step in c.progress() if step[0] not in avoid]
        if not steps:
            return
        c.do(steps[0])
        check(c, names)


def receiver(c: Cluster, name: str) -> Any:
    return c.receivers[ReceiverId(name)]


def expire_after_first_write(c: Cluster, names: tuple[str, ...]) -> None:
    """The first attempt fails when one receiver has written one of its items."""
    c.train(0b111)
    step_until(
        c, names, lambda: any(r.state.tag.kind is TagKind.DIRTY and len(r.issued) == 1 for r in c.receivers.values())
    )
    c.expire(0)
    step_until(c, names, c.settled)


def expire_with_issued_writes(c: Cluster, names: tuple[str, ...]) -> None:
    """The attempt fails while writes are issued, and they take effect as late as they can."""
    c.train(0b111)
    step_until(c, names, lambda: any(r.issued for r in c.receivers.values()))
    c.expire(0)
    step_until(c, names, c.settled, avoid=("write",))
    step_until(c, names, c.settled)


def update_overtakes_commit(c: Cluster, names: tuple[str, ...]) -> None:
    """Whatever a committing coordinator sends to owners arrives before its commit."""
    c.train(5)
    step_until(c, names, lambda: c.coordinators[0].state.phase is Phase.COMMITTING)
    for call in [call for call in c.coordinators[0].calls if hasattr(call, "owner")]:
        c._do_call((0, call), keep=True)
        check(c, names)
    step_until(c, names, c.settled, avoid=("control",))
    step_until(c, names, c.settled)


def late_finish_restore(c: Cluster, names: tuple[str, ...]) -> None:
    """The FinishRestore of the bootstrap arrives again after version 1."""
    old = [message for message in c.sent if isinstance(message[1], FinishRestore)]
    c.train(5)
    step_until(c, names, c.settled)
    for message in old:
        c._do_call(message, keep=True)
        check(c, names)


def abort_then_retry_of_next(c: Cluster, names: tuple[str, ...]) -> None:
    """e0 holds a part of an aborted candidate when the next candidate's first attempt fails too."""
    c.train(0b001)
    step_until(c, names, lambda: receiver(c, "e0/0").state.tag.kind is TagKind.DIRTY and not receiver(c, "e0/0").issued)
    c.abort(0)
    step_until(c, names, lambda: not c.owners[OwnerId(0)].state.candidate)
    c.train(0b100)
    step_until(c, names, lambda: receiver(c, "e1/0").state.tag.kind is TagKind.DIRTY)
    c.expire(0)
    step_until(c, names, c.settled)


def late_payload_after_survey(c: Cluster, names: tuple[str, ...]) -> None:
    """A zombie's payload makes e0 dirty after the new coordinator saw it clean and before it prepares it."""
    c.train(0b001)
    held = ("payload", "manifest")
    step_until(c, names, lambda: receiver(c, "e0/0").state.apply_open, avoid=held)
    step_until(c, names, lambda: bool(c.payloads_of(2)), avoid=held)
    c.coordinators[0].up = False
    c.become(1)
    step_until(c, names, lambda: c.coordinators[1].state.phase is Phase.SURVEYING, avoid=held)
    c.abort(1)
    step_until(c, names, lambda: not c.owners[OwnerId(0)].state.candidate, avoid=held)
    c.train(0b100)
    step_until(c, names, lambda: c.coordinators[1].state.phase is Phase.PREPARING, avoid=held)
    for key in c.payloads_of(2):
        c._do_payload(ReceiverId("e0/0"), key)
    c._do_apply(ReceiverId("e0/0"))
    while receiver(c, "e0/0").issued:
        c._do_write(ReceiverId("e0/0"))
        check(c, names)
    step_until(c, names, c.settled)


def drop_arrives_after_takeover(c: Cluster, names: tuple[str, ...]) -> None:
    """Coordinator 0 killed the candidate; its message to the owner is late; coordinator 1 goes on (D27)."""
    c.train(5)
    step_until(c, names, lambda: c.coordinators[0].state.phase is Phase.RUNNING)
    c.abort(0)
    step_until(c, names, lambda: any(isinstance(call, DropCandidate) for call in c.coordinators[0].calls))
    late = next((0, call) for call in c.coordinators[0].calls if isinstance(call, DropCandidate))
    c.coordinators[0].up = False
    c.become(1)
    step_until(c, names, lambda: c.coordinators[1].state.phase is Phase.COMMITTING)
    c._do_call(late, keep=True)
    check(c, names)
    step_until(c, names, c.settled)


def commit_request_arrives_twice(c: Cluster, names: tuple[str, ...]) -> None:
    """The same commit request reaches the control plane twice."""
    c.train(5)
    step_until(c, names, lambda: bool(c.commits))
    c._execute(c.commits[-1])
    check(c, names)
    step_until(c, names, c.settled)


def late_update_meets_new_candidate(c: Cluster, names: tuple[str, ...]) -> None:
    """Version 1 is committed; in the next transition the tracker is lost and the old update arrives again."""
    c.train(5)
    step_until(c, names, c.settled)
    old = next(m for m in c.sent if isinstance(m[1], UpdateBaseline))
    c.train(6)
    c.crash_owner(OwnerId(0))
    c._do_call(old, keep=True)
    step_until(c, names, c.settled)


def late_rebuild_meets_candidate(c: Cluster, names: tuple[str, ...]) -> None:
    """An idle owner rebuilt its tracker; in the next transition it loses it again and the old call arrives again."""
    c.crash_owner(OwnerId(0))
    step_until(c, names, lambda: any(isinstance(m[1], RebuildBaseline) for m in c.sent))
    old = next(m for m in c.sent if isinstance(m[1], RebuildBaseline))
    step_until(c, names, lambda: c.owners[OwnerId(0)].state.tracker.kind is TrackerKind.AT)
    c.train(6)
    c.crash_owner(OwnerId(0))
    c._do_call(old, keep=True)
    while c.owners[OwnerId(0)].copying is not None:
        c.do(("copy", OwnerId(0)))
        check(c, names)
    step_until(c, names, c.settled)


def other_bits_on_retry(c: Cluster, names: tuple[str, ...]) -> None:
    """After a partial first attempt the optimizer steps once more: same candidate id, other bits."""
    name = c.train(0b001)
    step_until(c, names, lambda: any(r.state.tag.kind is TagKind.DIRTY and not r.issued for r in c.receivers.values()))
    words = dict(c.versions[0])
    words["o0.c"] ^= 0x0101
    c.candidates[name] = words
    for o, own in c.owners.items():
        own.weights = {item: words[item] for item in c.items[o]}
    c.expire(0)
    step_until(c, names, c.settled)


def takeover_after_commit(c: Cluster, names: tuple[str, ...]) -> None:
    """The coordinator dies right after its commit; a new one takes over."""
    c.train(5)
    step_until(c, names, lambda: bool(c.commits))
    c.coordinators[0].up = False
    c.become(1)
    step_until(c, names, c.settled)


def baseline_lost_before_stream(c: Cluster, names: tuple[str, ...]) -> None:
    """The tracker is lost after it was looked at, before the stream starts; the process lives on."""
    c.train(5)
    step_until(c, names, lambda: c.coordinators[0].state.phase is Phase.RUNNING)
    c.lose_baseline(OwnerId(0))
    step_until(c, names, c.settled)


def kill_nothing(facts: Any, epoch: Any, candidate: Any, clock: int) -> Any:
    return Decision(Killed(candidate, facts.clock + 1), facts.clock + 1)


MUTANTS = (
    Mutant(
        "retry_xor",
        "commit_exact",
        (
            (control_rules, "may_xor", yes),
            (membership, "is_first_attempt", yes),
            (alignment, "is_eligible", xor_like_overwrite),
        ),
        expire_after_first_write,
    ),
    Mutant("no_dedup", "commit_exact", ((endpoint_guards, "not_duplicate", yes),)),
    Mutant(
        "commit_partial_acks",
        "commit_acked",
        ((attempt, "has_all_acks", some_acks), (attempt, "digest_agrees", yes)),
    ),
    Mutant(
        "base_before_commit", "baseline_bound", ((transition, "_commit", commit_and_update),), update_overtakes_commit
    ),
    Mutant("no_endpoint_fence", "fence_safe", ((endpoint_guards, "is_current", yes),), faults=("expire",)),
    Mutant("gate_early", "gate_safe", ((transition, "_commit", commit_and_open),)),
    Mutant("no_drain", "fence_safe", ((endpoint_fence, "_drain", drained_at_once),), expire_with_issued_writes),
    Mutant("join_no_restore", "clean_exact", ((endpoint, "start", start_clean),), faults=("restart",)),
    Mutant(
        "no_cas",
        "single_commit",
        ((control_rules, "record_matches", yes),),
        commit_request_arrives_twice,
    ),
    Mutant(
        "upd_no_match",
        "baseline_bound",
        ((owner_state, "may_update_baseline", update_without_match),),
        late_update_meets_new_candidate,
    ),
    Mutant(
        "end_before_base",
        "baseline_bound",
        (
            (owner_state, "may_end_transition", lambda state, call: owner_state.is_frozen(state, call.candidate)),
            (membership, "has_followed", yes),
        ),
    ),
    Mutant(
        "rebuild_from_cand",
        "baseline_bound",
        ((owner_state, "may_rebuild", lost_tracker),),
        late_rebuild_meets_candidate,
    ),
    Mutant("ack_before_flush", "commit_exact", ((endpoint_guards, "nothing_pending", yes),)),
    Mutant("prepare_not_monotone", "fence_mono", ((endpoint_guards, "is_newer", yes),), faults=("expire",)),
    Mutant("retry_new_cand", "commit_exact", (), other_bits_on_retry),
    Mutant("gate_not_closed", "gate_transition", ((endpoint_guards, "closes_gate", no),)),
    Mutant("no_quiesce", "gate_safe", ((endpoint_guards, "is_quiet", gate_only),)),
    Mutant("tag_not_lowered", "clean_exact", ((endpoint_guards, "dirty_tag", stays_clean),)),
    Mutant("open_no_fence", "gate_transition", ((endpoint_guards, "may_open_gate", open_any),)),
    Mutant("no_tag_check", "payload_bound", ((owner_state, "may_stream", yes),), baseline_lost_before_stream),
    Mutant(
        "finish_restore_unchecked",
        "clean_exact",
        ((endpoint_guards, "may_finish_restore", yes),),
        late_finish_restore,
    ),
    Mutant(
        "other_candidate",
        "dirty_repairable",
        ((alignment, "is_mixture", any_mixture),),
        abort_then_retry_of_next,
    ),
    Mutant("no_elig_recheck", "commit_exact", ((endpoint_guards, "is_eligible", yes),), late_payload_after_survey),
    Mutant(
        "commit_dead",
        "baseline_bound",
        ((control_rules, "decide_kill", kill_nothing),),
        drop_arrives_after_takeover,
    ),
    Mutant("skip_roll_forward", "gate_transition", ((membership, "needs_roll_forward", no),), takeover_after_commit),
)
