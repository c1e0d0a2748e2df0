"""The trace of a simulated cluster, line by line, for a `Follower`.

A `Cluster` keeps the lines of its machines and the journal of its control plane apart. One step of it either asks the
control plane or lets one machine act, so after each step the new lines have one order.

Not handled: the trace of real nodes (trace_export).

Spec: Next
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from model_tests import model
from model_tests.follower import Follower, Names
from model_tests.model_state import Config, Map
from nemo_dcr.trace import Emit
from tests.unit.protocol.cluster import Cluster


def control_line(entry: Any) -> Emit:
    """A journal entry of the control plane as a line."""
    return Emit(entry.action, entry.attempt, entry.args, entry.post)


def config_of(cluster: Cluster) -> tuple[Config, Names]:
    """Constants and names for a cluster that just started; everything keeps its own name."""
    owner_of = {item: f"owner {o}" for o, items in cluster.items.items() for item in items}
    config = Config(
        receivers=tuple(str(name) for name in cluster.receivers),
        owners=tuple(f"owner {o}" for o in cluster.owners),
        items=tuple(owner_of),
        owner_of=Map(owner_of),
        coordinators=tuple(f"coordinator {c}" for c in range(len(cluster.coordinators))),
        max_candidate=0,
        changes=Map({}),
        gate_mode=cluster.refit.gate.value,
        requests=("q",),
    )
    items = {(owner, item): item for item, owner in owner_of.items()}
    return config, Names(items=items, changes=lambda new, old: changes(cluster, new, old))


def changes(cluster: Cluster, new: str, old: str) -> frozenset[str]:
    """Items in which one candidate differs from another."""
    before, after = cluster.candidates[old], cluster.candidates[new]
    return frozenset(item for item in after if after[item] != before[item])


class ClusterLines:
    """Hands the new lines of a cluster to a follower."""

    def __init__(self, cluster: Cluster, follower: Follower, watch: Callable[[str, Emit], None] | None = None) -> None:
        """`watch` is told each line that the follower took."""
        self.cluster = cluster
        self.follower = follower
        self._watch = watch
        self._lines = 0
        self._journal = 0

    def follow(self) -> list[model.Step]:
        """Everything since the last call, as steps of the model; call it after each step of the cluster.

        Raises: Rejected.
        """
        steps: list[model.Step] = []
        journal = self.cluster.control.journal()
        for entry in journal[self._journal :]:
            self._journal += 1
            steps += self._take("control", control_line(entry), None, self._asked(int(entry.post.get("epoch") or 0)))
        for node, emitted in self.cluster.lines[self._lines :]:
            self._lines += 1
            steps += self._take(node, emitted, self._incarnation(node), None)
        return steps

    def _take(self, node: str, emitted: Emit, incarnation: int | None, by: str | None) -> list[model.Step]:
        steps = self.follower.line(node, emitted, incarnation, by)
        if self._watch is not None:
            self._watch(node, emitted)
        return steps

    def _asked(self, epoch: int) -> str | None:
        """The coordinator that the control plane just gave this epoch to."""
        for c, node in enumerate(self.cluster.coordinators):
            if node.up and getattr(node.control_reply, "epoch", None) == epoch:
                return f"coordinator {c}"
        return None

    def _incarnation(self, node: str) -> int | None:
        if node in self.cluster.receivers:
            return int(self.cluster.receivers[node].state.member.incarnation)  # type: ignore[index]
        if node.startswith("owner "):
            owner = next((o for o in self.cluster.owners if f"owner {o}" == node), None)
            return None if owner is None else int(self.cluster.owners[owner].state.incarnation)
        return None


def attach(cluster: Cluster, watch: Callable[[str, Emit], None] | None = None) -> Follower:
    """A follower that is told every line of a cluster that just started, at once, whoever drives the cluster."""
    follower = Follower(*config_of(cluster))
    lines = ClusterLines(cluster, follower, watch)
    lines.follow()
    for name in ("_note", "_do_control", "_do_late_control"):
        setattr(cluster, name, then(getattr(cluster, name), lines.follow))
    return follower


def then(act: Callable[..., Any], after: Callable[[], object]) -> Callable[..., Any]:
    """`act`, and after it each time `after`."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = act(*args, **kwargs)
        after()
        return result

    return both
