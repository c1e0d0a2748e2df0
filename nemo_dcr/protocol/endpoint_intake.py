"""Intake, application and flush of a receiver endpoint: from a valid payload to the acknowledgement.

A payload counts once (D23); the expected set is complete when every owner's manifest agrees with what was accepted
(D24). Writes need a permit, and the permit lowers the tag first (D25). The flush follows when everything is applied,
quiet and not stopped, even when nothing was to be applied (D30).

Paper: Section 6.3; Algorithm B.1 (stream, apply, flush)   Spec: Accept, IgnoreDuplicate, IgnoreStale, SeeManifest,
StartApply, ApplyItem, Flush   Proofs: dedup_once, version_alignment
"""

from __future__ import annotations

from dataclasses import replace

from nemo_dcr.ids import AttemptId, PayloadKey
from nemo_dcr.protocol import endpoint_guards as guards
from nemo_dcr.protocol.digests import applied_digest
from nemo_dcr.protocol.endpoint_fence import fail
from nemo_dcr.protocol.endpoint_report import Step, emit, payload_args, report
from nemo_dcr.protocol.endpoint_state import (
    DenyApply,
    EndpointEffect,
    EndpointState,
    Flush,
    ManifestEntry,
    ManifestSeen,
    PayloadStaged,
    PermitApply,
    PushReport,
    Stage,
    WakeApply,
)
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.record import AttemptMode
from nemo_dcr.trace import Action


def accept(state: EndpointState, event: PayloadStaged) -> Step:
    """Take in one valid payload, unless it is of another attempt or was taken in before."""
    key = event.key
    if not guards.is_expected(state, key.attempt, key.owner):
        return state, (emit(state, Action.IGNORE_STALE, key.attempt, reason="payload", **payload_args(key)),)
    numbers = state.seen.get(key.owner, {})
    if not guards.not_duplicate(state, key):
        if numbers.get(key.payload, event.digest) != event.digest and not state.acked:
            return fail(state, f"payload {key} arrived twice with different bytes")
        return state, (emit(state, Action.IGNORE_DUPLICATE, **payload_args(key)),)
    if state.acked:
        return state, (emit(state, Action.IGNORE_STALE, reason="payload", **payload_args(key)),)
    seen = {**state.seen, key.owner: {**numbers, key.payload: event.digest}}
    taken = replace(state, seen=seen, pending=state.pending | {key})
    if not guards.manifest_agrees(taken, key.owner):
        return fail(state, f"the payloads of owner {key.owner} are not those of its manifest")
    return _staged(taken, (Stage(key), emit(taken, Action.ACCEPT, **payload_args(key))))


def see_manifest(state: EndpointState, event: ManifestSeen) -> Step:
    """Learn one owner's expected set."""
    if not guards.is_expected(state, event.attempt, event.owner) or state.acked:
        return state, (emit(state, Action.IGNORE_STALE, event.attempt, reason="manifest", owner=event.owner),)
    entry, known = ManifestEntry(event.count, event.digest), state.manifests.get(event.owner)
    if known is not None:
        if known != entry:
            return fail(state, f"owner {event.owner} sent two different manifests")
        return state, ()
    learnt = replace(state, manifests={**state.manifests, event.owner: entry})
    if not guards.manifest_agrees(learnt, event.owner):
        return fail(state, f"the payloads of owner {event.owner} are not those of its manifest")
    return _staged(learnt, (emit(learnt, Action.SEE_MANIFEST, owner=event.owner, count=event.count),))


def request_apply(state: EndpointState, attempt: AttemptId, keys: tuple[PayloadKey, ...]) -> Step:
    """Permit or deny the next writes."""
    if state.current is None or not guards.may_apply(state, attempt, keys):
        return state, (DenyApply(attempt, keys),)
    permit = PermitApply(attempt, keys)
    if state.started:
        return replace(state, writing=state.writing | set(keys)), (permit,)
    tag = guards.dirty_tag(state.tag, state.current)
    state = replace(state, tag=tag, loaded_digest=b"", started=True, writing=state.writing | set(keys))
    return state, (emit(state, Action.START_APPLY), permit)


def applied(state: EndpointState, attempt: AttemptId, keys: tuple[PayloadKey, ...]) -> Step:
    """Permitted payloads are written."""
    if not guards.is_current(state, attempt):
        return state, ()
    done = frozenset(keys)
    return _flush_if_ready(replace(state, pending=state.pending - done, writing=state.writing - done))


def wake_if_quiet(state: EndpointState) -> Step:
    """Writes became possible: wake the apply thread, or flush when there is nothing to write."""
    if not (state.apply_open and guards.is_quiet(state)) or state.stopped or state.acked:
        return state, ()
    state, effects = _flush_if_ready(state)
    return state, (WakeApply(state.attempt), *effects)


def flushed(state: EndpointState, attempt: AttemptId) -> Step:
    """The device is synchronised: acknowledge. Ignored when the attempt was stopped meanwhile (D28)."""
    call = state.current
    if call is None or not guards.is_current(state, attempt) or not state.flushing or not guards.may_flush(state):
        return state, ()
    tag = state.tag
    if call.mode is not AttemptMode.RESTORE:
        tag = Tag(TagKind.DONE, call.version, call.candidate, attempt)
    digest = applied_digest({owner: guards.owner_digests(state, owner) for owner in call.owners})
    state = replace(state, tag=tag, acked=True, flushing=False, applied_digest=digest)
    return state, (emit(state, Action.FLUSH, digest=digest.hex()), PushReport(report(state)))


def _staged(state: EndpointState, effects: tuple[EndpointEffect, ...]) -> Step:
    state, more = _flush_if_ready(state)
    if guards.is_staged(state):
        more += (PushReport(report(state)),)
    return state, effects + more


def _flush_if_ready(state: EndpointState) -> Step:
    if state.flushing or not guards.may_flush(state):
        return state, ()
    return replace(state, flushing=True), (Flush(state.attempt),)
