"""Comparing the names that a loader reports with the copies that were intercepted.

Loaders report by two conventions: the resident name that they wrote, or the canonical name that they were given; tied
names of one storage stand for each other. A reported name that is no resident tensor and has no copy is a native skip;
a resident tensor without elements needs no copy.

Paper: Section 6.1 (loader conditions); Figure A.8   Conditions: LC2, LC3
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.conditions import ReportedAsCopied
from nemo_dcr.receiver.paths import Step
from nemo_dcr.receiver.residents import Residents


class Taken(Protocol):
    """One canonical tensor of a call and the copies that were seen for it."""

    @property
    def tensor(self) -> TensorMeta:
        """The canonical tensor."""
        ...

    @property
    def copies(self) -> Sequence[Step]:
        """Its copies into resident storage."""
        ...

    @property
    def accounted(self) -> Sequence[Step]:
        """The writes that a report may stand for: the copies, and constants of a tensor that the loader erased."""
        ...


def report_row(report: Iterable[str] | None, taken: Collection[Taken], residents: Residents) -> ReportedAsCopied | None:
    """The LC2 facts of one call when they do not hold, else None. A loader without a report is judged by copies."""
    if report is None:
        return None
    reported = set(report)
    copied = {step.target.storage for entry in taken for step in entry.accounted}
    not_copied = [
        name
        for name in reported & residents.tensors.keys()
        if residents.tensors[name].storage not in copied and residents.tensors[name].tensor.numel() > 0
    ]
    not_reported = [
        entry.tensor.name
        for entry in taken
        if entry.tensor.name not in reported
        and any(reported.isdisjoint(residents.names[step.target.storage]) for step in entry.copies)
    ]
    row = ReportedAsCopied(not_copied=not_copied, not_reported=not_reported)
    return None if row.check() is None else row
