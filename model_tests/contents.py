"""What an item of the specification is in real tensors: an owner's part of one canonical tensor, as bits.

An *item* has two faces. At its owner it is the source words of the boxes that the owner holds, or the canonical words
of a residual tensor: what the baseline keeps and what is compared. At a rank it is the stored bits that depend on it,
found by loading the tensor twice with other words in this part. A candidate gives each item a `Content`. What a place
really holds, a baseline or a rank, is a `Held`: equal to a content when it is that content's face there, bit for bit.
Not handled: stored bits that no item reaches (padding); they are compared with everything else after a commit.

Paper: Section 5 (tasks, residual baseline)   Spec: Items, OwnerOf, content
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model_tests.engines import Table
from nemo_dcr.bits import Words, unsigned, width
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.ids import CandidateId, OwnerId
from nemo_dcr.testing.local_oracle import DenseOracle, StoredBits, stored_bits
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import ToyModel

ItemName = str
"""`o0 t1.w`: the part of tensor t1.w that owner 0 tracks."""
ONE_AND_TWO = {
    "BF16": (0x3F80, 0x4000),
    "F16": (0x3C00, 0x4000),
    "F32": (0x3F800000, 0x40000000),
    "F64": (0x3FF0000000000000, 0x4000000000000000),
    "BOOL": (0, 1),
}
"""Two words that stay apart through every cast and transform of the toy loaders; 1 and 2 do for other dtypes."""


def item_name(owner: OwnerId, tensor: str) -> ItemName:
    """The item that is an owner's part of a tensor."""
    return f"o{owner} {tensor}"


@dataclass(frozen=True)
class Content:
    """The words of one item of one candidate."""

    item: ItemName
    source: bytes = field(repr=False)
    stored: tuple[bytes, ...] = field(repr=False, compare=False)
    """By rank."""


@dataclass(frozen=True, eq=False)
class Held:
    """What a place holds for one item: a baseline, or a rank."""

    data: bytes = field(repr=False)
    rank: int | None = None
    """None in a baseline."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Content):
            return self.data == (other.source if self.rank is None else other.stored[self.rank])
        return isinstance(other, Held) and (self.rank, self.data) == (other.rank, other.data)

    __hash__ = None  # type: ignore[assignment]


Contents = dict[ItemName, Content]


class Faces:
    """Where the items of a source lie, at owners and at ranks."""

    def __init__(self, source: LocalSource, table: Table, ranks: int) -> None:
        self.source = source
        self.ranks = ranks
        self.oracle = DenseOracle(source, table.rules)
        self._table = table
        self._residual = {tensor.name for tensor in source.scaled}
        self.owned: dict[ItemName, tuple[OwnerId, TensorMeta, NDArray[np.int64]]] = {}
        """Owner, tensor and flat elements of each item, in the order of the owner's boxes."""
        for owner, rank in source.ranks.items():
            delta = rank.new_delta()
            for tensor in delta.tensor_table():
                boxes = [task.map for task in delta._tasks if task.tensor == tensor]
                parts = [box.destinations(np.arange(box.domain, dtype=np.int64)) for box in boxes]
                if tensor.name in self._residual:
                    parts = [np.arange(tensor.numel, dtype=np.int64)]
                elements = np.concatenate(parts)
                if len(elements):
                    self.owned[item_name(owner, tensor.name)] = owner, tensor, elements
        self._at = [self._places(rank) for rank in range(ranks)]

    def contents(self, candidate: CandidateId) -> Contents:
        """Every item of a candidate."""
        weights, canonical = self.source.weights[candidate], self.oracle.canonical(candidate)
        ranks = [self.held(rank, self.oracle.expected(rank, self.ranks, candidate)) for rank in range(self.ranks)]
        made = {}
        for item, (_, tensor, elements) in self.owned.items():
            words = canonical[tensor.name] if tensor.name in self._residual else weights[tensor.name]
            made[item] = Content(item, words[elements].tobytes(), tuple(held[item].data for held in ranks))
        return made

    def held(self, rank: int, bits: StoredBits) -> dict[ItemName, Held]:
        """What a rank with these stored bits holds for each item."""
        flat = b"".join(data for _, (_, _, data) in sorted(bits.items()))
        every = np.frombuffer(flat, dtype=np.uint8)
        return {item: Held(every[places].tobytes(), rank) for item, places in self._at[rank].items()}

    def _places(self, rank: int) -> dict[ItemName, NDArray[np.int64]]:
        """Byte offsets, in all stored bits of a rank by name, of what depends on each item."""
        plain = {
            meta.name: np.full(meta.numel, _pair(meta)[0], dtype=unsigned(meta.dtype)) for meta in self._table.tensors
        }
        model = ToyModel(self._table.tensors, self._table.rules, rank, self.ranks)
        before, widths = self._load(model, plain)
        places = {}
        for item, (_, tensor, elements) in self.owned.items():
            words = plain[tensor.name].copy()
            words[elements] = _pair(tensor)[1]
            after, _ = self._load(model, {**plain, tensor.name: words})
            found, start = [], 0
            for one, two, size in zip(before, after, widths, strict=True):
                moved = (
                    np.flatnonzero((one != two).reshape(-1, size).any(axis=1)) if len(one) else np.array([], np.int64)
                )
                found.append((start + moved[:, None] * size + np.arange(size)).ravel())
                start += len(one)
            places[item] = np.concatenate(found).astype(np.int64)
        return places

    def _load(self, model: ToyModel, words: dict[str, Words]) -> tuple[list[NDArray[np.uint8]], list[int]]:
        model.load_weights(
            (meta.name, tensor_from_words(words[meta.name].copy(), meta.dtype, meta.shape))
            for meta in self._table.tensors
        )
        bits = sorted(stored_bits(model).items())
        return [np.frombuffer(data, dtype=np.uint8) for _, (_, _, data) in bits], [width(d) for _, (d, _, _) in bits]


def _pair(meta: TensorMeta) -> tuple[int, int]:
    return ONE_AND_TWO.get(meta.dtype, (1, 2))
