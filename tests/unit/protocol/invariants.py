"""The properties of the protocol, by the names of spec/Properties.tla, over the real words of the cluster.

`STATE_INVARIANTS` look at one state, `STEP_PROPERTIES` at a step and therefore remember the last state that they saw,
`FINALLY` holds once nothing is left to do.

Not handled: what the specification says of the network; nothing that was sent is ever taken back here.

Spec: Properties
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from nemo_dcr.config import GateMode
from nemo_dcr.ids import instance_of
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.protocol.transition_state import Phase
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


def done_exact(c: Cluster) -> bool:
    """An acknowledged set is complete before anybody knows whether it is committed."""
    tags = [(r.state.tag.candidate, r.storage) for r in c.receivers.values() if r.state.tag.kind is TagKind.DONE]
    return all(storage == c.candidates[candidate] for candidate, storage in tags)


def dirty_repairable(c: Cluster) -> bool:
    """Storage of a dirty tag differs from its version only in bits that its candidate changes."""
    for r in c.receivers.values():
        tag = r.state.tag
        if tag.kind is not TagKind.DIRTY:
            continue
        if tag.version >= len(c.versions):
            return False
        old, new = c.versions[tag.version], c.candidates[tag.candidate]
        if any((r.storage[item] ^ old[item]) & ~(new[item] ^ old[item]) for item in c.all_items):
            return False
    return True


def baseline_bound(c: Cluster) -> bool:
    """Each baseline is the committed one or lost; the previous one only while the transition of that commit is open.

    A copy into it reads the committed candidate, and weights that are not frozen are the committed ones.
    """
    record = c.record()
    if record is None:
        return True
    for o, own in c.owners.items():
        tracker, opened = own.state.tracker, own.state.candidate == record.candidate != ""
        committed = {item: c.versions[-1][item] for item in c.items[o]}
        if own.state.candidate == "" and own.weights != committed:
            return False
        if own.state.filling is not None and (own.state.filling, own.weights) != (record.version, committed):
            return False
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
    """Versions count commits, each from a later attempt that expected the one before; none of them was given up."""
    history = c.control.history()
    chained = all(k.version == v and k.baseline == max(0, v - 1) for v, k in enumerate(history))
    rising = all(new.attempt > old.attempt for old, new in pairwise(history))
    alive = not {k.candidate for k in history} & c.control._dead
    return chained and rising and alive and len({k.candidate for k in history}) == len(history)


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
    committed = {k.attempt for k in c.control.history()}
    served = [r.state.current for r in c.receivers.values() if r.state.gate_open and r.state.current is not None]
    if any(call.mode in DELTA_MODES and call.attempt not in committed for call in served):
        return False
    return not any(call.mode is not AttemptMode.RESTORE and call.candidate in frozen for call in served)


def fence_safe(c: Cluster) -> bool:
    """Any write that can still take effect belongs to the attempt that the receiver prepared."""
    return all(key.attempt == r.state.attempt for r in c.receivers.values() for key, _, _, _ in r.issued)


def takeover_decides(c: Cluster) -> bool:
    """The active coordinator that waits for no commit believes the record as it is: it changes under nobody else.

    Not before it believes in a first record: the reply of a bootstrap may be lost, and the next prepare compares.
    """
    waits = (Phase.OUT, Phase.ACQUIRING, Phase.COMMITTING, Phase.WAITING_DEADLINE, Phase.RESOLVING)
    states = [node.state for node in c.coordinators if node.up and node.state.phase not in waits]
    active = [state for state in states if state.epoch == c.control._epoch and state.record is not None]
    return all(state.record == c.record() for state in active)


def attempt_order(c: Cluster) -> bool:
    """A replaced coordinator fences nobody: later attempts belong to epochs at least as new."""
    epochs = [entry.epoch for entry in c.control._attempts]
    return epochs == sorted(epochs)


# ---------------------------------------------------------------------------------------------------- step properties


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


def ack_kept(c: Cluster) -> bool:
    """A receiver that acknowledged an attempt stays so until another one is installed, or it starts again."""
    for r in c.receivers.values():
        if c.acknowledged.get(r.state.member) == r.state.attempt and not r.state.acked:
            return False
        if r.state.acked:
            c.acknowledged[r.state.member] = r.state.attempt
    return True


def dead_kept(c: Cluster) -> bool:
    """A candidate that was given up stays dead."""
    before, c.killed = c.killed, frozenset(c.control._dead)
    return before <= c.killed


def refit_steps(c: Cluster) -> bool:
    """Each step is one of Refit.

    A commit changes nothing at receivers and binds those that hold its words behind a closed gate. Storage changes
    behind a closed gate where nobody is bound, and gates open over a committed version, the last one if bound.
    """
    record, (versions, before) = c.record(), c.service
    bound = {
        name
        for name, r in c.receivers.items()
        if record is not None and r.state.member in record.required and r.state.attempt == record.attempt
    }
    now = {name: (dict(r.storage), r.state.gate_open, name in bound) for name, r in c.receivers.items()}
    c.service = len(c.versions), now
    if not before:
        return True
    if len(c.versions) > versions:
        same = all(now[name][:2] == before[name][:2] for name in now)
        return same and all(not now[name][1] and now[name][0] == c.versions[-1] for name in bound)
    for name, (storage, opened, binds) in now.items():
        held, served, was_bound = before[name]
        if (storage != held and (opened or binds)) or binds > was_bound:
            return False
        if opened > served and storage not in (c.versions[-1:] if binds else c.versions):
            return False
    return True


# -------------------------------------------------------------------------------------------------------- at the end


def transition_ends(c: Cluster) -> bool:
    """No candidate stays frozen."""
    return all(own.state.candidate == "" for own in c.owners.values())


def all_serve(c: Cluster) -> bool:
    """Every receiver serves the committed version."""
    return c.record() is not None and all(
        r.state.gate_open and r.storage == c.versions[-1] for r in c.receivers.values()
    )


def _named(*checks: Callable[[Cluster], bool]) -> dict[str, Callable[[Cluster], bool]]:
    return {check.__name__: check for check in checks}


STATE_INVARIANTS = _named(
    commit_exact,
    commit_acked,
    clean_exact,
    done_exact,
    dirty_repairable,
    baseline_bound,
    payload_bound,
    fence_safe,
    single_commit,
    gate_safe,
    gate_fresh,
    gate_transition,
    takeover_decides,
    attempt_order,
)
STEP_PROPERTIES = _named(monotone, fence_mono, ack_kept, dead_kept, refit_steps)
INVARIANTS = {**STATE_INVARIANTS, **STEP_PROPERTIES}
FINALLY = _named(transition_ends, all_serve)


def check(c: Cluster, names: tuple[str, ...] = tuple(INVARIANTS)) -> None:
    for name in names:
        if not INVARIANTS[name](c):
            raise InvariantBroken(name)
