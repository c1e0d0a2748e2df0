"""Exact byte sets of strided views, against a brute-force oracle."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.receiver.views import CANONICAL, View, byte_runs, covered_bytes, overlapping, view_of


def bytes_of(view: View) -> list[int]:
    """Every byte of every element, repeated bytes repeated."""
    offsets = [view.offset]
    for size, stride in view.dims:
        offsets = [offset + step * stride for offset in offsets for step in range(size)]
    return [offset * view.width + byte for offset in offsets for byte in range(view.width)]


@st.composite
def views(draw: st.DrawFn) -> View:
    """Views of a small buffer by slicing, transposing, expanding and reinterpreting."""
    base = torch.zeros(6, 8, dtype=torch.bfloat16)
    rows = draw(st.integers(0, 5)), draw(st.integers(0, 6)), draw(st.integers(1, 3))
    columns = draw(st.integers(0, 7)), draw(st.integers(0, 8)), draw(st.integers(1, 3))
    view = base[rows[0] : max(rows[0], rows[1]) : rows[2], columns[0] : max(columns[0], columns[1]) : columns[2]]
    if draw(st.booleans()):
        view = view.t()
    if draw(st.booleans()) and view.numel() > 0:
        view = view[:1].expand(draw(st.integers(1, 3)), *view.shape[1:])
    return view_of(view, 0)


@given(st.lists(views(), max_size=5))
def test_overlap_is_decided_on_bytes_and_not_on_spans(drawn: list[View]) -> None:
    sets = [bytes_of(view) for view in drawn]
    expected = {
        number
        for number, mine in enumerate(sets)
        if len(set(mine)) < len(mine) or any(set(mine) & set(other) for k, other in enumerate(sets) if k != number)
    }
    found = overlapping(drawn)
    assert set(found) == expected
    for number, partner in found.items():
        assert set(sets[number]) & set(sets[partner])


@given(st.lists(views(), max_size=4))
def test_covered_bytes_counts_each_byte_once(drawn: list[View]) -> None:
    assert covered_bytes(drawn) == len({byte for view in drawn for byte in bytes_of(view)})


@given(views())
def test_runs_and_span_cover_exactly_the_bytes_of_the_view(view: View) -> None:
    starts, length = byte_runs(view)
    assert sorted(byte for start in starts.tolist() for byte in range(start, start + length)) == sorted(bytes_of(view))
    inside = bytes_of(view)
    assert view.span == ((min(inside), max(inside) + 1) if inside else (view.offset * 2, view.offset * 2))


def test_views_are_equal_iff_they_name_the_same_elements_in_the_same_order() -> None:
    base = torch.zeros(4, 6)
    assert view_of(base, 0) == view_of(base.view(24), 0) == view_of(base[None, :, :, None], 0)
    assert view_of(base, 0) != view_of(base.t(), 0)
    assert view_of(base, 0) != view_of(base, 1)
    assert view_of(base, 0) != view_of(base.view(torch.int32), 0)
    assert view_of(base[:, :3], CANONICAL).dims == ((4, 6), (3, 1))
    assert view_of(torch.zeros(()), 0).dims == ()
    assert view_of(torch.zeros(0, 4), 0).numel == 0


def test_many_disjoint_views_of_one_storage_are_not_expanded() -> None:
    stack = torch.zeros(128, 64, 64)
    assert overlapping([view_of(part, 0) for part in stack]) == {}
    assert overlapping([view_of(stack[..., ::2], 0), view_of(stack[..., 1::2], 0)]) == {}
