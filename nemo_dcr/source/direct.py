"""Direct projection: the records of one canonical tensor, from local words and index maps alone.

An affine unit is one canonical tensor with the boxes of it that this owner holds. Changed words are found by comparing
stored bits with the tracker; their destinations come from the maps and their values from the projections. Nothing is
gathered, assembled or communicated. An XOR record carries old ^ new of the stored words, an overwrite record carries
the projected new value. A changed source element always gives a record, also when its projected bits stay the same.
Not handled: which mode and encoding an attempt allows (see `delta`).

Paper: Section 5 (C_T, pi_T, o_T); Figure A.2, Figure D.1   Proofs: change_detection_complete, affine_destinations
Conditions: SC3, SC5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.kernels import hot
from nemo_dcr.kernels.plain import Indices, gather
from nemo_dcr.source.baseline import LOST, Baseline
from nemo_dcr.source.tasks import AffineTask


@dataclass(frozen=True, slots=True, eq=False)
class Emission:
    """The records of one unit and what they count."""

    item: Item | None
    """None when there is nothing to send."""
    changed: int
    """Source elements that changed."""
    emitted_changed: int
    """Records whose canonical bits changed."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineUnit:
    """One canonical tensor and this owner's tasks for it."""

    tensor: TensorMeta
    tasks: tuple[AffineTask, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the source shards."""
        return sum(task.nbytes for task in self.tasks)

    @property
    def source_elements(self) -> int:
        """Owned source elements."""
        return sum(task.map.domain for task in self.tasks)

    @property
    def preserves_bits(self) -> bool:
        """True iff all projections hand stored bits through."""
        return all(task.projection.preserves_bits for task in self.tasks)

    def changes(self, trackers: Baseline, encoding: Encoding) -> Emission:
        """Records of all elements whose candidate bits differ from the tracker.

        Raises: ConditionViolated (SC3) when a tracker is not committed, (SC4) when a shard drifted.
        """
        entries: list[tuple[Indices, Words]] = []
        changed = effective = 0
        for task in self.tasks:
            new, old = task.words(), trackers.words(task.key)
            indices, values = hot.loops().changes(new, old, masks=encoding is Encoding.XOR)
            changed += len(indices)
            if not len(indices):
                continue
            effective += _effective(task, new, old, indices)
            if encoding is not Encoding.XOR:
                values = task.projection.apply(values)
            entries.append(_in_order(task, indices, values))
        return Emission(_merge(self.tensor, encoding, entries), changed, effective)

    def candidate(self, trackers: Baseline) -> Emission:
        """Overwrites of all elements, from the candidate; trackers that are not lost only give the counts.

        Raises: ConditionViolated (SC4) when a shard drifted.
        """
        words = [task.words() for task in self.tasks]
        changed = effective = 0
        for task, new in zip(self.tasks, words, strict=True):
            if trackers.tag_of(task.key) != LOST:
                old = trackers.words(task.key)
                indices = hot.loops().changed_indices(new, old)
                changed += len(indices)
                effective += _effective(task, new, old, indices)
        return Emission(self._everything(words), changed, effective)

    def committed(self, trackers: Baseline) -> Emission:
        """Overwrites of all elements, from the committed baseline and never from the candidate (D19).

        Raises: ConditionViolated (SC3) when a tracker is not committed.
        """
        return Emission(self._everything([trackers.words(task.key) for task in self.tasks]), 0, 0)

    def _everything(self, words: Sequence[Words]) -> Item | None:
        tasks = self.tasks
        values = [task.projection.apply(source) for task, source in zip(tasks, words, strict=True)]
        if len(tasks) == 1 and tasks[0].map.contiguous and tasks[0].map.domain:
            return Item.run(self.tensor, Encoding.OVERWRITE, tasks[0].map.first, values[0])
        entries = [
            _in_order(task, np.arange(task.map.domain, dtype=np.int64), projected)
            for task, projected in zip(tasks, values, strict=True)
        ]
        return _merge(self.tensor, Encoding.OVERWRITE, entries)


def _effective(task: AffineTask, new: Words, old: Words, indices: Indices) -> int:
    """How many of the changed elements have other canonical bits than before."""
    if task.projection.preserves_bits:
        return len(indices)
    before, after = (task.projection.apply(gather(words, indices)) for words in (old, new))
    return int(np.count_nonzero(before != after))


def _in_order(task: AffineTask, indices: Indices, values: Words) -> tuple[Indices, Words]:
    """Destinations of `indices` in increasing order, and their values."""
    destinations = task.map.destinations(indices)
    if task.map.monotone:
        return destinations, values
    order = np.argsort(destinations)
    return destinations[order], values[order]


def _merge(tensor: TensorMeta, encoding: Encoding, entries: Sequence[tuple[Indices, Words]]) -> Item | None:
    """One item of the entries of several tasks.

    Raises: ConditionViolated (SC1) when two tasks feed one canonical element.
    """
    entries = [entry for entry in entries if len(entry[0])]
    if not entries:
        return None
    destinations, values = entries[0]
    if len(entries) > 1:
        destinations = np.concatenate([entry[0] for entry in entries])
        values = np.concatenate([entry[1] for entry in entries])
        order = np.argsort(destinations, kind="stable")
        destinations, values = destinations[order], values[order]
        if bool((destinations[1:] == destinations[:-1]).any()):
            raise ConditionViolated("SC1", tensor.name, "two tasks of this owner feed one element; give it one task")
    return Item.of(tensor, encoding, destinations, values)
