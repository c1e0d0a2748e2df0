"""codec.buckets: greedy grouping of whole tensors, in declared order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.buckets import Bucket, Chunk, group_chunks, pack_buckets
from nemo_dcr.codec.records import Encoding, Item


def item(name: str) -> Item:
    return Item.run(TensorMeta(name, (4,), "BF16"), Encoding.XOR, 0, np.ones(1, "<u2"))


def chunk(name: str, nbytes: int, *, emits: bool = True) -> Chunk:
    return Chunk((item(name),) if emits else (), nbytes)


def names(buckets: list[Bucket]) -> list[tuple[str, int]]:
    return [("".join(record.tensor.name for record in bucket.items), bucket.input_bytes) for bucket in buckets]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([30], [("a", 30)]),
        ([4, 4, 4], [("abc", 12)]),
        ([5, 5, 5], [("ab", 10), ("c", 5)]),
        ([30, 30, 1], [("a", 30), ("b", 30), ("c", 1)]),
        ([9, 30, 10], [("ab", 39), ("c", 10)]),
        ([0, 0], [("ab", 0)]),
        ([10, 0], [("a", 10), ("b", 0)]),
    ],
    ids=["nothing", "oversized", "below", "exact fit", "oversized twice", "last member over", "empty", "empty at end"],
)
def test_a_chunk_closes_once_it_reaches_the_target(sizes: list[int], expected: list[tuple[str, int]]) -> None:
    groups = group_chunks(zip("abc", sizes, strict=False), 10)
    assert [("".join(members), size) for members, size in groups] == expected


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 50))
def test_every_tensor_is_whole_in_one_chunk_in_declared_order(sizes: list[int], target: int) -> None:
    groups = list(group_chunks(enumerate(sizes), target))
    assert [member for members, _ in groups for member in members] == list(range(len(sizes)))
    for members, size in groups:
        assert size == sum(sizes[member] for member in members)
        assert members
        assert size - sizes[members[-1]] < target
    assert all(size >= target for _, size in groups[:-1])


def test_a_bucket_counts_the_full_input_of_chunks_that_emit_and_nothing_of_others() -> None:
    chunks = [chunk("a", 4), chunk("b", 100, emits=False), chunk("c", 5), chunk("d", 1), chunk("e", 3)]
    assert names(list(pack_buckets(chunks, 10))) == [("acd", 10), ("e", 3)]


def test_an_oversized_chunk_is_one_bucket_of_its_own_size() -> None:
    assert names(list(pack_buckets([chunk("a", 30), chunk("b", 30), chunk("c", 2)], 10))) == [
        ("a", 30),
        ("b", 30),
        ("c", 2),
    ]


def test_no_bucket_is_empty() -> None:
    assert list(pack_buckets([], 10)) == []
    assert list(pack_buckets([chunk("a", 50, emits=False)], 10)) == []
    assert names(list(pack_buckets([chunk("a", 10), chunk("b", 50, emits=False)], 10))) == [("a", 10)]


def test_a_full_bucket_is_yielded_before_the_next_chunk_is_read() -> None:
    read = []

    def chunks():  # type: ignore[no-untyped-def]
        for name in "abc":
            read.append(name)
            yield chunk(name, 10)

    packed = pack_buckets(chunks(), 10)
    next(packed)
    assert read == ["a"]
