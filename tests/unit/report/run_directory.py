"""Run directories as processes write them, without the processes: any number of versions and nodes, any names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from nemo_dcr.ids import AttemptId, CandidateId, Epoch, Incarnation, OwnerId, Version
from nemo_dcr.runtime.change_log import DIRECTORY as CHANGES
from nemo_dcr.runtime.change_log import ChangeLog, Holding
from nemo_dcr.runtime.chronicle import (
    DIRECTORY,
    AttemptBegan,
    AttemptOver,
    Chronicle,
    CommitResolved,
    GateMoved,
    Measured,
    TookOver,
    TransitionOver,
    VersionDurable,
)
from nemo_dcr.runtime.timings import Span, Timings
from nemo_dcr.source.delta import Counts

BEGIN = 1_700_000_000.0
STEP_S = 10.0
"""Seconds from one transition to the next; an attempt takes two, a transition four with a failed attempt."""


def write_run(
    directory: Path,
    *,
    versions: int = 3,
    receivers: Sequence[str] = ("e0/0", "e1/0"),
    owners: int = 2,
    kinds: Sequence[str] = ("model.layers.0.q.weight", "model.norm.weight"),
    failing: frozenset[int] = frozenset({2}),
    reason: str = "receiver e1/0 is lost: the connection broke, in phase applying",
    payloads: int = 3,
    coordinator: str = "coordinator-a",
) -> Path:
    """A run in which the first attempt of the versions `failing` fails for `reason`; returns `directory`."""
    place = directory / DIRECTORY
    begin = partial(Chronicle, place, incarnation=Incarnation(1), now=lambda: BEGIN)
    story = begin(node=coordinator)
    story.tell(TookOver(at=BEGIN, epoch=Epoch(1)))
    files = {name: begin(node=name) for name in receivers}
    files |= {f"owner-{rank}": begin(node=f"owner-{rank}") for rank in range(owners)}
    for name in receivers:
        files[name].tell(_gate(BEGIN, 0, True, 0))
    elements = dict.fromkeys(kinds, 1000)
    changes = [
        ChangeLog(directory / CHANGES, Holding(OwnerId(rank), Incarnation(1), 1000 * len(kinds), elements))
        for rank in range(owners)
    ]
    attempt = 0
    for version in range(1, versions + 1):
        at, candidate = BEGIN + STEP_S * version, CandidateId(f"step-{version}")
        for failed in (True, False) if version in failing else (False,):
            attempt += 1
            mode = "overwrite" if not failed and version in failing else "xor"
            began = at if failed or version not in failing else at + 2
            story.tell(
                AttemptBegan(
                    at=began,
                    attempt=AttemptId(attempt),
                    mode=mode,
                    gate="sync",
                    base=Version(version - 1),
                    candidate=candidate,
                    receivers=tuple(receivers),
                    owners=owners,
                )
            )
            for name in receivers:
                files[name].tell(_gate(began, attempt, False, version - 1))
            for name, file in files.items():
                file.tell(_measured(name, attempt, began, payloads, mode))
            story.tell(AttemptOver(at=began + 1.8, attempt=AttemptId(attempt), reason=reason if failed else ""))
        end = at + (4 if version in failing else 2)
        story.tell(CommitResolved(at=end - 0.15, attempt=AttemptId(attempt), outcome="committed"))
        story.tell(
            VersionDurable(
                at=end - 0.1,
                version=Version(version),
                candidate=candidate,
                attempt=AttemptId(attempt),
                receivers=tuple(receivers),
            )
        )
        story.tell(TransitionOver(at=end, version=Version(version), candidate=candidate))
        for name in receivers:
            files[name].tell(_gate(end, attempt, True, version))
        for log in changes:
            changed = {kinds[0]: version}
            counts = Counts(1000 * len(kinds), True, version, changed_by_tensor=changed)
            log.append(Version(version), candidate, counts)
    for file in (story, *files.values(), *changes):
        file.close()
    return directory


def _gate(at: float, attempt: int, is_open: bool, version: int) -> GateMoved:
    told = Version(version) if is_open else None
    return GateMoved(at=at, attempt=AttemptId(attempt), is_open=is_open, tag=f"clean({version})", version=told)


def _measured(node: str, attempt: int, began: float, payloads: int, mode: str) -> Measured:
    stages = ("fetch", "decode", "apply") if "/" in node else ("construct", "encode", "publish")
    each = 1.5 / max(1, payloads)
    spans = tuple(
        Span(stage, began + 0.1 * order + number * each, began + 0.1 * order + (number + 0.5) * each, str(number))
        for order, stage in enumerate(stages)
        for number in range(payloads)
    )
    counts = {"payloads": payloads, "payload_bytes": 1000 * payloads, "emitted": 50, "emitted_changed": 40}
    counts["xor_items" if mode == "xor" else "overwrite_items"] = 7
    marks = {"apply_ended": began + 1.7} if "/" in node else {"construct_began": began}
    timings = Timings(node, marks, dict.fromkeys(stages, 0.5), counts, spans=spans)
    return Measured(at=began + 1.8, attempt=AttemptId(attempt), timings=timings)
