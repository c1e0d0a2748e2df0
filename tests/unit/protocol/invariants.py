"""The invariants of the protocol, by the names of the specification, over the real words of the cluster."""

from __future__ import annotations

from collections.abc import Callable

from nemo_dcr.config import GateMode
from nemo_dcr.ids import instance_of
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.record import DELTA_MODES, AttemptMode
from tests.unit.protocol.cluster import Cluster, Payload


class InvariantBroken(AssertionError):
    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)


def commit_exact(c: Cluster) -> bool:
    """Required receivers of the committed attempt, not prepared again, hold exactly the committed version."""
    record = c.record()
    if record is None:
        return True
    return all(
        r.storage == c.versions[-1]
        for r in c.receivers.values()
        if r.state.member in record.required and r.state.attempt == record.attempt
    )


def commit_acked(c: Cluster) -> bool:
    """Every required receiver, in its incarnation, acknowledged the committed attempt."""
    return all((k.attempt, member) in c.acks for k in c.control.history()[1:] for member in k.required)


def clean_exact(c: Cluster) -> bool:
    """A clean tag tells the truth."""
    tags = [(r.state.tag.version, r.storage) for r in c.receivers.values() if r.state.tag.kind is TagKind.CLEAN]
    return all(v < len(c.versions) and storage == c.versions[v] for v, storage in tags)


def baseline_bound(c: Cluster) -> bool:
    """Each baseline is the committed one or lost; the previous one only while the transition of that commit is open."""
    record = c.record()
    if record is None:
        return True
    for o, own in c.owners.items():
        tracker, opened = own.state.tracker, own.state.candidate == record.candidate != ""
        if tracker.kind is TrackerKind.LOST:
            continue
        if tracker.kind is TrackerKind.UPDATING:
            if not opened:
                return False
            continue
        if tracker.version != record.version and not (opened and tracker.version == record.version - 1):
            return False
        words = c.versions[tracker.version]
        if own.baseline != {item: words[item] for item in c.items[o]}:
            return False
    return True


def payload_bound(c: Cluster) -> bool:
    """Every payload ever emitted is the difference of the attempt's candidate and its committed baseline."""
    fresh = [p for key, p in c.payloads.items() if key not in c.checked]
    c.checked |= set(c.payloads)
    return all(p.records in _expected_payloads(c, p) for p in fresh)


def _expected_payloads(c: Cluster, payload: Payload) -> list[tuple[tuple[str, bool, int], ...]]:
    entry = c.entry(payload.key.attempt)
    base = c.versions[entry.baseline] if entry.baseline is not None else c.candidates[""]
    new = base if entry.mode is AttemptMode.RESTORE else c.candidates[entry.candidate]
    every = entry.mode in (AttemptMode.DENSE, AttemptMode.RESTORE)
    groups = []
    for group in c.groups[payload.key.owner]:
        records = []
        for item in group:
            if every or new[item] != base[item]:
                xor = entry.mode is AttemptMode.XOR and not item.endswith(".c")
                records.append((item, xor, new[item] ^ base[item] if xor else new[item]))
        if records:
            groups.append(tuple(records))
    return groups[payload.key.payload : payload.key.payload + 1]


def single_commit(c: Cluster) -> bool:
    """Versions count commits, each from an attempt that expected the one before; one attempt commits once."""
    history = c.control.history()
    chained = all(k.version == v and k.baseline == max(0, v - 1) for v, k in enumerate(history))
    return chained and len({k.attempt for k in history}) == len({k.candidate for k in history}) == len(history)


def gate_safe(c: Cluster) -> bool:
    """A gate is open or a request runs only over one committed version, on every rank of the instance."""
    for name, r in c.receivers.items():
        if not (r.state.gate_open or r.state.requests):
            continue
        if r.state.gate_open and r.state.tag.kind is not TagKind.CLEAN:
            return False
        ranks = [each for other, each in c.receivers.items() if instance_of(other) == instance_of(name)]
        if not r.state.requests:
            ranks = [r]
        if any(rank.storage != ranks[0].storage for rank in ranks) or r.storage not in c.versions:
            return False
    return True


def gate_fresh(c: Cluster) -> bool:
    """Required receivers of the last commit never serve an older version."""
    record = c.record()
    if record is None:
        return True
    members = [r for r in c.receivers.values() if r.state.member in record.required]
    return all(r.storage == c.versions[-1] for r in members if r.state.gate_open or r.state.requests)


def gate_transition(c: Cluster) -> bool:
    """Sync gate: closed from the prepare of the candidate's first attempt to the end of the transition."""
    if c.refit.gate is not GateMode.SYNC:
        return True
    frozen = {own.state.candidate for own in c.owners.values()} - {""}
    currents = [(r.state.current, r.state.gate_open) for r in c.receivers.values() if r.state.current is not None]
    return not any(opened and call.mode in DELTA_MODES and call.candidate in frozen for call, opened in currents)


def fence_safe(c: Cluster) -> bool:
    """Any write that can still take effect belongs to the attempt that the receiver prepared."""
    return all(key.attempt == r.state.attempt for r in c.receivers.values() for key, _, _, _ in r.issued)


def monotone(c: Cluster) -> bool:
    """The version grows by exactly one per change."""
    version = -1 if c.record() is None else c.record().version
    grown = version - c.last_version
    c.last_version = version
    return grown in (0, 1)


def fence_mono(c: Cluster) -> bool:
    """The attempt of a receiver never decreases within an incarnation."""
    for r in c.receivers.values():
        if r.state.attempt < c.attempts_seen.get(r.state.member, 0):
            return False
        c.attempts_seen[r.state.member] = r.state.attempt
    return True


INVARIANTS: dict[str, Callable[[Cluster], bool]] = {
    f.__name__: f
    for f in (
        commit_exact,
        commit_acked,
        clean_exact,
        baseline_bound,
        payload_bound,
        single_commit,
        gate_safe,
        gate_fresh,
        gate_transition,
        fence_safe,
        monotone,
        fence_mono,
    )
}


def check(c: Cluster, names: tuple[str, ...] = tuple(INVARIANTS)) -> None:
    for name in names:
        if not INVARIANTS[name](c):
            raise InvariantBroken(name)
