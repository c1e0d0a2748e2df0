"""What Megatron ranks agree on before tasks are made: places, groups of residual places, and labels of elements."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_dcr.adapters.megatron.agreement import Place, Row, agree, by_tensor, residual_groups
from nemo_dcr.adapters.megatron.verification import PADDING, destination_labels, map_labels
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.classes import Degree, MappingClass
from nemo_dcr.source.classes import Mapping as Use
from nemo_dcr.source.fused import concatenated, padded_rows
from nemo_dcr.testing.ranks import ThreadExchange, run_in_threads


def row(place: int, mapping: MappingClass, *outputs: str, name: str = "", shape: tuple[int, ...] = (4,)) -> Row:
    return Row(place, name or f"p{place}", mapping, Degree.TENSOR, outputs, shape, "")


def place(number: int, mapping: MappingClass, *outputs: str) -> Place:
    return Place(number, mapping, Degree.TENSOR, (f"p{number}",), outputs, ((4,),), "")


def test_every_rank_learns_what_the_others_hold() -> None:
    """Two pipeline stages, and experts 1 and 3 at one place of two expert-parallel ranks."""
    held = [
        [row(0, MappingClass.REPLICATED, "norm"), row(1, MappingClass.ROW, "experts.1", name="e1")],
        [row(1, MappingClass.ROW, "experts.3", name="e3"), row(2, MappingClass.QKV, "q", "k", "v")],
    ]

    def rank(exchange: ThreadExchange) -> tuple[Place, ...]:
        return agree(exchange, 3, held[exchange.rank])

    first, second = run_in_threads(2, rank)
    assert first == second
    assert [each.place for each in first] == [0, 1, 2]
    assert (first[1].inputs, first[1].outputs) == (("e1", "e3"), ("experts.1", "experts.3"))


def test_place_that_ranks_describe_differently_is_unknown() -> None:
    kinds = [MappingClass.COLUMN, MappingClass.UNKNOWN]

    def rank(exchange: ThreadExchange) -> tuple[Place, ...]:
        return agree(exchange, 1, [row(0, kinds[exchange.rank], "a")])

    for found in run_in_threads(2, rank):
        assert found[0].mapping is MappingClass.UNKNOWN
        assert found[0].reason == "ranks describe it as column, unknown"


def test_lists_of_different_lengths_are_refused() -> None:
    def rank(exchange: ThreadExchange) -> None:
        agree(exchange, 1 + exchange.rank, [])

    with pytest.raises(UnsupportedMapping, match=r"Bridge lists \[1, 2\] conversion tasks"):
        run_in_threads(2, rank)


def test_places_that_share_a_tensor_with_a_residual_one_are_converted_with_it() -> None:
    places = [
        place(0, MappingClass.COLUMN, "a"),
        place(1, MappingClass.UNKNOWN, "b", "c"),
        place(2, MappingClass.ROW, "c", "d"),
        place(3, MappingClass.ROW, "d"),
        place(4, MappingClass.QKV, "q"),
    ]
    assert [[each.place for each in group] for group in residual_groups(places, Use.EXTENDED)] == [[1, 2, 3]]
    assert [[each.place for each in group] for group in residual_groups(places, Use.PAPER)] == [[1, 2, 3], [4]]
    assert residual_groups(places, Use.EXTENDED, everything=True) == (tuple(places),)
    assert residual_groups([], Use.EXTENDED, everything=True) == ()
    assert sorted(by_tensor(places, {"c": 0, "q": 0})) == ["c", "q"]


def test_labels_name_tensor_and_index_and_leave_padding_out() -> None:
    gate, up = TensorMeta("gate", (4, 2), "BF16"), TensorMeta("up", (4, 2), "BF16")
    second = map_labels(concatenated([gate, up], rank=1, ranks=2))
    wanted = [destination_labels(tensor, np.arange(4, 8, dtype=np.int64)) for tensor in (gate, up)]
    assert second.tolist() == np.concatenate(wanted).tolist()
    assert len(set(second.tolist())) == 8
    assert map_labels(padded_rows(gate, 5))[-2:].tolist() == [PADDING, PADDING]
