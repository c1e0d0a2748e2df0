"""Index maps are bijections onto boxes, at any size."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.maps import BoxMap


@st.composite
def boxes(draw: st.DrawFn) -> BoxMap:
    view = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    start = tuple(draw(st.integers(0, size)) for size in view)
    extent = tuple(draw(st.integers(0, size - first)) for first, size in zip(start, view, strict=True))
    axes = tuple(draw(st.permutations(range(len(view)))))
    shape = draw(st.sampled_from([view, (int(np.prod(view)),)]))
    return BoxMap.box(TensorMeta("t", shape, "BF16"), start, extent, view=view, axes=axes)


@given(boxes())
def test_destinations_are_the_elements_of_the_box_in_source_order(box: BoxMap) -> None:
    numbered = np.arange(box.tensor.numel, dtype=np.int64)
    corner = tuple(slice(s, s + n) for s, n in zip(box.start, box.extent, strict=True))
    expected = numbered.reshape(box.view)[corner].transpose(box.axes).reshape(-1)
    destinations = box.all_destinations()
    assert destinations.dtype == np.int64
    assert destinations.tolist() == expected.tolist()
    assert len(set(destinations.tolist())) == box.domain
    assert box.take(numbered).tolist() == expected.tolist()


@given(boxes(), st.data())
def test_inverse_undoes_destinations_and_refuses_the_outside(box: BoxMap, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, box.domain - 1), unique=True)) if box.domain else []
    indices = np.array(sorted(chosen), dtype=np.int64)
    assert box.inverse(box.destinations(indices)).tolist() == indices.tolist()
    outside = sorted(set(range(box.tensor.numel)) - set(box.all_destinations().tolist()))
    if outside:
        with pytest.raises(ValueError, match=r"outside the box|no destination"):
            box.inverse(np.array([data.draw(st.sampled_from(outside))], dtype=np.int64))


@given(boxes())
def test_monotone_and_contiguous_say_what_the_destinations_do(box: BoxMap) -> None:
    steps = np.diff(box.all_destinations())
    if box.monotone:
        assert (steps > 0).all()
    if box.contiguous:
        assert (steps == 1).all()
    if box.domain > 1:
        assert box.monotone == bool((steps > 0).all())
        assert box.contiguous == bool((steps == 1).all())


@given(boxes())
def test_runs_list_the_box_in_canonical_order(box: BoxMap) -> None:
    heads, length = box.runs()
    listed = [int(head) + step for head in heads for step in range(length)]
    assert listed == sorted(box.all_destinations().tolist())


def test_row_shard_formula_of_the_paper() -> None:
    tensor = TensorMeta("w", (10, 7), "BF16")
    shard = BoxMap.box(tensor, (4, 0), (3, 7))
    row, column = 2, 5
    assert shard.destinations(np.array([row * 7 + column])).tolist() == [(4 + row) * 7 + column]
    assert shard.contiguous


def test_a_single_column_steps_over_the_others() -> None:
    column = BoxMap.box(TensorMeta("w", (5, 4), "BF16"), (0, 1), (5, 1))
    assert column.all_destinations().tolist() == [1, 5, 9, 13, 17]
    assert (column.monotone, column.contiguous) == (True, False)


def test_scalars_and_empty_tensors_have_maps() -> None:
    scalar = BoxMap.whole(TensorMeta("s", (), "F32"))
    assert (scalar.domain, scalar.all_destinations().tolist(), scalar.contiguous) == (1, [0], True)
    empty = BoxMap.whole(TensorMeta("e", (0, 4), "F32"))
    assert (empty.domain, empty.all_destinations().tolist()) == (0, [])
    assert scalar.cut(np.array([7])).shape == ()


@pytest.mark.parametrize("rows", [2**31, 2**32, 2**33 + 3])
def test_shapes_beyond_32_bits_keep_exact_indices(rows: int) -> None:
    tensor = TensorMeta("big", (rows, 3), "BF16")
    column = BoxMap.box(tensor, (0, 1), (rows, 2))
    last = column.domain - 1
    indices = np.array([0, 1, 2**31, last], dtype=np.int64)
    expected = [(i // 2) * 3 + 1 + i % 2 for i in indices.tolist()]
    assert column.destinations(indices).tolist() == expected
    assert column.inverse(np.array(expected)).tolist() == indices.tolist()
    transposed = BoxMap.box(tensor, (0, 0), (rows, 3), axes=(1, 0))
    assert transposed.destinations(np.array([rows + 1])).tolist() == [3 + 1]
    assert not transposed.monotone


@pytest.mark.parametrize(
    ("start", "extent", "view", "axes"),
    [
        ((0, 0), (3, 5), None, None),
        ((-1, 0), (1, 1), None, None),
        ((0,), (3,), None, None),
        ((0, 0), (3, 4), (4, 4), None),
        ((0, 0), (3, 4), None, (0, 0)),
        ((2, 0), (2, 1), None, None),
    ],
)
def test_what_is_not_a_box_of_the_tensor_is_refused(start, extent, view, axes) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UnsupportedMapping, match="SC5"):
        BoxMap.box(TensorMeta("t", (3, 4), "BF16"), start, extent, view=view, axes=axes)


def test_labels_tell_boxes_apart_and_maps_travel_as_messagepack() -> None:
    tensor = TensorMeta("t", (4, 6), "BF16")
    maps = [
        BoxMap.whole(tensor),
        BoxMap.box(tensor, (0, 0), (2, 6)),
        BoxMap.box(tensor, (2, 0), (2, 6)),
        BoxMap.box(tensor, (0, 0), (4, 6), axes=(1, 0)),
        BoxMap.box(tensor, (0,), (12,), view=(24,)),
    ]
    assert len({box.label for box in maps}) == len(maps)
    for box in maps:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(box), type=BoxMap) == box
