"""What a cluster of real machines is in the model: every difference between the two, in words.

Compared is everything that both sides have: the claims of receivers and owners, what they store, what was sent, what
coordinators believe, and the control plane's tables. Stored words are compared by candidate: where the model's word is
that of candidate c, the implementation stores the words of c, and where it is nobody's, so is the other.

A machine may know of a step before the model takes it; such a node is `ahead` and is left out until then. The code
has more phases than the model (divergence DV8): each of them stands for one or a few phases of the model.

Not handled: calls and replies on their way, which the model does not have.

Paper: Appendix B   Spec: vars   Proofs: version_alignment, baseline_follows_commit
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from model_tests import model
from model_tests.digest_classes import candidates_with, why_not_stored
from model_tests.follower import Follower, Names
from model_tests.model_state import RAW
from nemo_dcr.protocol.attempt import AttemptPhase
from nemo_dcr.protocol.messages import StreamStatus
from nemo_dcr.protocol.tags import Tag, TrackerKind
from nemo_dcr.protocol.transition_state import CoordinatorState, Phase
from nemo_dcr.record import DELTA_MODES, AttemptMode
from tests.unit.protocol.cluster import Cluster

BEFORE_FIRST_READ = frozenset({Phase.OUT, Phase.ACQUIRING, Phase.SURVEYING, Phase.READING, Phase.BOOTSTRAPPING})
AFTER_AN_ATTEMPT = frozenset({"ready", "fenced"})
PHASES = {
    Phase.OUT: frozenset({"out"}),
    Phase.READING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.SURVEYING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.READY: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.PREPARING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.COMMITTING: frozenset({"committing"}),
    Phase.WAITING_DEADLINE: frozenset({"committing"}),
    Phase.RESOLVING: frozenset({"committing"}),
    Phase.CONFIRMING: frozenset({"fenced"}),
    Phase.BOOTSTRAPPING: frozenset({"fenced"}),
    Phase.RESTORING: frozenset({"fenced"}),
    Phase.REBUILDING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.UPDATING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.ENDING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.OPENING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.KILLING: AFTER_AN_ATTEMPT | {"prepared"},
    Phase.DROPPING: AFTER_AN_ATTEMPT | {"prepared"},
}
"""The phases of the model that a phase of the code stands for; an attempt whose reply was lost stays prepared there."""


def differences(
    config: model.Config, state: model.State, cluster: Cluster, follower: Follower, *, ahead: Collection[str] = ()
) -> list[str]:
    """Everything in which the cluster is not the model's state; empty when they are equal."""
    found = _control(state, cluster, follower.names)
    found += _network(state, cluster, follower.names)
    for name in cluster.receivers:
        if name not in ahead:
            found += _receiver(state, cluster, name, follower)
    for o in cluster.owners:
        if f"owner {o}" not in ahead:
            found += _owner(state, cluster, o, follower)
    for c in range(len(cluster.coordinators)):
        if f"coordinator {c}" not in ahead:
            found += _coordinator(state, cluster, c, follower.names)
    return found


def _differ(where: str, **pairs: tuple[Any, Any]) -> list[str]:
    return [
        f"{where}: {what} is {real!r}, in the model {modelled!r}"
        for what, (modelled, real) in pairs.items()
        if modelled != real
    ]


def _words(
    where: str, state: model.State, names: Names, item: str, word: frozenset[int], real: frozenset[str]
) -> list[str]:
    """The word is that of the same candidates on both sides, or of nobody."""
    held = candidates_with(state, item, word)
    why = why_not_stored(item, held, {names.candidate(c) for c in real}, raw=word >= RAW)
    return [f"{where}: {why}"] if why else []


def _receiver(state: model.State, cluster: Cluster, name: Any, follower: Follower) -> list[str]:
    names = follower.names
    r = names.node(name)
    m, e = state.rcv[r], cluster.receivers[name].state
    if not cluster.receivers[name].up:
        return []
    seen = {(o, number) for o, numbers in e.seen.items() for number in numbers}
    found = _differ(
        name,
        inc=(m.inc, names.incarnation(name, e.member.incarnation)),
        att=(m.att, e.attempt),
        fenced=(max(m.att, m.fenced), max(e.attempt, e.fenced)),
        tag=(m.tag, _tag(e.tag, names)),
        loaded=(m.loaded, e.loaded_digest != b""),
        gate=(m.gate, e.gate_open),
        requests=(m.requests, e.requests),
        open=(m.open, e.apply_open),
        writing=(m.writing, e.started),
        acked=(m.acked, e.acked),
        drained=(m.drained, e.drained),
        ends=({each.owner for each in m.ends}, {names.node(f"owner {o}") for o in e.manifests}),
        seen=(
            {d.item for d in m.seen},
            {
                names.item(key.owner, i)
                for key in cluster.payloads_of(e.attempt)
                if (key.owner, key.payload) in seen
                for i in cluster.items_of(key)
            },
        ),
        pending=(
            {(p.att, p.item) for p in m.pending},
            {(key.attempt, names.item(key.owner, i)) for key, i in cluster.unwritten(name)},
        ),
    )
    if e.attempt and m.stopped != e.stopped:
        # A stop or a newer prepare that waits for the drain has no line; what never writes is drained without (DV7).
        silent = e.stopped and (e.draining or e.current.mode is AttemptMode.FINISH or _is_proved(state, r))
        found += [] if silent else _differ(name, stopped=(m.stopped, e.stopped))
    for o, items in cluster.items.items():
        for item in items:
            i = names.item(o, item)
            found += _words(name, state, names, i, state.store[r][i], cluster.stored_as(name, item))
    return found


def _is_proved(state: model.State, r: str) -> bool:
    m = state.rcv[r]
    return any(a.att == m.att and a.receiver == r and a.inc == m.inc and a.proved for a in state.net if a.type == "ack")


def _tag(tag: Tag, names: Names) -> tuple[str, int, int, int]:
    return (tag.kind.value, tag.version, names.candidate(tag.candidate), tag.attempt)


def _owner(state: model.State, cluster: Cluster, o: Any, follower: Follower) -> list[str]:
    names, node = follower.names, f"owner {o}"
    m, own = state.own[names.node(node)], cluster.owners[o].state
    version = 0 if own.tracker.kind is TrackerKind.LOST else own.tracker.version
    found = _differ(
        node,
        inc=(m.inc, names.incarnation(node, own.incarnation)),
        att=(m.att, own.attempt),
        fenced=(max(m.att, m.fenced), max(own.attempt, own.fenced)),
        status=(m.status, _status(m.status, own)),
        kind=(m.kind, own.tracker.kind.value),
        ver=(m.ver, version),
        filling=(m.filling, -1 if own.filling is None else own.filling),
        frozen=(m.frozen, names.candidate(own.candidate)),
    )
    committed = m.live if m.frozen == 0 and m.began == state.step else None
    if own.resident is not None and names.candidate(own.resident) != committed:
        found += _differ(node, resident=(committed, own.resident))
    for item in cluster.items[o]:
        i = names.item(o, item)
        found += _words(f"baseline of {node}", state, names, i, state.base[i], cluster.based_as(o, item))
    return found


def _status(modelled: str, own: Any) -> str:
    """A stream that runs is only prepared in the model until its first payload."""
    if own.status is StreamStatus.STREAMING:
        if own.failure:
            return "failed"
        return "streaming" if own.published else modelled if modelled in ("prepared", "streaming") else "prepared"
    return str(own.status.value)


def _coordinator(state: model.State, cluster: Cluster, c: int, names: Names) -> list[str]:
    node, m = f"coordinator {c}", state.coord[names.node(f"coordinator {c}")]
    s: CoordinatorState = cluster.coordinators[c].state
    if not cluster.coordinators[c].up or (s.phase is Phase.ACQUIRING and cluster.coordinators[c].control_reply is None):
        return []  # it starts again, and nothing of the last life is left
    phases = _phases(s)
    if m.phase not in phases:
        return [f"{node}: phase is {s.phase.value}, which is {sorted(phases)}, in the model {m.phase}"]
    found = _differ(node, epoch=(m.epoch, s.epoch)) if m.phase not in ("out", "acquiring") else []
    if m.phase in ("running", "acked", "committing") and s.attempt is not None:
        found += _differ(node, att=(m.att, s.attempt.plan.attempt))
    if s.view is not None and s.phase not in BEFORE_FIRST_READ:
        found += _differ(node, view=(m.view, 0 if s.record is None else s.record.version + 1))
    return found


def _phases(s: CoordinatorState) -> frozenset[str]:
    if s.phase is Phase.ACQUIRING:
        return frozenset({"acquiring"})
    if s.phase is Phase.RUNNING and s.attempt is not None:
        return frozenset({"ready"} if s.attempt.phase is AttemptPhase.STOPPING else {"running"})
    return PHASES[s.phase]


def _control(state: model.State, cluster: Cluster, names: Names) -> list[str]:
    control = cluster.control
    found = _differ(
        "control plane", epoch=(state.epoch, control._epoch), records=(len(state.chain), len(control.history()))
    )
    found += _differ("control plane", attempts=(len(state.table), len(control._attempts)))
    found += _differ("control plane", dead=(state.dead, frozenset(map(names.candidate, control._dead))))
    for m, record in zip(state.chain, control.history(), strict=False):
        found += _differ(
            f"record {record.version}",
            cand=(m.cand, names.candidate(record.candidate)),
            att=(m.att, record.attempt),
            req=(m.req, _members(record.required, names)),
            epoch=(m.epoch, record.epoch),
            base=(m.base, record.baseline),
        )
    for t, (row, entry) in enumerate(zip(state.table, control._attempts, strict=False), 1):
        found += _differ(
            f"attempt {t}",
            epoch=(row.epoch, entry.epoch),
            mode=(row.mode, entry.mode.value),
            # Divergence DV14: a finish attempt names the committed candidate in the code, none in the model.
            cand=(row.cand, names.candidate(entry.candidate) if entry.mode in DELTA_MODES else 0),
            view=(row.view, 0 if entry.baseline is None else entry.baseline + 1),
            req=(row.req, _members(entry.required, names)),
        )
    return found


def _members(required: Any, names: Names) -> frozenset[tuple[str, int]]:
    return frozenset(
        (names.node(each.receiver), names.incarnation(each.receiver, each.incarnation)) for each in required
    )


def _network(state: model.State, cluster: Cluster, names: Names) -> list[str]:
    """Payloads and manifests that were published; the model's other messages are in the states of who sent them.

    Divergence DV32: a payload whose stream was stopped behind its line is one that the network lost.
    """
    told = [*cluster.payloads.values(), *cluster.unsent.values()]
    payloads = {(p.key.attempt, names.item(p.key.owner, item)) for p in told for item, _, _ in p.records}
    ends = {(attempt, names.node(f"owner {o}")) for attempt, o in cluster.manifests}
    return _differ(
        "network",
        payloads=({(m.att, m.item) for m in state.net if m.type == "payload"}, payloads),
        ends=({(m.att, m.owner) for m in state.net if m.type == "end"}, ends),
    )
