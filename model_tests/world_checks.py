"""The properties of the protocol over real bits: those of the simulated cluster, and what only real tensors can break.

The names are those of spec/Properties.tla. Where the cluster compares words, this compares stored bits: each item
through its faces, and for a clean or acknowledged rank every stored byte, padding and constant buffers included, with a
dense refit by the native loader. `BITS` are the properties that a protocol without tensors does not have.
Not handled: liveness (`machine.settle`).

Paper: Proposition 1; Section 6.2 (reference)   Spec: Properties   Proofs: joint_commit_binds, xor_reconstructs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from model_tests.contents import item_name
from model_tests.nodes import RealPayload, RealReceiver
from model_tests.world import World
from nemo_dcr.codec.payload import verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, PayloadKey, instance_of
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.record import AttemptMode
from nemo_dcr.testing.local_oracle import StoredBits
from tests.unit.protocol.invariants import INVARIANTS, InvariantBroken

Check = Callable[[World], bool]
EVERY_ELEMENT = (AttemptMode.DENSE, AttemptMode.RESTORE)


def _receivers(w: World) -> list[RealReceiver]:
    return [r for r in w.receivers.values() if isinstance(r, RealReceiver) and r.up]


def _dense(w: World, r: RealReceiver, candidate: CandidateId) -> StoredBits:
    return w.faces.oracle.expected(r.engine.model.rank, w.ranks, candidate)


def _committed(w: World, version: int) -> CandidateId:
    return w.control.history()[version].candidate


def bits_exact(w: World) -> bool:
    """Who claims a version, or acknowledged a candidate, holds every bit of a dense refit to it."""
    for r in _receivers(w):
        tag = r.state.tag
        if tag.kind is TagKind.CLEAN and r.bits != _dense(w, r, _committed(w, tag.version)):
            return False
        if tag.kind is TagKind.DONE and r.bits != _dense(w, r, tag.candidate):
            return False
    return True


def request_whole(w: World) -> bool:
    """A request computes with one committed version on every rank, the one that was there when it was admitted."""
    for name, r in w.receivers.items():
        if not r.up:
            continue
        ranks = [each for other, each in w.receivers.items() if instance_of(other) == instance_of(name)]
        for request in r.state.requests:
            version = w.admitted[r.state.member, request]
            if any(not isinstance(each, RealReceiver) for each in ranks):
                return False
            wanted = _committed(w, version)
            if any(each.bits != _dense(w, each, wanted) for each in ranks if isinstance(each, RealReceiver)):
                return False
    return True


def gate_safe(w: World) -> bool:
    """A gate is open or a request runs only over one committed version, on every rank of the instance."""
    for name, r in w.receivers.items():
        if not isinstance(r, RealReceiver) or not (r.state.gate_open or r.state.requests):
            continue
        if r.state.gate_open and r.state.tag.kind is not TagKind.CLEAN:
            return False
        ranks = [each for other, each in w.receivers.items() if instance_of(other) == instance_of(name)]
        if not r.state.requests:
            ranks = [r]
        if not any(all(rank.storage == version for rank in ranks) for version in w.versions):
            return False
    return True


def dirty_repairable(w: World) -> bool:
    """Storage of a dirty tag differs from its version only in bits that its candidate changes."""
    for r in _receivers(w):
        tag = r.state.tag
        if tag.kind is not TagKind.DIRTY:
            continue
        if tag.version >= len(w.versions):
            return False
        old, new = _dense(w, r, _committed(w, tag.version)), _dense(w, r, tag.candidate)
        for name, (_, _, held) in r.bits.items():
            was, becomes, now = (np.frombuffer(data, np.uint8) for data in (old[name][2], new[name][2], held))
            if ((now ^ was) & ~(becomes ^ was)).any():
                return False
    return True


def payload_bound(w: World) -> bool:
    """Every payload ever published carries, read from its bytes, the difference that its attempt promised."""
    fresh = [(key, p) for key, p in w.payloads.items() if key not in w.checked and isinstance(p, RealPayload)]
    w.checked |= set(w.payloads)
    for key, payload in fresh:
        for item in verify_payload(payload.data, limits=w.source.codec).decode(w.table.metas):
            if not _is_expected(w, key, item):
                return False
    return True


def stream_whole(w: World) -> bool:
    """A manifest is closed over one record set for each item that has one, and no item comes twice."""
    for attempt, o in w.closed.keys() - w.ends_checked:
        w.ends_checked.add((attempt, o))
        listed = [i for key in w.payloads_of(attempt) if key.owner == o for i in w.items_of(key)]
        wanted = [i for i in w.items[o] if len(_expected(w, attempt, i)[0])]
        if sorted(listed) != sorted(wanted):
            return False
    return True


def _expected(w: World, attempt: int, item: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Flat elements of the records of an item in an attempt, and canonical words before and after."""
    entry = w.control._attempts[attempt - 1]
    base = NO_CANDIDATE if entry.baseline is None else _committed(w, entry.baseline)
    new = base if entry.mode is AttemptMode.RESTORE else entry.candidate
    _, tensor, elements = w.faces.owned[item]
    before, after = (w.faces.oracle.canonical(candidate)[tensor.name] for candidate in (base, new))
    moved = before != after
    if tensor not in w.source.scaled:
        moved = w.source.weights[base][tensor.name] != w.source.weights[new][tensor.name]
    chosen = np.zeros(tensor.numel, dtype=np.bool_)
    chosen[elements] = True
    if entry.mode not in EVERY_ELEMENT:
        chosen &= moved
    return np.flatnonzero(chosen), before, after


def _is_expected(w: World, key: PayloadKey, item: Item) -> bool:
    at, before, after = _expected(w, key.attempt, item_name(key.owner, item.tensor.name))
    words = after[at] ^ before[at] if item.encoding is Encoding.XOR else after[at]
    return np.array_equal(at, item.flat_indices()) and np.array_equal(words, item.values)


def _named(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.__name__: check for check in checks}


BITS = _named([bits_exact, request_whole, stream_whole])
CHECKS: dict[str, Check] = {**INVARIANTS, **_named([gate_safe, dirty_repairable, payload_bound]), **BITS}  # type: ignore[dict-item]


def check(w: World, names: Iterable[str] = tuple(CHECKS)) -> None:
    """Every named property holds.

    Raises: InvariantBroken with the name of the first one that does not.
    """
    for name in names:
        if not CHECKS[name](w):
            raise InvariantBroken(name)
