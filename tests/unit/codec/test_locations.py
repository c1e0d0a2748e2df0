"""codec.locations: the rule by the item's own span, and codings that keep 64-bit indices exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.locations import LocationType, choose_location, decode_locations, encode_locations, units_bound
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.kernels import plain

L = LocationType


def item_at(indices: list[int], numel: int = 1 << 40) -> Item:
    values = np.zeros(len(indices), "<u1")
    return Item.of(TensorMeta("w", (numel,), "U8"), Encoding.XOR, np.array(indices, dtype=np.int64), values)


def planes_of(units: bits.Words, kind: LocationType) -> list[np.ndarray]:
    planes = [np.zeros(len(units), np.uint8) for _ in range(kind.planes)]
    plain.split_planes(units, planes)
    return planes


def round_trip(item: Item, kind: LocationType) -> list[int]:
    units = encode_locations(item, kind)
    fewest, most = units_bound(kind, item.count, item.tensor.numel)
    assert fewest <= len(units) <= most
    indices = decode_locations(kind, item.start, item.count, item.tensor.numel, planes_of(units, kind))
    if indices is None:
        return list(range(item.start, item.start + item.count))
    assert indices.dtype == np.int64
    return indices.tolist()


@pytest.mark.parametrize(
    ("indices", "kind"),
    [
        ([9], L.RUN),
        ([9, 10, 11], L.RUN),
        ([0, 2], L.BITMAP),
        ([0, 8], L.BITMAP),
        ([0, 9], L.CHAIN_U8),
        ([0, 799], L.CHAIN_U8),
        ([0, 800], L.GAPS_U16),
        ([0, 65535], L.GAPS_U16),
        ([0, 65536], L.GAPS_U32),
        ([0, (1 << 32) - 1], L.GAPS_U32),
        ([0, 1 << 32], L.GAPS_U64),
    ],
    ids=str,
)
def test_the_location_type_follows_count_and_span(indices: list[int], kind: LocationType) -> None:
    for offset in (0, 1 << 35):
        item = item_at([index + offset for index in indices])
        assert choose_location(item) is kind
        assert round_trip(item, kind) == item.flat_indices().tolist()


def test_the_span_decides_and_not_the_tensor() -> None:
    dense_shard = [(1 << 38) + 3 * k for k in range(1000)]
    assert choose_location(item_at(dense_shard)) is L.BITMAP
    assert choose_location(item_at([(1 << 38) + 50 * k for k in range(1000)])) is L.CHAIN_U8


@pytest.mark.parametrize("shape", [((1 << 31) + 10,), (1 << 16, (1 << 16) + 1), (3, (1 << 33) // 3 + 7), (1 << 46, 4)])
def test_indices_beyond_32_bits_are_exact_in_every_type_that_holds_them(shape: tuple[int, ...]) -> None:
    meta = TensorMeta("w", shape, "BF16")
    indices = [0, (1 << 31) - 1, 1 << 31, meta.numel - 1]
    item = Item.of(meta, Encoding.XOR, np.array(indices), np.zeros(4, "<u2"))
    kind = choose_location(item)
    assert kind is (L.GAPS_U32 if max(np.diff(indices)) < 1 << 32 else L.GAPS_U64)
    assert round_trip(item, kind) == indices
    assert round_trip(item, L.GAPS_U64) == indices


BORDER_GAPS = [1, 254, 255, 256, 509, 510, 65534, 65535, 65536, (1 << 32) - 1, 1 << 32, (1 << 32) + 1]


@pytest.mark.parametrize(
    ("kind", "gap"),
    [(L.CHAIN_U8, gap) for gap in BORDER_GAPS if gap <= 65536]
    + [(kind, gap) for kind in (L.GAPS_U16, L.GAPS_U32, L.GAPS_U64) for gap in BORDER_GAPS],
)
def test_gaps_at_the_borders_of_a_type_are_exact_or_refused(kind: LocationType, gap: int) -> None:
    indices = [5, 5 + gap, 7 + gap]
    item = item_at(indices)
    if kind is not L.CHAIN_U8 and gap >= 1 << (8 * kind.planes):
        with pytest.raises(ValueError, match="does not fit"):
            encode_locations(item, kind)
    else:
        assert round_trip(item, kind) == indices


@given(st.lists(st.integers(0, 5000), unique=True, min_size=2, max_size=80), st.sampled_from(list(L)), st.data())
def test_every_type_codes_every_set_of_locations(positions: list[int], kind: LocationType, data: st.DataObject) -> None:
    offset = data.draw(st.sampled_from([0, 1, (1 << 31) - 100, 1 << 33]))
    numel = offset + max(positions) + 1 + data.draw(st.integers(0, 3))
    indices = sorted(position + offset for position in positions)
    item = item_at(indices, numel)
    if (kind is L.RUN) == (item.indices is None):
        assert round_trip(item, kind) == indices
    elif kind is L.RUN:
        with pytest.raises(ValueError, match="not a run"):
            encode_locations(item, kind)


def item_with(start: int, indices: list[int] | None, count: int, numel: int = 100) -> Item:
    at = None if indices is None else np.array(indices, dtype=np.int64)
    return Item(TensorMeta("w", (numel,), "U8"), Encoding.XOR, start, at, np.zeros(count, "<u1"))


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (item_with(0, None, 0), "entries 0"),
        (item_with(-1, None, 2), "entries -1"),
        (item_with(98, None, 3), "entries 98 to 100"),
        (item_with(1, [1, 5, 5], 3), "strictly increasing"),
        (item_with(1, [1, 9, 5], 3), "strictly increasing"),
        (item_with(1, [1, 100], 2), "entries 1 to 100"),
        (item_with(2, [1, 5], 2), "do not match"),
        (item_with(1, [1, 5], 3), "do not match"),
    ],
)
def test_an_encoder_refuses_entries_out_of_order_or_bounds(item: Item, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encode_locations(item, LocationType.RUN if item.indices is None else LocationType.CHAIN_U8)


def units(kind: LocationType, *values: int) -> list[np.ndarray]:
    return planes_of(np.array(values, bits.unsigned_of_width(max(1, kind.planes))), kind)


@pytest.mark.parametrize(
    ("kind", "start", "count", "numel", "planes", "message"),
    [
        (L.RUN, 8, 3, 10, [], "3 entries from 8"),
        (L.RUN, 0, 0, 10, [], "0 entries"),
        (L.RUN, 11, 1, 10, [], "1 entries from 11"),
        (L.CHAIN_U8, 0, 2, 10, units(L.CHAIN_U8, 10), "outside"),
        (L.CHAIN_U8, 7, 2, 10, units(L.CHAIN_U8, 3), "outside"),
        (L.GAPS_U16, 0, 2, 10, units(L.GAPS_U16, 0), "zero"),
        (L.GAPS_U16, 0, 2, 10, units(L.GAPS_U16, 10), "larger than the tensor"),
        (L.GAPS_U16, 0, 3, 10, units(L.GAPS_U16, 6, 6), "outside"),
        (L.GAPS_U64, 0, 2, 10, units(L.GAPS_U64, (1 << 64) - 1), "larger than the tensor"),
        (L.GAPS_U64, 4, 5, (1 << 63) - 1, units(L.GAPS_U64, *[(1 << 62) + 1] * 4), "outside"),
        (L.GAPS_U64, 4, 6, (1 << 63) - 1, units(L.GAPS_U64, *[(1 << 62)] * 4, 5), "outside"),
        (L.BITMAP, 0, 2, 10, units(L.BITMAP, 0b110), "start index"),
        (L.BITMAP, 0, 2, 10, units(L.BITMAP, 0b11, 0), "left over"),
        (L.BITMAP, 0, 2, 10, units(L.BITMAP), "start index"),
        (L.BITMAP, 0, 3, 10, units(L.BITMAP, 0b11), "2 locations, not 3"),
        (L.BITMAP, 0, 1, 10, units(L.BITMAP, 0b11), "more than 1"),
        (L.BITMAP, 8, 2, 10, units(L.BITMAP, 0b101), "outside"),
    ],
)
def test_a_decoder_refuses_locations_out_of_order_or_bounds(
    kind: LocationType, start: int, count: int, numel: int, planes: list[np.ndarray], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode_locations(kind, start, count, numel, planes)
