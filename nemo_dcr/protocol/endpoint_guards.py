"""Guards of a receiver endpoint: one named pure predicate for each safety condition of its actions.

Each guard says when one action may take place; weakening any of them breaks a named invariant (tests show which).

Paper: Section 6.3; Appendix B   Spec: IsNewer, IsCurrent, IsEligible, NotDuplicate, MayFlush, MayOpenGate
Proofs: dedup_once, fence_stops_old_writes, version_alignment   Conditions: SC7
"""

from __future__ import annotations

from nemo_dcr.config import GateMode
from nemo_dcr.ids import AttemptId, Incarnation, OwnerId, PayloadKey
from nemo_dcr.protocol import alignment
from nemo_dcr.protocol.digests import manifest_digest
from nemo_dcr.protocol.endpoint_state import EndpointState
from nemo_dcr.protocol.messages import FinishRestore, OpenGate, PrepareReceiver
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.record import AttemptMode


def is_addressed(state: EndpointState, incarnation: Incarnation) -> bool:
    """The call names this incarnation (D5)."""
    return incarnation == state.member.incarnation


def is_newer(state: EndpointState, attempt: AttemptId) -> bool:
    """No attempt that is as new was installed, stopped or is about to be installed."""
    installing = state.install.attempt if state.install else state.attempt
    return attempt > max(state.attempt, state.fenced, installing)


def raises_fence(state: EndpointState, attempt: AttemptId) -> bool:
    """A stop of an attempt that was neither installed nor stopped yet: it only keeps a late prepare out."""
    return attempt > max(state.attempt, state.fenced)


def is_current(state: EndpointState, attempt: AttemptId) -> bool:
    """The fence: only the installed attempt acts."""
    return attempt == state.attempt


def is_eligible(tag: Tag, call: PrepareReceiver) -> bool:
    """The receiver's own look at its tag, which decides (D6); the coordinator's choice was only a hint."""
    return alignment.is_eligible(
        tag, mode=call.mode, version=call.version, record_attempt=call.record_attempt, candidate=call.candidate
    )


def is_proved(state: EndpointState, call: PrepareReceiver) -> bool:
    """Restore without payloads: untouched storage was loaded from the checkpoint that the baseline still equals."""
    return (
        call.mode is AttemptMode.RESTORE and call.baseline_digest != b"" and state.loaded_digest == call.baseline_digest
    )


def closes_gate(call: PrepareReceiver) -> bool:
    """Prepare closes the gate: always for a restore, and for a synchronous attempt that brings payloads (D20)."""
    if call.mode is AttemptMode.RESTORE:
        return True
    return call.gate is GateMode.SYNC and call.mode is not AttemptMode.FINISH


def is_running(state: EndpointState, attempt: AttemptId) -> bool:
    """The attempt is the installed one and was not stopped, here or by a prepare that waits."""
    return is_current(state, attempt) and not state.stopped


def may_fail(state: EndpointState, attempt: AttemptId) -> bool:
    """The attempt runs, may still write, and is not acknowledged yet."""
    return is_running(state, attempt) and not state.drained and not state.acked


def may_close_gate(state: EndpointState, attempt: AttemptId) -> bool:
    """A call closes the gate before the acknowledgement only: a late copy must not close a gate that opened again."""
    return is_running(state, attempt) and not state.acked


def is_expected(state: EndpointState, attempt: AttemptId, owner: OwnerId) -> bool:
    """The payload or manifest belongs to the running attempt and to one of its owners."""
    owners = state.current.owners if state.current else ()
    return is_running(state, attempt) and owner in owners


def not_duplicate(state: EndpointState, key: PayloadKey) -> bool:
    """Each payload is accepted once per attempt (D23)."""
    return key.payload not in state.seen.get(key.owner, {})


def is_quiet(state: EndpointState) -> bool:
    """Gate closed and no request in flight."""
    return not state.gate_open and not state.requests


def may_apply(state: EndpointState, attempt: AttemptId, keys: tuple[PayloadKey, ...]) -> bool:
    """Writes may start: running, opened, quiet, awake, and the payloads are staged and not being written."""
    opened = is_running(state, attempt) and state.apply_open and not state.asleep
    return opened and is_quiet(state) and set(keys) <= state.pending - state.writing


def dirty_tag(tag: Tag, call: PrepareReceiver) -> Tag:
    """The tag before the first write (D25). Storage of unknown content never becomes `dirty` (D13).

    Dense attempts and restores write elements outside the changed set too. Cut off inside a composed copy, such an
    element holds neither version, which an overwrite of the changed set would not repair.
    """
    if call.mode in (AttemptMode.DENSE, AttemptMode.RESTORE):
        return Tag()
    if tag == Tag(TagKind.CLEAN, call.version) or alignment.is_mixture(tag, call.version, call.candidate):
        return Tag(TagKind.DIRTY, call.version, call.candidate)
    return Tag()


def is_complete(state: EndpointState, owner: OwnerId) -> bool:
    """The owner's manifest is in, and so is every payload that it lists (D24)."""
    manifest = state.manifests.get(owner)
    return manifest is not None and len(state.seen.get(owner, {})) == manifest.count


def owner_digests(state: EndpointState, owner: OwnerId) -> tuple[bytes, ...]:
    """Digests of the accepted payloads of one owner in the order of their numbers."""
    return tuple(digest for _, digest in sorted(state.seen.get(owner, {}).items()))


def manifest_agrees(state: EndpointState, owner: OwnerId) -> bool:
    """What was accepted can still become, or is, exactly the set that the manifest was computed over."""
    manifest, numbers = state.manifests.get(owner), state.seen.get(owner, {})
    if manifest is None:
        return True
    if any(number >= manifest.count for number in numbers):
        return False
    return len(numbers) < manifest.count or manifest_digest(owner_digests(state, owner)) == manifest.digest


def is_staged(state: EndpointState) -> bool:
    """Every expected payload of every owner is in."""
    return state.current is not None and all(is_complete(state, owner) for owner in state.current.owners)


def nothing_pending(state: EndpointState) -> bool:
    """Every accepted payload was applied, and no permitted write is unanswered."""
    return not state.pending and not state.writing


def may_flush(state: EndpointState) -> bool:
    """All staged and applied, not stopped (D28), and opened and quiet even when nothing was to be applied (D30)."""
    if state.current is None or state.current.mode is AttemptMode.FINISH or state.stopped or state.acked:
        return False
    return state.apply_open and is_quiet(state) and is_staged(state) and nothing_pending(state)


def may_admit(state: EndpointState, request: str) -> bool:
    """The engine may start a request; one that runs already under the same name would end with it."""
    return state.gate_open and not state.asleep and request not in state.requests


def may_open_gate(state: EndpointState, call: OpenGate) -> bool:
    """Only the current attempt opens the gate, and only over committed storage (D20)."""
    if state.current is None or not is_current(state, call.attempt) or state.install is not None or state.asleep:
        return False
    if state.current.mode is not AttemptMode.FINISH and not state.acked:
        return False
    return state.tag == Tag(TagKind.CLEAN, call.version) or alignment.is_committed_done(state.tag, call.record_attempt)


def may_finish_restore(state: EndpointState, call: FinishRestore) -> bool:
    """The whole baseline was applied and flushed under this restore, and nothing replaced or stopped it."""
    if state.current is None or state.current.mode is not AttemptMode.RESTORE or state.install is not None:
        return False
    current = is_current(state, call.attempt) and state.current.version == call.version
    return current and (state.acked and not state.stopped)
