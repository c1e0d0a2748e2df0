"""One class for each source condition: a trainer that satisfies it, and one that breaks it and no other.

`satisfying` runs to its end, `breaking` ends with the typed error of the condition before a record is made. Each pair
takes the smallest piece of the source side that the condition speaks of: the plan of all ranks, the replicas, the
baseline, the candidate, a map, an assembly, or a receiver's look at its own version.

Paper: Appendix A.1   Conditions: SC1-SC7
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Item, PathClass
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.ids import AttemptId, CandidateId, OwnerId, Version
from nemo_dcr.protocol import alignment
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.assembly import assemble
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.geometry import affine_row, make_plan
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.replicas import check_replicas, replica_digests
from nemo_dcr.source.tasks import AffineTask, Part

W = TensorMeta("w", (4, 2), "BF16")
TOP, BOTTOM = BoxMap.box(W, (0, 0), (2, 2)), BoxMap.box(W, (2, 0), (2, 2))
WORDS: Words = np.array([0x0000, 0x8000, 0x7FC1, 0x7F81, 0x0001, 0x3F80, 0x4000, 0xFFFF], dtype="<u2")


class SourceConformance(ABC):
    """One condition."""

    code: ClassVar[str]

    @abstractmethod
    def satisfying(self) -> None:
        """Do what the condition allows."""

    @abstractmethod
    def breaking(self) -> None:
        """Do what the condition forbids.

        Raises: UnsupportedMapping or ConditionViolated, with this condition.
        """

    def check_breaking(self) -> None:
        """Raises: AssertionError when the breaking trainer is accepted, or refused by another condition."""
        try:
            self.breaking()
        except (UnsupportedMapping, ConditionViolated) as refusal:
            if refusal.condition != self.code:
                raise AssertionError(f"{self.code}: refused by another condition: {refusal}") from refusal
            return
        raise AssertionError(f"{self.code}: the breaking trainer is accepted")


def task(box: BoxMap, words: Words = WORDS) -> AffineTask:
    """The task that reads the box of full words."""
    return AffineTask.identity(box, lambda: box.take(words))


def frozen_owner(live: Words) -> DeltaOwner:
    """An owner of the whole tensor whose baseline is version 0 with WORDS; `live` is what it reads afterwards."""
    holder = [WORDS]
    owner = DeltaOwner(OwnerId(0), [AffineTask.identity(BoxMap.whole(W), lambda: holder[0])])
    owner.capture(Version(0))
    holder[0] = live
    return owner


def items_of(owner: DeltaOwner, mode: AttemptMode = AttemptMode.XOR, base: int = 0) -> list[Item]:
    """All items of one stream."""
    buckets = owner.stream(mode, {W.name: PathClass.XOR}, attempt=AttemptId(1), base=Version(base))
    return [item for bucket in buckets for item in bucket.items]


class OneOwner(SourceConformance):
    """Each unique source element has one owner and one task."""

    code = "SC1"

    def satisfying(self) -> None:
        """Two halves, one of them on two ranks."""
        self._plan(((0, TOP), (1, BOTTOM), (2, BOTTOM)))

    def breaking(self) -> None:
        """Two boxes that share a row."""
        self._plan(((0, TOP), (1, BoxMap.box(W, (1, 0), (3, 2)))))

    @staticmethod
    def _plan(held: Iterable[tuple[int, BoxMap]]) -> None:
        make_plan(affine_row(OwnerId(rank), task(box)) for rank, box in held)


class EqualReplicas(SourceConformance):
    """Replicas hold the same bits."""

    code = "SC2"

    def satisfying(self) -> None:
        """Two ranks with equal words, NaN payloads and both zeros included."""
        self._compare(WORDS.copy())

    def breaking(self) -> None:
        """A zero of the other sign on one of them."""
        self._compare(WORDS ^ np.array([0x8000, *[0] * 7], dtype="<u2"))

    @staticmethod
    def _compare(second: Words) -> None:
        held = {OwnerId(0): task(BoxMap.whole(W)), OwnerId(1): task(BoxMap.whole(W), second)}
        plan = make_plan(affine_row(rank, mine) for rank, mine in held.items())
        check_replicas({rank: replica_digests(plan, [mine]) for rank, mine in held.items()})


class CommittedBaseline(SourceConformance):
    """Changes are found against the committed version and no other."""

    code = "SC3"

    def satisfying(self) -> None:
        """The record is at the version of the tracker."""
        items_of(frozen_owner(WORDS ^ 1))

    def breaking(self) -> None:
        """The record is one version ahead."""
        items_of(frozen_owner(WORDS ^ 1), base=1)


class FrozenCandidate(SourceConformance):
    """The candidate keeps its bits, shape and dtype for the whole transition."""

    code = "SC4"

    def satisfying(self) -> None:
        """Two attempts find the same records. Raises: AssertionError when they do not."""
        owner = frozen_owner(WORDS ^ np.array([1, 0, 1, 0, 0, 0, 0, 1], dtype="<u2"))
        first, second = (items_of(owner, AttemptMode.OVERWRITE) for _ in range(2))
        if [i.flat_indices().tolist() for i in first] != [i.flat_indices().tolist() for i in second] or not first:
            raise AssertionError("SC4: a retry found other records")

    def breaking(self) -> None:
        """The shard has grown wider since it was declared."""
        items_of(frozen_owner(WORDS.astype("<u4")))


class InjectiveMap(SourceConformance):
    """Each source element of an affine task feeds one canonical element of its own."""

    code = "SC5"

    def satisfying(self) -> None:
        """A box in transposed order. Raises: AssertionError when two elements meet."""
        box = BoxMap.box(W, (0, 0), (4, 2), axes=(1, 0))
        if len(set(box.all_destinations().tolist())) != W.numel:
            raise AssertionError("SC5: two source elements have one destination")

    def breaking(self) -> None:
        """A box that leaves the tensor, so that its elements would wrap onto others."""
        BoxMap.box(W, (3, 0), (2, 2))


class CompleteParts(SourceConformance):
    """Converted parts cover the tensor, and agree where they overlap."""

    code = "SC6"

    def satisfying(self) -> None:
        """Two halves and a part of both, bit for bit the same. Raises: AssertionError when the words are others."""
        middle = BoxMap.box(W, (1, 0), (2, 2))
        whole = assemble(W, [Part(box, box.take(WORDS)) for box in (TOP, middle, BOTTOM)])
        if whole.tobytes() != WORDS.tobytes():
            raise AssertionError("SC6: the assembled words are others")

    def breaking(self) -> None:
        """An overlap that differs in the sign of a zero."""
        other = WORDS ^ np.array([0x8000, *[0] * 7], dtype="<u2")
        assemble(W, [Part(BoxMap.whole(W), WORDS), Part(TOP, TOP.take(other))])


class AlignedVersion(SourceConformance):
    """XOR needs receivers at the committed version, overwrites need that version or a mixture with this candidate."""

    code = "SC7"

    def satisfying(self) -> None:
        """Version 5 for XOR; a mixture of version 5 and this candidate for overwrites."""
        clean = Tag(TagKind.CLEAN, Version(5))
        mixed = Tag(TagKind.DIRTY, Version(5), CandidateId("c6"))
        self._admit(clean, AttemptMode.XOR)
        self._admit(mixed, AttemptMode.OVERWRITE)
        self._admit(replace(mixed, candidate=CandidateId("other")), AttemptMode.DENSE)

    def breaking(self) -> None:
        """A mixture with another candidate, for overwrites."""
        self._admit(Tag(TagKind.DIRTY, Version(5), CandidateId("other")), AttemptMode.OVERWRITE)

    def _admit(self, tag: Tag, mode: AttemptMode) -> None:
        """What a receiver does in prepare. Raises: ConditionViolated (SC7) instead of the refusal that it replies."""
        eligible = alignment.is_eligible(
            tag, mode=mode, version=Version(5), record_attempt=AttemptId(9), candidate=CandidateId("c6")
        )
        if not eligible:
            raise ConditionViolated(self.code, str(tag), f"not eligible for an attempt in mode {mode.value}")


SOURCE_CONFORMANCE: tuple[type[SourceConformance], ...] = (
    OneOwner,
    EqualReplicas,
    CommittedBaseline,
    FrozenCandidate,
    InjectiveMap,
    CompleteParts,
    AlignedVersion,
)
"""Appendix A.1 in order."""
