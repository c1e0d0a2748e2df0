"""The mutants of the specification on the code: which functions are replaced, and by what.

Each entry weakens one guard of the specification wherever the code has it. Where the code checks the same thing twice,
or a second guard would hide the first one, all of them are weakened together; a comment says which. A guard that the
specification can weaken in one of its uses only is weakened `within` the function that uses it.
Not handled: what falls and how it is found (mutants).

Spec: Mutants   Decisions: 0002
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from model_tests.patching import Patch, after, before, no, nobody, patched, within, yes
from nemo_dcr import control_rules
from nemo_dcr.codec import wire
from nemo_dcr.codec.payload import VerifiedPayload
from nemo_dcr.ids import AttemptId, Member, Version
from nemo_dcr.protocol import (
    alignment,
    attempt,
    decision,
    endpoint,
    endpoint_fence,
    endpoint_guards,
    endpoint_intake,
    membership,
    owner,
    owner_state,
    rounds,
    transition,
)
from nemo_dcr.protocol.coordinator_events import AskCommit, CallOwner, CallReceiver
from nemo_dcr.protocol.endpoint_state import EndpointState, SetGate
from nemo_dcr.protocol.messages import DropCandidate, UpdateBaseline
from nemo_dcr.protocol.owner_state import BaselineFilled
from nemo_dcr.protocol.tags import Tag, TagKind, TrackerKind
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.record import DELTA_MODES, AttemptMode
from nemo_dcr.runtime import receiver_stages
from nemo_dcr.source import delta
from nemo_dcr.trace import Action, Emit

# ---------------------------------------------------------------------------------------------- attempts and retries


def xor_stream(attempt: AttemptId, mode: AttemptMode, *rest: Any) -> owner_state.StartStream:
    return owner_state.StartStream(attempt, AttemptMode.XOR if mode is AttemptMode.OVERWRITE else mode, *rest)


def same_digest(state: Any, event: Any) -> tuple[Any, Any]:
    known = state.seen.get(event.key.owner, {}).get(event.key.payload)
    return state, event if known is None else replace(event, digest=known)


def keep_seen(result: Any, state: Any, call: Any) -> Any:
    return replace(result[0], seen=state.seen), result[1]


def not_stopped(state: Any, *_: Any) -> bool:
    return state.attempt != 0 and not state.stopped


def drain_at_once(state: Any) -> Any:
    return endpoint_fence.drained(replace(state, stopped=True, drained=True), state.attempt)


_DRAIN = endpoint_fence._drain


def drain_restores_at_once(state: Any) -> Any:
    restores = state.current is not None and state.current.mode is AttemptMode.RESTORE
    return drain_at_once(state) if restores else _DRAIN(state)


def runs_again(result: Any, state: Any, attempt: AttemptId) -> Any:
    stopped, effects = result
    return (replace(stopped, stopped=False) if stopped.attempt == state.attempt else stopped), effects


def claims_base(state: Any, call: Any) -> tuple[Any, Any]:
    wrong = state.tag.kind in (TagKind.DIRTY, TagKind.DONE)
    return (replace(state, tag=Tag(TagKind.CLEAN, call.version)) if wrong else state), call


def always_dirty(tag: Tag, call: Any) -> Tag:
    return Tag(TagKind.DIRTY, call.version, call.candidate)


def as_first(state: Any, report: Any) -> tuple[Any, Any]:
    """The report as if the first incarnation had made it."""
    member = next((m for m in state.plan.required if m.receiver == report.receiver), None)
    return state, report if member is None else replace(report, incarnation=member.incarnation)


def clean_from_birth(**fields: Any) -> EndpointState:
    return EndpointState(tag=Tag(TagKind.CLEAN), **fields)


def its_own_attempt(result: Any, _: Any, told: Any, call: Any = None) -> Any:
    """The trace line names the attempt of the payload or call that was taken, not the installed one."""
    attempt = told.key.attempt if call is None else call.attempt
    lines = (Action.ACCEPT, Action.OPEN_GATE)
    return result[0], tuple(
        replace(e, attempt=attempt) if isinstance(e, Emit) and e.action in lines else e for e in result[1]
    )


# ------------------------------------------------------------------------ the set that an acknowledgement speaks for


def one_complete(state: Any) -> bool:
    return state.current is not None and any(endpoint_guards.is_complete(state, each) for each in state.current.owners)


def all_but_last(buckets: Any, target: int) -> Iterator[Any]:
    waiting = None
    for bucket in _PACK(buckets, target):
        if waiting is not None:
            yield waiting
        waiting = bucket


_PACK = delta.pack_buckets


def trusting(data: Any, *, limits: Any) -> VerifiedPayload:
    view = memoryview(data).cast("B")
    header = wire.read_header(view, limits)
    return VerifiedPayload(header.key, bytes(view[header.digest_start :]), len(view), header, view, limits)


def flush_any(state: Any) -> bool:
    if state.current is None or state.current.mode is AttemptMode.FINISH or state.stopped or state.acked:
        return False
    return endpoint_guards.is_staged(state) and endpoint_guards.nothing_pending(state)


# ------------------------------------------------------------------------------------------------------------ commit


def some_acks(state: Any) -> bool:
    reports = [(m, state.receivers.get(m.receiver)) for m in state.plan.required]
    return any(r is not None and attempt.is_acked(state.plan, m, r) for m, r in reports)


def acked_before(plan: Any, member: Any, report: Any) -> bool:
    return report.acked and report.incarnation == member.incarnation


def prepared_or_not(plan: Any, report: Any) -> bool:
    return not report.stopped


def bind_everybody(result: Any, *_: Any) -> Any:
    state, effects = result
    everybody = tuple(sorted(Member(r.receiver, r.incarnation) for r in state.receivers.values()))
    bind = [replace(e, new=replace(e.new, required=everybody)) if isinstance(e, AskCommit) else e for e in effects]
    return state, tuple(bind)


def alive(facts: Any, *rest: Any) -> tuple[Any, ...]:
    return replace(facts, candidate_dead=False), *rest


def seen_alive(state: Any) -> tuple[Any]:
    return (state if state.view is None else replace(state, view=replace(state.view, candidate_dead=False)),)


def drop_at_once(result: Any, state: Any) -> Any:
    frozen = {o: report.candidate for o, report in state.owners.items() if report.candidate}
    return result[0], (*result[1], *(CallOwner(DropCandidate(o, candidate)) for o, candidate in frozen.items()))


_UNKNOWN = transition._unknown


def resolve_at_once(state: Any) -> Any:
    return transition._read(state, Phase.RESOLVING) if state.phase is Phase.COMMITTING else _UNKNOWN(state)


# ---------------------------------------------------------------------------------------------------------- baseline


def commit_and_update(result: Any, state: Any, plan: Any, record: Any) -> Any:
    early = [CallOwner(UpdateBaseline(o, plan.candidate, Version(record.version + 1))) for o in state.config.owners]
    return result[0], (*result[1], *early)


def update_anyway(state: Any, call: Any) -> bool:
    return state.tracker.kind is TrackerKind.LOST or state.tracker.version < call.version


def end_anyway(state: Any, call: Any) -> bool:
    return owner_state.is_frozen(state, call.candidate)


def filled_at_once(result: Any, state: Any, event: Any) -> Any:
    if result[0].filling is None or result[0].filling == state.filling:
        return result
    full, effects = _TAKE(result[0], BaselineFilled(result[0].filling))
    return full, (*result[1], *effects)


_TAKE = owner._take
_MAY_STREAM = owner_state.may_stream


def restore_from_any(state: Any, call: Any) -> bool:
    return call.mode is AttemptMode.RESTORE or _MAY_STREAM(state, call)


def stream_from_any(state: Any, call: Any) -> bool:
    return owner_state.is_frozen(state, call.candidate) if call.mode in DELTA_MODES else _MAY_STREAM(state, call)


def some_frozen(state: Any, candidate: Any) -> bool:
    return bool(state.candidate)


# -------------------------------------------------------------------------------------------------------------- gate


def opened(result: Any, state: Any, *_: Any) -> Any:
    acked, effects = result
    if state.acked or not acked.acked:
        return result
    told = [replace(e, post={**e.post, "gate": True}) if isinstance(e, Emit) else e for e in effects]
    return replace(acked, gate_open=True), (*told, SetGate(True))


def gate_only(state: Any) -> bool:
    return not state.gate_open


def open_any(state: Any, call: Any) -> bool:
    return state.tag == Tag(TagKind.CLEAN, call.version) or alignment.is_committed_done(state.tag, call.record_attempt)


# ---------------------------------------------------------------------------------------------------------- progress

_PREPARE = decision._prepare


def without(mode: AttemptMode) -> Callable[..., Any]:
    def prepare(state: Any, asked: AttemptMode, *rest: Any) -> Any:
        return decision._hold(state, f"no {mode} attempts") if asked is mode else _PREPARE(state, asked, *rest)

    return prepare


def silent(result: Any, *_: Any) -> Any:
    return result[0], tuple(e for e in result[1] if not isinstance(e, CallOwner | CallReceiver))


def never_dense(record: Any, candidate: Any, count: int, receivers: Any, owners: Any) -> Any:
    mode = AttemptMode.XOR if membership.is_first_attempt(count) else AttemptMode.OVERWRITE
    fits = membership.complete_instances(receivers, lambda r: membership.is_eligible(r, mode, record, candidate))
    return mode, fits


def patient(state: Any) -> tuple[Any]:
    refit = replace(state.config.refit, max_attempts=1 << 30)
    return (replace(state, config=replace(state.config, refit=refit)),)


def accept_of_any_attempt(*args: Any) -> Any:
    with patched(OF_ANY_ATTEMPT):
        return its_own_attempt(_ACCEPT(*args), *args)


_ACCEPT = endpoint_intake.accept
GUARDS = endpoint_guards
OF_ANY_ATTEMPT = (GUARDS, "is_running", not_stopped)
ALL_HOLD = (membership, "all_hold", yes)
PARTIAL_ACKS = (
    # acknowledgements are also compared with the ENDs, receiver by receiver
    (attempt, "has_all_acks", some_acks),
    (attempt, "digest_agrees", yes),
)

PATCHES: dict[str, tuple[Patch, ...]] = {
    "retry_xor": ((owner, "StartStream", xor_stream),),
    "no_dedup": ((GUARDS, "not_duplicate", yes),),
    "dedup_across_attempts": (
        # the digest of a payload names its attempt, and three places compare digests
        after(endpoint_fence, "_install", keep_seen),
        before(endpoint_intake, "accept", same_digest),
        (GUARDS, "manifest_agrees", yes),
        (attempt, "digest_agrees", yes),
    ),
    "no_endpoint_fence": (
        # a permit asks for the running attempt once more
        (endpoint_intake, "accept", accept_of_any_attempt),
        within(endpoint_intake, "request_apply", OF_ANY_ATTEMPT),
    ),
    "no_drain": ((endpoint_fence, "_drain", drain_at_once),),
    "restore_not_drained": ((endpoint_fence, "_drain", drain_restores_at_once),),
    "not_sticky": (after(endpoint_fence, "drained", runs_again),),
    "prepare_not_monotone": ((GUARDS, "is_newer", lambda state, t: t != state.attempt),),
    "no_elig_recheck": ((GUARDS, "is_eligible", yes),),
    "other_candidate": (
        (alignment, "is_mixture", lambda tag, v, _: tag.kind in (TagKind.DIRTY, TagKind.DONE) and tag.version == v),
    ),
    "done_is_clean": ((alignment, "is_committed_done", lambda tag, _: tag.kind is TagKind.DONE),),
    "abort_no_dirty": (before(endpoint_fence, "_install", claims_base),),
    "tag_not_lowered": ((GUARDS, "dirty_tag", lambda tag, _: tag),),
    "dense_dirty": ((GUARDS, "dirty_tag", always_dirty),),
    "no_inc_check": (
        # the receiver compares its own incarnation, the coordinator that of each report
        (GUARDS, "is_addressed", yes),
        before(attempt, "_see_receiver", as_first),
        (attempt, "_is_member", no),
    ),
    "join_no_restore": (within(endpoint, "start", (endpoint, "EndpointState", clean_from_birth)),),
    "retry_new_cand": ((owner_state, "may_step", lambda state: not state.reloading),),
    "no_manifest": ((GUARDS, "is_complete", yes),),
    "one_manifest": ((GUARDS, "is_staged", one_complete),),
    "foreign_manifest": (within(endpoint_intake, "see_manifest", OF_ANY_ATTEMPT),),
    "end_early": ((delta, "pack_buckets", all_but_last),),
    "no_payload_digest": ((receiver_stages, "verify_payload", trusting),),
    "no_set_digest": (
        # the receiver compares with the manifest, the coordinator with the ENDs
        (GUARDS, "manifest_agrees", yes),
        (attempt, "digest_agrees", yes),
    ),
    "ack_before_flush": ((GUARDS, "nothing_pending", yes),),
    "commit_partial_acks": PARTIAL_ACKS,
    "ack_of_any_attempt": (
        # an old report is replaced by one of the prepared attempt before acknowledgements are counted
        (attempt, "is_acked", acked_before),
        (attempt, "is_prepared", prepared_or_not),
        (attempt, "digest_agrees", yes),
    ),
    "join_mid_attempt": (
        # the control plane compares the record with the row of the attempt
        after(transition, "_commit", bind_everybody),
        (control_rules, "_commit_malformed", lambda request, entry: None),
    ),
    "no_cas": ((control_rules, "record_matches", yes),),
    "no_epoch_commit": (within(control_rules, "why_not_commit", (control_rules, "holds_epoch", yes)),),
    "no_epoch_prepare": (within(control_rules, "why_not_prepare", (control_rules, "holds_epoch", yes)),),
    "no_deadline_wait": ((transition, "_unknown", resolve_at_once),),
    "commit_dead": (
        # a coordinator that read that the candidate is dead does not even ask
        before(control_rules, "why_not_prepare", alive),
        before(control_rules, "why_not_commit", alive),
        before(transition, "decide", seen_alive),
    ),
    "drop_alive": (after(transition, "_abort", drop_at_once),),
    "base_before_commit": (after(transition, "_commit", commit_and_update),),
    "upd_no_match": ((owner_state, "may_update_baseline", update_anyway),),
    "end_before_base": (
        # the owner refuses to end, the coordinator waits before it asks
        (owner_state, "may_end_transition", end_anyway),
        (membership, "has_followed", yes),
    ),
    "fill_early": (after(owner, "_take", filled_at_once),),
    "restore_stale_base": (
        # the coordinator looks at the trackers before it asks for a restore
        (owner_state, "may_stream", restore_from_any),
        within(decision, "_restore", ALL_HOLD),
        within(decision, "_decide_idle", ALL_HOLD),
    ),
    "no_tag_check": ((owner_state, "may_stream", stream_from_any),),
    "rebuild_from_cand": ((owner_state, "may_rebuild", lambda state, call: state.tracker.kind is TrackerKind.LOST),),
    "stream_unfrozen": tuple(
        within(owner_state, name, (owner_state, "is_frozen", some_frozen))
        for name in ("may_stream", "may_update_baseline", "may_end_transition")
    ),
    "skip_roll_forward": ((membership, "needs_roll_forward", no),),
    "gate_not_closed": ((GUARDS, "closes_gate", no),),
    "gate_early": (after(endpoint_intake, "flushed", opened),),
    "no_quiesce": ((GUARDS, "is_quiet", gate_only),),
    "flush_open_gate": ((GUARDS, "may_flush", flush_any),),
    "open_no_fence": ((GUARDS, "may_open_gate", open_any), after(endpoint, "_open_gate", its_own_attempt)),
    "refit_commit_partial_acks": PARTIAL_ACKS,
    "refit_ack_before_flush": ((GUARDS, "nothing_pending", yes),),
    "never_finish": ((decision, "_prepare", without(AttemptMode.FINISH)),),
    "never_restore": ((decision, "_prepare", without(AttemptMode.RESTORE)),),
    "never_roll_forward": (after(rounds, "update_baselines", silent),),
    "never_open": (after(rounds, "open_gates", silent),),
    "late_close": (
        # a coordinator that looks again opens closed gates by a finish attempt
        (GUARDS, "may_close_gate", GUARDS.is_running),
        within(decision, "_decide_idle", (membership, "closed", nobody)),
    ),
    "never_dense": (
        # too many attempts kill the candidate (DV17)
        (membership, "choose_attempt", never_dense),
        before(transition, "decide", patient),
    ),
    "finish_restore_unchecked": ((GUARDS, "may_finish_restore", yes),),
}
"""Name of the mutant to what it replaces."""
