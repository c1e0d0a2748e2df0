"""What became of every edge of a configuration of the specification on the cluster, in numbers and by kind.

    PYTHONPATH=spec .venv/bin/python -m model_tests.schedule_report MCDeltaRefit MCDeltaRefit_Lost

Bounds are those of the configuration file, or changed ones where its faults can hardly meet each other.
Not handled: what a kind means (freedoms).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from model_tests import explore, replay, schedules
from model_tests.freedoms import FREEDOMS, kind_of
from model_tests.model import Config
from model_tests.schedules import Report

CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "MCDeltaRefit_Abort": ({"max_candidate": 1}, {"max_attempt_to_fail": 2}),
}
"""Constants and bounds that are not those of the file: a coordinator aborts an attempt that it fails first."""
HIDING = frozenset(freedom.name for freedom in FREEDOMS if freedom.hides)
EXACT = frozenset(freedom.name for freedom in FREEDOMS if freedom.exact)


@dataclass(frozen=True)
class Covered:
    """The report of one configuration."""

    name: str
    config: Config
    report: Report

    @property
    def kinds(self) -> Counter[str | None]:
        """How many edges of each kind were not taken."""
        return Counter(kind_of(self.config, *edge, failure) for edge, failure in self.report.unrealised)

    @property
    def openings(self) -> set[str | None]:
        """Kinds of the edges that lead to states which were not reached."""
        ways = [(edge, failure) for edge, failure in self.report.unrealised if edge[2] in self.report.lost]
        return {kind_of(self.config, *edge, failure) for edge, failure in ways}

    @property
    def unnamed(self) -> list[str]:
        """Edges that were not taken and are of no named kind, and why."""
        return [
            str(failure) for edge, failure in self.report.unrealised if kind_of(self.config, *edge, failure) is None
        ]

    @property
    def taken_kinds(self) -> set[str | None]:
        """Kinds of edges that were taken."""
        return {kind_of(self.config, *edge) for edge in self.report.taken}

    def faults(self) -> list[str]:
        """Why the code and the specification do not agree here; empty when they do."""
        report, found = self.report, [f"states differ: {text}" for _, text in self.report.diverged]
        found += [f"not taken, and of no named kind: {text}" for text in self.unnamed]
        found += [f"taken, though of kind {kind}" for kind in self.taken_kinds & EXACT]
        if self.openings - HIDING or (report.lost and not self.openings):
            found.append(f"{len(report.lost)} states were not reached, behind {self.openings or 'nothing'}")
        if len(report.taken) + len(report.unrealised) + len(report.behind) + len(report.diverged) != report.edges:
            found.append("some edges were not tried")
        return found

    def __str__(self) -> str:
        report = self.report
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items(), key=str))
        return (
            f"{self.name}: {report.states} states, {report.edges} edges; {len(report.taken)} taken in "
            f"{report.schedules} schedules with {report.steps} steps; not taken: {kinds or 'none'}; "
            f"{len(report.behind)} edges of {len(report.lost)} states lie behind those"
        )


def covered(name: str, change: Callable[[], None] = lambda: None) -> Covered:
    """Perform every edge of a configuration. Payloads arrive sound: what else arrives never gets so far (DV10).

    `change` is called after the start; it may weaken the code.

    Raises: ValueError when the cluster does not start where the model does.
    """
    config, bounds = explore.read_bounds(f"{name}.cfg")
    constants, limits = CHANGED.get(name, ({}, {}))
    config, bounds = replace(config, arrivals=("sound",), **constants), replace(bounds, **limits)
    starts = [replay.warm(config)]
    if bounds.cold:
        starts = [replay.cold(config), replay.cold(config, proves=False)]
    for start in starts:
        if found := start.differences():
            raise ValueError(f"the start is another one: {'; '.join(found)}")
    graph = schedules.graph_of(explore.edges(config, bounds))
    change()
    return Covered(name, config, schedules.cover(starts, graph))


def main(names: list[str]) -> int:
    """Print the reports; 1 when code and specification do not agree."""
    faults = []
    for name in names:
        found = covered(name)
        print(found, flush=True)
        faults += found.faults()
    print("\n".join(faults))
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
