"""Appendix D on the source side: affine tensors, items by class, and the destinations that are emitted."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.classes import Handling, Mapping, MappingClass, classify
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import LoneExchange
from nemo_dcr.source.geometry import ShardKind, ShardRow, make_plan
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.projection import Cast
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import AffineTask, Part, ResidualInput, ResidualTask
from nemo_dcr.testing import paper_models


def qwen3_30b_a3b() -> tuple[list[tuple[TensorMeta, int | None]], list[TensorMeta]]:
    """Affine tensors with the axis that a tensor-parallel degree splits (None: whole), and residual tensors."""
    axes = {MappingClass.SLICE: 0, MappingClass.COLUMN: 0, MappingClass.ROW: 1}
    found = classify(paper_models.qwen3_30b_a3b(), Mapping.PAPER)
    affine = [(row.tensor, axes.get(row.mapping)) for row in found.of(Handling.AFFINE)]
    return affine, [row.tensor for row in found.of(Handling.RESIDUAL)]


def rows_of(tensor: TensorMeta, axis: int | None, degree: int) -> list[ShardRow]:
    rows = []
    for rank in range(degree):
        start, extent = [0] * len(tensor.shape), list(tensor.shape)
        if axis is not None:
            extent[axis] //= degree
            start[axis] = rank * extent[axis]
        box = BoxMap.box(tensor, tuple(start), tuple(extent))
        rows.append(ShardRow(OwnerId(rank), ShardKind.AFFINE, box.label, tensor.name, 2 * box.domain, box))
    return rows


@pytest.mark.parametrize(("degree", "items", "xor_items"), [(1, 18867, 18721), (4, 74307, 74161)])
def test_xor_covers_the_affine_shards_of_table_d2(degree: int, items: int, xor_items: int) -> None:
    """Each affine shard gives one XOR item and each residual tensor one overwrite item when everything changes:
    18,480 t + 241 XOR items at degree t, and 96.3% of the weight bytes at every degree.
    """
    affine, residual = qwen3_30b_a3b()
    plan = make_plan(row for tensor, axis in affine for row in rows_of(tensor, axis, degree))
    assert len(plan.owners) == xor_items == 18480 * degree + 241
    assert len(plan.owners) + len(residual) == items
    affine_bytes = sum(tensor.nbytes for tensor, _ in affine)
    total = affine_bytes + sum(tensor.nbytes for tensor in residual)
    assert round(100 * affine_bytes / total, 1) == 96.3
    assert plan.tensors == tuple(sorted(tensor for tensor, _ in affine))


def test_baseline_is_one_copy_of_the_source_plus_the_residual_tensors() -> None:
    """Section 5: the residual tensors of this checkpoint are 3.69% of it, so the baseline is about 1.04 checkpoints."""
    affine, residual = qwen3_30b_a3b()
    kept = sum(tensor.nbytes for tensor in residual)
    total = kept + sum(tensor.nbytes for tensor, _ in affine)
    assert round(100 * kept / total, 2) == 3.69
    assert round((total + kept) / total, 2) == 1.04


class Owner:
    """One owner with a task of each class: identity, cast, and residual."""

    def __init__(self) -> None:
        self.plain, self.master = np.arange(6, dtype="<u2"), np.full(6, 0x3F800000, dtype="<u4")
        self.source = np.arange(6, dtype="<u2")
        names = ("cast", "plain", "residual")
        cast, plain, residual = (TensorMeta(name, (6,), "BF16") for name in names)
        tasks = [
            AffineTask.identity(BoxMap.whole(plain), lambda: self.plain),
            AffineTask(map=BoxMap.whole(cast), projection=Cast("F32", "BF16"), read=lambda: self.master),
        ]
        watched = ResidualInput(name="source", shard="0", dtype="BF16", count=6, read=lambda: self.source)
        convert = ResidualTask(
            name="halve",
            shard="0",
            outputs=(residual,),
            depends=("source",),
            nbytes=12,
            convert=lambda tensor: [Part(BoxMap.whole(tensor), self.source >> 1)],
        )
        exchange = LoneExchange()
        plan = agree_plan(exchange, tasks, [watched], [convert])
        converter = ResidualConverter(plan, exchange, [watched], [convert], chunk_target_bytes=100)
        self.owner = DeltaOwner(OwnerId(0), tasks, residual=converter)
        self.owner.capture(Version(0))

    def items(self) -> dict[str, Item]:
        classes = dict.fromkeys(("cast", "plain", "residual"), PathClass.XOR)
        buckets = self.owner.stream(AttemptMode.XOR, classes)
        return {item.tensor.name: item for bucket in buckets for item in bucket.items}


def test_figure_d1_affine_identity_is_xor_cast_and_residual_are_overwrites() -> None:
    """On representation-preserving paths an owned affine shard gives one XOR item; scaled, cast and converted values
    need overwrites, because a mask of source bits is not a mask of canonical bits.
    """
    owner = Owner()
    owner.plain[1], owner.master[1], owner.source[1] = 0x8001, 0x40000000, 0x8001
    items = owner.items()
    assert {name: item.encoding for name, item in items.items()} == {
        "plain": Encoding.XOR,
        "cast": Encoding.OVERWRITE,
        "residual": Encoding.OVERWRITE,
    }
    assert items["plain"].values.tolist() == [0x8001 ^ 1]
    assert items["cast"].values.tolist() == [0x4000]
    assert items["residual"].values.tolist() == [0x8001 >> 1]


def test_element_change_rate_and_canonical_density_are_counted_apart() -> None:
    """N_chg counts source elements, D the emitted destinations, D_chg those whose canonical bits changed."""
    owner = Owner()
    owner.plain[:2] ^= 1
    owner.master[:3] += 1
    owner.source[4:6] = [5, 4]
    items = owner.items()
    counts = owner.owner.counts
    assert counts.source_elements == 18
    assert counts.changed_elements == 2 + 3 + 2
    assert counts.emitted == 2 + 3 == sum(item.count for item in items.values())
    assert counts.emitted_changed == 2
    assert set(items) == {"plain", "cast"}
