"""Records the lines of clusters in memory in the order in which they happened, those of the control plane among them.

A recorder takes what a cluster traced while it started, and then each line when it is traced. The last line of a
process that crashes there is a line all the same. The line of a receiver gets the digest classes of its items, from who
knows them: the words of a simulated cluster, or the storage of a local one (digest_classes).

Not handled: files (trace_files); following while the cluster runs (cluster_lines).

Spec: Next, store
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from model_tests.cluster_lines import then
from model_tests.digest_classes import told
from model_tests.storage_oracle import StorageOracle
from model_tests.trace_files import Line
from nemo_dcr.ids import ReceiverId
from nemo_dcr.testing.local_cluster import LocalCluster
from nemo_dcr.testing.local_network import Life
from nemo_dcr.trace import Emit
from tests.unit.protocol.cluster import Cluster

CONTROL_CALLS = ("acquire_epoch", "prepare", "commit", "kill", "bootstrap")


class _Recorder:
    """Lines so far, and how many entries of the control plane's journal are among them."""

    def __init__(self, control: Any) -> None:
        self.lines: list[Line] = []
        self._control = control
        self._journal = 0
        for name in CONTROL_CALLS:
            setattr(control, name, then(getattr(control, name), self._note_control))

    def note(self, node: str, incarnation: int, emitted: Emit) -> None:
        self.lines.append(Line(node, incarnation, emitted, f"line {len(self.lines) + 1}"))

    def _note_control(self) -> None:
        for entry in self._control.journal()[self._journal :]:
            self._journal += 1
            self.note("control", 0, Emit(entry.action, entry.attempt, entry.args, entry.post))


def _with_classes(emitted: Emit, stored: str | None) -> Emit:
    return emitted if stored is None else replace(emitted, post={**emitted.post, "stored": stored})


def record_local(cluster: LocalCluster, oracle: StorageOracle) -> list[Line]:
    """The lines of a local cluster that just started, and all that it will trace."""
    recorder = _Recorder(cluster.control)
    lives = {each.life.name: each.life for each in (*cluster.receivers.values(), *cluster.owners.values())}
    for node, emitted in cluster.trace:
        recorder.note(node, lives[node].incarnation, _with_classes(emitted, oracle.stored(lives[node])))
    traced = cluster.traced

    def note(life: Life, emitted: Emit) -> None:
        recorder.note(life.name, life.incarnation, _with_classes(emitted, oracle.stored(life)))
        traced(life, emitted)

    cluster.traced = note  # type: ignore[method-assign]
    return recorder.lines


def record_simulated(cluster: Cluster, *, classes: bool = True) -> list[Line]:
    """The same of a simulated cluster, with digest classes or without; its lines may come from any of its methods."""
    recorder = _Recorder(cluster.control)
    noted = cluster._note

    def incarnation(node: str) -> int:
        if node.startswith("coordinator "):
            return 0
        if node.startswith("owner "):
            return next(int(own.state.incarnation) for o, own in cluster.owners.items() if f"owner {o}" == node)
        return int(cluster.receivers[node].state.member.incarnation)  # type: ignore[index]

    def stored(node: str) -> str | None:
        receiver = ReceiverId(node)
        if not classes or receiver not in cluster.receivers:
            return None
        foreign = cluster.receivers[receiver].foreign  # no trace says which bytes were accepted
        items = ((o, item) for o, items in cluster.items.items() for item in items if item not in foreign)
        return told({(int(o), item): cluster.stored_as(receiver, item) for o, item in items})

    def note(node: str, effects: Any) -> list[Any]:
        before = len(cluster.lines)
        rest = noted(node, effects)
        for name, emitted in cluster.lines[before:]:
            recorder.note(name, incarnation(name), _with_classes(emitted, stored(name)))
        return rest

    for node, emitted in cluster.lines:
        recorder.note(node, incarnation(node), _with_classes(emitted, stored(node)))
    cluster._note = note  # type: ignore[method-assign]
    return recorder.lines
