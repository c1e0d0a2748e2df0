"""The geometry table gives each element one owner, or is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.ids import OwnerId
from nemo_dcr.source.geometry import ShardKind, ShardRow, check_cover, make_plan
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import AffineTask, ResidualInput, ResidualTask
from nemo_dcr.testing.ranks import run_in_threads

TENSOR = TensorMeta("w", (6, 4), "BF16")
LEFT, RIGHT = BoxMap.box(TENSOR, (0, 0), (6, 2)), BoxMap.box(TENSOR, (0, 2), (6, 2))


def row(rank: int, box: BoxMap) -> ShardRow:
    return ShardRow(OwnerId(rank), ShardKind.AFFINE, box.label, box.tensor.name, 2 * box.domain, box)


def residual(rank: int, name: str, *, outputs: tuple[TensorMeta, ...] = (), depends: tuple[str, ...] = ()) -> ShardRow:
    key = f"{name}#{rank}"
    return ShardRow(OwnerId(rank), ShardKind.RESIDUAL, key, name, 8, outputs=outputs, depends=depends)


def watched(rank: int, name: str) -> ShardRow:
    return ShardRow(OwnerId(rank), ShardKind.INPUT, f"{name}#{rank}", name, 8)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[TensorMeta, list[BoxMap]]:
    """A random partition of a tensor by repeated cuts; some boxes are empty."""
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    tensor = TensorMeta("w", shape, "BF16")
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        start, extent = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        size = draw(st.integers(0, extent[axis]))
        low = tuple(size if a == axis else n for a, n in enumerate(extent))
        high = tuple(n - size if a == axis else n for a, n in enumerate(extent))
        boxes += [(start, low), (tuple(s + size if a == axis else s for a, s in enumerate(start)), high)]
    return tensor, [BoxMap.box(tensor, start, extent) for start, extent in boxes]


@given(cuts(), st.booleans(), st.data())
def test_a_partition_is_accepted_and_any_other_set_of_boxes_is_refused(cut, flat, data) -> None:  # type: ignore[no-untyped-def]
    tensor, boxes = cut
    if flat and boxes[0].contiguous and boxes[0].domain:
        # The same run, seen through a flat view: coverage is then checked run by run.
        boxes[0] = BoxMap.box(tensor, (boxes[0].first,), (boxes[0].domain,), view=(tensor.numel,))
    check_cover(tensor, boxes)
    filled = [box for box in boxes if box.domain]
    if filled:
        dropped = data.draw(st.sampled_from(filled))
        with pytest.raises(UnsupportedMapping, match="SC1"):
            check_cover(tensor, [box for box in boxes if box is not dropped])
        with pytest.raises(UnsupportedMapping, match="SC1"):
            check_cover(tensor, [*boxes, data.draw(st.sampled_from(filled))])


@pytest.mark.parametrize("view", [None, (24,)])
def test_an_overlap_of_the_right_total_size_is_refused(view: tuple[int, ...] | None) -> None:
    second = BoxMap.box(TENSOR, (2, 0), (3, 4)) if view is None else BoxMap.box(TENSOR, (8,), (12,), view=view)
    with pytest.raises(UnsupportedMapping, match="overlap"):
        check_cover(TENSOR, [BoxMap.box(TENSOR, (0, 0), (3, 4)), second])


def test_replicas_share_one_owner_and_ranks_keep_only_what_they_own() -> None:
    plan = make_plan([row(rank, box) for rank, box in enumerate((LEFT, RIGHT, LEFT, RIGHT))])
    assert plan.tensors == (TENSOR,)
    assert plan.holders == {LEFT.label: (0, 2), RIGHT.label: (1, 3)}
    tasks = {box: AffineTask.identity(box, lambda: np.zeros(12, dtype="<u2")) for box in (LEFT, RIGHT)}
    owned = [plan.owned_affine(OwnerId(rank), [tasks[(LEFT, RIGHT)[rank % 2]]]) for rank in range(4)]
    assert sorted(len(mine) for mine in owned) == [0, 0, 1, 1]


def test_a_table_that_contradicts_itself_is_refused() -> None:
    other = TensorMeta("w", (6, 4), "F32")
    cases = {
        "one rank describes it": [row(0, LEFT), row(1, BoxMap.box(other, (0, 2), (6, 2)))],
        "SC1": [row(0, LEFT)],
        "affine and residual": [row(0, LEFT), row(1, RIGHT), residual(0, "t", outputs=(TENSOR,))],
        "no rank declares": [residual(0, "t", outputs=(TENSOR,), depends=("scale",))],
        "declares this shard twice": [row(0, LEFT), row(0, LEFT), row(1, RIGHT)],
        "described differently": [row(0, LEFT), replace(row(1, LEFT), nbytes=1), row(1, RIGHT)],
    }
    for message, rows in cases.items():
        with pytest.raises(UnsupportedMapping, match=message):
            make_plan(rows)


def test_the_tasks_make_the_tensors_of_the_checkpoint_and_no_other() -> None:
    """A buffer that no rank declares would never reach a receiver."""
    rows = [row(0, LEFT), row(1, RIGHT)]
    buffer = TensorMeta("buffer", (3,), "F32")
    assert make_plan(rows, expected=[TENSOR]).tensors == (TENSOR,)
    for expected in ([TENSOR, buffer], [], [TensorMeta("w", (4, 6), "BF16")]):
        with pytest.raises(UnsupportedMapping, match="the checkpoint has"):
            make_plan(rows, expected=expected)


def test_flags_reach_outputs_over_other_tasks() -> None:
    """A changed amax feeds the scale, the scale feeds two outputs."""
    a, b, c = (TensorMeta(name, (1,), "BF16") for name in "abc")
    plan = make_plan(
        [
            *(watched(0, name) for name in ("x", "amax", "y")),
            residual(0, "scale", depends=("amax",)),
            residual(0, "quantize a", outputs=(a,), depends=("x", "scale")),
            residual(1, "quantize b", outputs=(b,), depends=("scale",)),
            residual(1, "copy c", outputs=(c,), depends=("y",)),
        ]
    )
    assert plan.dependencies.required(["amax"]) == (a, b)
    assert plan.dependencies.required(["x"]) == (a,)
    assert plan.dependencies.required(["y"]) == (c,)
    assert plan.dependencies.required([]) == ()
    assert plan.dependencies.all_tensors() == (a, b, c)


@pytest.mark.parametrize("kind", ["affine", "input"])
def test_replicas_that_differ_by_one_bit_are_found_at_setup(kind: str) -> None:
    """B15: the delta must not depend on which replica owns the shard."""
    words = np.array([0x3F80, 0x3F81], dtype="<u2")

    def agree(exchange, difference: int) -> None:  # type: ignore[no-untyped-def]
        mine = words ^ np.uint16(difference if exchange.rank == 1 else 0)
        box = BoxMap.whole(TensorMeta("w", (2,), "BF16"))
        if kind == "affine":
            agree_plan(exchange, [AffineTask.identity(box, lambda: mine)])
        else:
            shard = ResidualInput(name="x", shard="0", dtype="BF16", count=2, read=lambda: mine)
            task = ResidualTask(
                name="t", shard="0", outputs=(box.tensor,), depends=("x",), nbytes=4, convert=lambda tensor: []
            )
            agree_plan(exchange, [], [shard], [task])

    run_in_threads(2, lambda exchange: agree(exchange, 0))
    with pytest.raises(ConditionViolated, match="ranks 0 and 1 hold different bits") as caught:
        run_in_threads(2, lambda exchange: agree(exchange, 1))
    assert caught.value.condition == "SC2"
