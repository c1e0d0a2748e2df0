"""A trainer in one process: random shards of random weights on several ranks, and the canonical words that they mean.

Geometry is drawn from a seed: boxes along any axis or over the flat tensor, uneven and empty ones, stored transposed,
some with replicas, some of FP32 words whose cast is the canonical value. With one rank, some tensors may be residual:
products with a scale that they share. Each rank holds copies of its own shards, so nothing is shared but the plan.
Not handled: optimizer steps; the words of the next candidate are drawn.

Paper: Section 5 (fixed shard geometry, tasks)   Conditions: SC1, SC2, SC4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, OwnerId
from nemo_dcr.source.baseline_files import BaselineFiles
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import LoneExchange
from nemo_dcr.source.geometry import ShardRow, affine_row, input_row, make_plan, residual_row
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.projection import Cast, Identity, Projection, ScaledCast
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.tasks import AffineTask, Part, ResidualInput, ResidualTask
from nemo_dcr.testing.source_cases import changed_words, random_words

SCALE = "scale"
"""Name of the FP32 factor that all residual tensors share."""
MASTER = "F32"
"""Source dtype of cast and residual tensors."""
CASTS = ("BF16", "F16")
"""Canonical dtypes that may come from FP32 masters."""


def random_boxes(rng: np.random.Generator, tensor: TensorMeta) -> list[BoxMap]:
    """Boxes that cover each element of `tensor` once: parts of one axis, some of them empty, in any storage order."""
    view = (tensor.numel,) if rng.random() < 0.3 else tensor.shape
    if not view:
        return [BoxMap.whole(tensor)]
    axis = int(rng.integers(len(view)))
    cuts = sorted(int(cut) for cut in rng.integers(0, view[axis] + 1, int(rng.integers(0, 3))))
    boxes = []
    for begin, end in zip([0, *cuts], [*cuts, view[axis]], strict=True):
        start, extent = [0] * len(view), list(view)
        start[axis], extent[axis] = begin, end - begin
        order = tuple(int(a) for a in rng.permutation(len(view)))
        boxes.append(BoxMap.box(tensor, tuple(start), tuple(extent), view=view, axes=order))
    return list({box.label: box for box in boxes}.values())


class LocalSource:
    """All ranks of one trainer: the weights of every candidate, and what each rank holds of them."""

    def __init__(
        self, tensors: Sequence[TensorMeta], *, seed: int = 0, owners: int = 1, residual: bool = False, chunk: int = 64
    ) -> None:
        """Draw geometry and first weights. `residual` needs one owner; `chunk` is the chunk target in bytes."""
        self.rng = np.random.default_rng(seed)
        self.tensors = tuple(tensors)
        self.owners = tuple(OwnerId(rank) for rank in range(owners))
        self.codec = CodecConfig(chunk_target_bytes=chunk, bucket_target_bytes=2 * chunk)
        self._projections: dict[str, Projection] = {}
        self._scaled: dict[str, TensorMeta] = {}
        self._inputs: dict[str, tuple[str, int]] = {}
        """Source dtype and element count by tensor name, and of the scale."""
        self._boxes: dict[OwnerId, list[BoxMap]] = {owner: [] for owner in self.owners}
        for tensor in self.tensors:
            self._place(tensor, scaled=residual and tensor.dtype in CASTS)
        first = {name: random_words(self.rng, *self._inputs[name]) for name in sorted(self._inputs)}
        if self._scaled:
            first[SCALE] = np.array([0.75], dtype="<f4").view("<u4")
        self.weights: dict[CandidateId, dict[str, Words]] = {NO_CANDIDATE: first}
        """Full source words by candidate and name; the empty candidate is version 0."""
        self.ranks = {owner: LocalRank(self, owner, self._boxes[owner]) for owner in self.owners}
        rows = [row for rank in self.ranks.values() for row in rank.rows()]
        self.plan = make_plan(rows, expected=self.tensors)

    def _place(self, tensor: TensorMeta, *, scaled: bool) -> None:
        if scaled:
            self._scaled[tensor.name] = tensor
            self._inputs |= {tensor.name: (MASTER, tensor.numel), SCALE: (MASTER, 1)}
            return
        projection: Projection = Identity(tensor.dtype)
        if tensor.dtype in CASTS and self.rng.random() < 0.4:
            cast, scaled_cast = Cast(MASTER, tensor.dtype), ScaledCast(MASTER, tensor.dtype, 0.5)
            projection = cast if self.rng.random() < 0.7 else scaled_cast
        self._projections[tensor.name] = projection
        self._inputs[tensor.name] = (projection.source, tensor.numel)
        for box in random_boxes(self.rng, tensor):
            holders = 1 + int(self.rng.integers(len(self.owners)))
            for owner in self.rng.permutation(len(self.owners))[:holders]:
                self._boxes[OwnerId(int(owner))].append(box)

    @property
    def scaled(self) -> tuple[TensorMeta, ...]:
        """The residual tensors."""
        return tuple(self._scaled.values())

    def projection(self, tensor: TensorMeta) -> Projection:
        """What an affine tensor's tasks do to a source word."""
        return self._projections[tensor.name]

    def draw(self, candidate: CandidateId, base: CandidateId, rate: float) -> None:
        """Make up the weights of `candidate`: about `rate` of the elements of `base` change."""
        old, new = self.weights[base], {}
        for name, words in sorted(old.items()):
            new[name] = changed_words(self.rng, self._inputs[name][0], words, rate)
        if self._scaled:
            moved = self.rng.random() < 0.5
            new[SCALE] = old[SCALE] + old[SCALE].dtype.type(int(self.rng.integers(1, 1 << 14)) if moved else 0)
        self.weights[candidate] = new

    def canonical(self, candidate: CandidateId) -> dict[str, Words]:
        """Full canonical words of every tensor."""
        weights = self.weights[candidate]
        words = {}
        for tensor in self.tensors:
            if tensor.name in self._scaled:
                words[tensor.name] = scaled_words(tensor, weights[tensor.name], weights[SCALE])
            else:
                words[tensor.name] = self._projections[tensor.name].apply(weights[tensor.name])
        return words


def scaled_words(tensor: TensorMeta, words: Words, scale: Words) -> Words:
    """The residual conversion: FP32 words times the scale, cast to the tensor's dtype."""
    return ScaledCast(MASTER, tensor.dtype, float(scale.view("<f4")[0])).apply(words)


class LocalRank:
    """One trainer rank: its live shards, and the trainer as its owner node sees it."""

    def __init__(self, source: LocalSource, owner: OwnerId, boxes: Sequence[BoxMap]) -> None:
        self.owner = owner
        self.frozen = NO_CANDIDATE
        """The candidate that the live weights are; survives a restart, as weights that come back from a replica do."""
        self.committed = NO_CANDIDATE
        """The last candidate whose transition ended."""
        self._source = source
        self._boxes = {box.label: box for box in boxes}
        self._live: dict[str, Words] = {}
        self._full: dict[str, Words] = {}
        self.load(NO_CANDIDATE)
        self._tasks = [
            AffineTask(map=box, projection=source.projection(box.tensor), read=self._reader(box.label)) for box in boxes
        ]
        self._inputs = [
            ResidualInput(name=name, shard="0", dtype=MASTER, count=len(words), read=self._reader(name))
            for name, words in sorted(self._full.items())
        ]
        self._residual = [
            ResidualTask(
                name=f"convert {tensor.name}",
                shard="0",
                outputs=(tensor,),
                depends=(tensor.name, SCALE),
                nbytes=tensor.nbytes,
                convert=self._convert,
            )
            for tensor in source.scaled
        ]

    def load(self, candidate: CandidateId) -> None:
        """Take this rank's shards of a candidate's weights."""
        weights = self._source.weights[candidate]
        self._live = {label: box.take(weights[box.tensor.name]) for label, box in self._boxes.items()}
        names = [tensor.name for tensor in self._source.scaled]
        self._full = {name: weights[name].copy() for name in (*names, SCALE) if names}

    def _reader(self, key: str) -> Callable[[], Words]:
        return lambda: self._live[key] if key in self._live else self._full[key]

    def _convert(self, tensor: TensorMeta) -> list[Part]:
        words = scaled_words(tensor, self._full[tensor.name], self._full[SCALE])
        return [Part(BoxMap.whole(tensor), words)]

    def rows(self) -> list[ShardRow]:
        """What this rank declares of its shards."""
        affine = [affine_row(self.owner, task) for task in self._tasks]
        inputs = [input_row(self.owner, watched) for watched in self._inputs]
        return [*affine, *inputs, *(residual_row(self.owner, task) for task in self._residual)]

    def new_delta(self, files: BaselineFiles | None = None) -> DeltaOwner:
        """The rank's owned tasks with a lost baseline, as after a start of the process; `files`: where it will lie."""
        plan, residual = self._source.plan, None
        if self._residual:
            residual = ResidualConverter(
                plan,
                LoneExchange(),
                self._inputs,
                self._residual,
                chunk_target_bytes=self._source.codec.chunk_target_bytes,
            )
        owned = plan.owned_affine(self.owner, self._tasks)
        return DeltaOwner(self.owner, owned, residual=residual, config=self._source.codec, files=files)

    # As a FrozenTrainer.

    def end_transition(self, candidate: CandidateId) -> None:
        """The candidate is committed; steps are allowed again."""
        self.committed, self.frozen = candidate, NO_CANDIDATE

    def reload(self, delta: DeltaOwner) -> CandidateId:
        """Back to the committed version: shards from the baseline where it holds them, the rest from a checkpoint."""
        self.load(self.committed)
        self.frozen = NO_CANDIDATE
        try:
            for _, box, words in delta.tracker_words():
                if box.label in self._live and box.tensor not in self._source.scaled:
                    self._live[box.label] = words.copy()
        except ConditionViolated:
            pass  # a lost baseline: the checkpoint's words stay
        return self.committed
