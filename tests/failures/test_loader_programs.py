"""Random loaders: every refit equals a dense load in every bit, or prewarm refuses and storage stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.testing import foreign_writes as fw
from nemo_dcr.testing import loader_programs as lp
from nemo_dcr.testing.refit_outcome import Outcome, dense_load, refit_outcome
from nemo_dcr.testing.strategies import ANY_DTYPE, FLOATS, changes, shapes, words
from tests.failures.kinds import KINDS, Load, Weights, outcome_of, outcome_of_load, versions

SIZED = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
Drawn = tuple[lp.LoaderProgram, dict[str, Words], dict[str, Words]]


@st.composite
def pipelines(draw: st.DrawFn, name: str, *, foreign: bool) -> lp.TensorProgram:
    meta = TensorMeta(name, draw(shapes(max_side=4)), draw(st.sampled_from((*FLOATS, *ANY_DTYPE))))
    floats = meta.dtype in FLOATS
    sources = draw(st.lists(st.sampled_from((*lp.SOURCES, *(lp.FLOAT_SOURCES if floats else ()))), max_size=3))
    made = lp.TensorProgram(meta, tuple(sources))
    shape = tuple(made.declare(0, 1)[f"{name}_0"].shape)
    usable = [
        key
        for key in lp.PLACEMENTS
        if (shape or key not in lp.NEED_AXIS) and (floats or key not in ("cast in the copy", "pad and copy"))
    ]
    made = replace(made, placement=draw(st.sampled_from(usable)))
    # A transform of the whole tensor after copies into parts of it is beyond what a composed path may do.
    if floats and made.placement in ("same", "item assignment", "cast in the copy", "replicate", "split"):
        made = replace(made, stages=tuple(draw(st.lists(st.sampled_from(tuple(lp.STAGES)), max_size=2))))
    if foreign and shape and 0 not in shape and draw(st.integers(0, 2)):
        acts = [key for key in fw.FOREIGN if floats or key not in fw.FLOAT_FOREIGN]
        needs_same = made.placement in ("same", "item assignment", "cast in the copy", "replicate")
        acts = (
            acts if needs_same else ["bits in place", "zero", "resize_", "rebind to a clone", "array", "storage item"]
        )
        act = draw(st.sampled_from((*acts, *fw.TAKEN_EARLIER)))
        made = replace(made, foreign=act, early=act in fw.TAKEN_EARLIER and draw(st.booleans()))
    if not foreign and any(source.startswith("narrow") for source in sources):
        return made  # the other rank may hold no element of it
    return replace(made, skipped_on=draw(st.sampled_from((None, None, None, 0, 1))))


@st.composite
def programs(draw: st.DrawFn, *, foreign: bool = True) -> Drawn:
    tensors = tuple(draw(pipelines(f"t{number}", foreign=foreign)) for number in range(draw(st.integers(1, 3))))
    program = lp.LoaderProgram(
        tensors,
        world=draw(st.integers(1, 2)) if foreign else 2,
        order=draw(st.sampled_from(lp.ORDERS if foreign else lp.ORDERS[:4])),
        report=draw(st.sampled_from(("resident", *lp.REPORTS) if foreign else lp.REPORTS[:3])),
    )
    old = {meta.name: draw(words(meta.dtype, meta.numel)) for meta in program.metas}
    new = {meta.name: draw(changes(meta, old[meta.name])) for meta in program.metas}
    return program, old, new


def play(drawn: Drawn) -> Outcome:
    program, old, new = drawn
    for rank in range(program.world):
        try:
            dense_load(program.engine(rank), program.metas, old)
        except (NotImplementedError, RuntimeError, IndexError):
            reject()  # torch has no such operator for this dtype or shape: no dense load to compare with
    ranks = [lambda rank=rank: program.engine(rank) for rank in range(program.world)]
    return refit_outcome(ranks, program.metas, old, new)


@SIZED
@given(programs())
def test_any_loader_is_exact_or_refused_before_the_first_write(drawn: Drawn) -> None:
    outcome = play(drawn)
    assert outcome.exact or outcome.refused.startswith("LC")


@SIZED
@given(programs(foreign=False))
def test_a_clean_loader_is_never_refused(drawn: Drawn) -> None:
    assert drawn[0].clean
    assert play(drawn).exact


def both(act: str, dtype: str = "BF16", *, early: bool = False) -> Outcome:
    """Two tensors, the first of them with a foreign act, on two ranks of which only the first one does it."""
    tensors = (
        lp.TensorProgram(TensorMeta("t0", (4, 2), dtype), foreign=act, early=early),
        lp.TensorProgram(TensorMeta("t1", (3,), dtype)),
    )
    old, new = versions([each.meta for each in tensors])
    return play((lp.LoaderProgram(tensors, world=2), old, new))


@pytest.mark.parametrize("act", [act for act in fw.FOREIGN if act != "accumulate"])
def test_every_foreign_act_is_refused_although_another_rank_does_without_it(act: str) -> None:
    assert both(act).refused.startswith("LC")


CONSTANT = [act for act in fw.TAKEN_EARLIER if act.startswith("constant")]
DISPATCHED = ["storage object", "fill of a storage object", "copy of a storage object", "alias"]
"""Operators on this thread carry these out, so that they are refused before they happen."""


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("act", [act for act in fw.TAKEN_EARLIER if act not in (*CONSTANT, *DISPATCHED)])
def test_a_write_through_memory_that_was_taken_earlier_is_undone_and_refused(act: str, early: bool) -> None:
    for dtype in KINDS:
        outcome = both(act, dtype, early=early)
        assert outcome.refused == "LC1"
        assert "resident t0_0 was written" in outcome.detail


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("act", DISPATCHED)
def test_a_storage_or_an_alias_that_was_taken_earlier_is_refused_before_it_is_written(act: str, early: bool) -> None:
    for dtype in KINDS:
        assert both(act, dtype, early=early).refused == ("LC12" if act == "alias" else "LC1")


@pytest.mark.parametrize("act", CONSTANT)
def test_a_constant_through_memory_is_exact_after_the_copies_and_refused_before_them(act: str) -> None:
    """A dense load leaves the constant where it comes last, and then no write changes a bit."""
    assert both(act).exact
    assert both(act, early=True).refused == "LC1"


def test_a_sum_with_what_was_copied_just_before_is_a_composed_path() -> None:
    assert both("accumulate").classes["t0"] is PathClass.OVERWRITE


def test_the_foreign_acts_break_different_conditions() -> None:
    """Fuzzing that never met a condition would prove nothing of it; LC3 and LC12 come from skips and orders."""
    assert {both(act).refused for act in fw.FOREIGN} == {"", "LC1", "LC2", "LC4", "LC5", "LC7", "LC9"}


@pytest.mark.parametrize("order", [order for order in lp.ORDERS if "pairs" in order])
def test_a_loader_that_waits_for_pairs_on_one_rank_is_refused(order: str) -> None:
    """Alone, each tensor looks like a native skip; the other rank would have hidden that nothing arrives here."""
    tensors = tuple(lp.TensorProgram(TensorMeta(name, (3,), "F32")) for name in ("t0", "t1"))
    old, new = versions([each.meta for each in tensors])
    assert play((lp.LoaderProgram(tensors, world=2, order=order), old, new)).refused == "LC12"


@pytest.mark.parametrize("one_call", [True, False])
@pytest.mark.parametrize("tied", ["value", "sign"])
def test_a_number_that_goes_from_one_tensor_to_another_through_python_is_refused(tied: str, one_call: bool) -> None:
    metas = [TensorMeta("scale", (), "F32"), TensorMeta("w", (4, 2), "F32")]
    old, new = versions(metas)

    def fresh() -> Load:
        kept = {"factor": 1.0}

        def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
            state = {"factor": 1.0} if one_call else kept
            names = []
            for name, tensor in weights:
                if name == "scale":
                    value = tensor.item()
                    state["factor"] = value if tied == "value" else 2.0 if value > 0 else 3.0
                    residents[name].copy_(tensor)
                else:
                    residents[name].copy_(tensor * state["factor"])
                names.append(name)
            return names

        return load

    assert outcome_of_load(fresh, metas, old=old, new=new).refused == "LC12"


def test_a_number_that_is_only_looked_at_ties_nothing() -> None:
    metas = [TensorMeta("scale", (), "F32"), TensorMeta("w", (4, 2), "F32")]

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            seen.append(float(tensor.reshape(-1)[0].item()))
            residents[name].copy_(tensor * 2 if name == "w" else tensor)
            names.append(name)
        return names

    seen: list[float] = []
    assert outcome_of_load(lambda: load, metas).exact
    assert seen


@pytest.mark.parametrize("swapped", ["plain", "given"])
def test_an_object_that_was_swapped_for_another_one_is_put_back(swapped: str) -> None:
    def act(p: Tensor, t: Tensor) -> None:
        torch.utils.swap_tensors(p, t.clone() if swapped == "given" else torch.zeros_like(p))

    assert outcome_of(act, "BF16").refused == "LC9"
