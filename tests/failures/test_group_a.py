"""Group A of the known failures: interception of the native loader. Each test is over a kind of loader and of dtype.

Allowed are the bits of a dense load, or a refusal at prewarm with live storage untouched; `refit_outcome` raises for
anything else, so that each test states which of the two it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.bits import unsigned
from nemo_dcr.bits.tensors import integer_view, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.errors import AttemptFailed, ConditionViolated
from nemo_dcr.ids import AttemptId
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.testing.foreign_writes import TAKEN_EARLIER, Memory
from nemo_dcr.testing.refit_outcome import change_items, dense_load, refit_outcome, stored_bits
from nemo_dcr.testing.strategies import SPECIAL_WORDS
from nemo_dcr.testing.toy_loader import ScriptedModel
from tests.failures.kinds import (
    FLOAT_KINDS,
    KINDS,
    Act,
    Load,
    Weights,
    each_by,
    outcome_of,
    outcome_of_load,
    versions,
    zeros,
)


def plain(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
    return [name for name, tensor in weights if residents[name].copy_(tensor) is not None]


# -- A1: writes beside the intercepted copy

BESIDE: dict[str, Act] = {
    "bits in place after the copy": lambda p, t: (p.copy_(t), integer_view(p).bitwise_xor_(1)),
    "zero before a copy of a part": lambda p, t: (integer_view(p).zero_(), p[:2].copy_(t[:2])),
    "fill after the copy": lambda p, t: (p.copy_(t), integer_view(p)[1:].fill_(1)),
    "add into zeros": lambda p, t: (integer_view(p).zero_(), integer_view(p).bitwise_or_(integer_view(t))),
    "out argument": lambda p, t: torch.bitwise_or(integer_view(t), 0, out=integer_view(p)),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("write", BESIDE)
def test_a1_a_write_beside_the_copy_is_refused_before_it_happens(write: str, dtype: str) -> None:
    assert outcome_of(BESIDE[write], dtype).refused == "LC1"


@pytest.mark.parametrize("dtype", KINDS)
def test_a1_zeroed_padding_beside_the_copy_stays_legal(dtype: str) -> None:
    act: Act = lambda p, t: (p[:4].copy_(t), integer_view(p)[4:].fill_(0))  # noqa: E731
    assert outcome_of(act, dtype, padded=2).classes == {"w": PathClass.XOR}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("act", ["array taken earlier", "address", "array of an alias", "operator in a thread"])
def test_a1_a_write_through_memory_taken_earlier_is_undone_and_refused(act: str, early: bool, dtype: str) -> None:
    """Nothing shows it before it happens: the bits do, and prewarm puts the old ones back."""

    def fresh() -> Load:
        taken: list[Memory] = []

        def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
            taken or taken.append(Memory.of(residents["w"]))  # by the first load, long before prewarm
            names = []
            for name, tensor in weights:
                for step in ("act", "copy") if early else ("copy", "act"):
                    residents[name].copy_(tensor) if step == "copy" else TAKEN_EARLIER[act](taken[0])
                names.append(name)
            return names

        return load

    assert outcome_of_load(fresh, [TensorMeta("w", (4, 2), dtype)]).refused == "LC1"


UNSEEN: dict[str, Callable[[Memory, Sequence[int]], object]] = {
    "array": lambda m, bytes_sent: m.array.put(bytes_sent, m.array[bytes_sent] ^ 0x55),
    "address": lambda m, bytes_sent: [m.raw.__setitem__(at, m.raw[at] ^ 0x55) for at in bytes_sent],
    "alias": lambda m, bytes_sent: m.alias.view(torch.uint8).reshape(-1)[list(bytes_sent)].fill_(9),
    "array in a thread": lambda m, bytes_sent: _in_thread(lambda: m.array.put(bytes_sent, 3)),
    "nothing": lambda m, bytes_sent: None,
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("way", UNSEEN)
@pytest.mark.parametrize("index_space", [False, True])
def test_a1_an_item_that_is_written_unseen_after_prewarm_fails_and_the_retry_repairs_it(
    way: str, encoding: Encoding, dtype: str, index_space: bool
) -> None:
    """Prewarm cannot know it. The copy does not come, which fails the attempt; the sent elements hold anything."""
    meta = TensorMeta("w", (4, 2), dtype)
    old, new = versions([meta])
    sent = np.flatnonzero(old["w"] != new["w"])
    bytes_sent = (sent[:, None] * meta.width + np.arange(meta.width)).reshape(-1).tolist()
    unseen: list[Memory] = []

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        if unseen:
            return [name for name, _ in weights if UNSEEN[way](unseen[0], bytes_sent) is not weights]
        return plain(residents, weights)

    model, dense = (ScriptedModel({"w": zeros(meta)}, load) for _ in range(2))
    dense_load(model, [meta], old)
    dense_load(dense, [meta], new)
    applier = Applier(model, prewarm(model, [meta]), index_space=index_space)
    unseen.append(Memory.of(model.w))
    with pytest.raises(AttemptFailed):
        applier.apply(change_items([meta], old, new, {"w": encoding}), attempt=AttemptId(1))
    unseen.clear()
    applier.apply(change_items([meta], old, new, {"w": Encoding.OVERWRITE}), attempt=AttemptId(2))
    assert stored_bits(model) == stored_bits(dense)


# -- A2: copies that C++ makes


def _by_element(p: Tensor, t: Tensor) -> None:
    for row in range(p.shape[0]):
        p[row, 0] = t[row, 0]
        p[row, 1:] = t[row, 1:]


FROM_CPP: dict[str, Act] = {
    "p[:] = t": lambda p, t: p.__setitem__(slice(None), t),
    "p.data[...] = t": lambda p, t: p.data.__setitem__(..., t),
    "row by row": lambda p, t: [p.__setitem__(row, t[row]) for row in range(4)],
    "element by element": _by_element,
    "a strided slice": lambda p, t: (p.__setitem__(slice(0, None, 2), t[:2]), p[1::2].copy_(t[2:])),
}
MANY_AT_ONCE: dict[str, Act] = {
    "_foreach_copy_": lambda p, t: torch._foreach_copy_([p], [t]),
    "index_copy_": lambda p, t: integer_view(p).index_copy_(0, torch.arange(4), integer_view(t)),
    "index_put_": lambda p, t: integer_view(p).index_put_((torch.arange(4),), integer_view(t)),
    "mask assignment": lambda p, t: integer_view(p).__setitem__(
        torch.ones(4, 2, dtype=torch.bool), integer_view(t).flatten()
    ),
    "set_": lambda p, t: p.set_(t.clone()),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("form", FROM_CPP)
def test_a2_item_assignment_is_intercepted_like_any_copy(form: str, dtype: str) -> None:
    assert outcome_of(FROM_CPP[form], dtype).exact


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("form", MANY_AT_ONCE)
def test_a2_operators_that_write_without_a_copy_are_refused_with_storage_untouched(form: str, dtype: str) -> None:
    assert outcome_of(MANY_AT_ONCE[form], dtype).refused == "LC1"


# -- A3 and A4: values that a sentinel would swallow

FORMS: dict[str, tuple[Act, int]] = {
    "view": (lambda p, t: p.copy_(t), 0),
    "copy of the source": (lambda p, t: p.copy_(t.clone()), 0),
    "padded": (lambda p, t: (p[: t.shape[0]].copy_(t), integer_view(p)[t.shape[0] :].fill_(0)), 3),
}


@pytest.mark.parametrize("dtype", [*FLOAT_KINDS, "F8_E4M3", "F8_E5M2", "F8_E8M0"])
@pytest.mark.parametrize("form", FORMS)
def test_a3_every_nan_infinity_and_zero_arrives_with_its_bits(form: str, dtype: str) -> None:
    act, padded = FORMS[form]
    special = np.array(SPECIAL_WORDS[dtype], dtype=unsigned(dtype))
    meta = TensorMeta("w", (2 * len(special),), dtype)
    old = np.full(meta.numel, SPECIAL_WORDS[dtype][-1], dtype=unsigned(dtype))
    new = old.copy()
    new[1::2] = special
    residents = lambda: {"w": zeros(meta, (meta.numel + padded,))}  # noqa: E731
    outcome = outcome_of_load(lambda: each_by(act), [meta], residents, old={"w": old}, new={"w": new})
    assert outcome.exact


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8"])
@pytest.mark.parametrize("form", FORMS)
def test_a4_an_item_may_hold_every_pattern_of_its_width(form: str, dtype: str) -> None:
    act, padded = FORMS[form]
    meta = TensorMeta("w", (300,), dtype)
    old = np.full(300, 5, dtype="u1")
    old[15] = 4
    new = old.copy()
    new[10:266] = np.arange(256)
    residents = lambda: {"w": zeros(meta, (300 + padded,))}  # noqa: E731
    outcome = outcome_of_load(lambda: each_by(act), [meta], residents, old={"w": old}, new={"w": new})
    assert outcome.exact


# -- A5: loaders that hold what they were given


def _look_ahead(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    held = None
    for entry in weights:
        if held is not None:
            yield held
        held = entry
    if held is not None:
        yield held


HOLD: dict[str, Callable[[Weights], Weights]] = {
    "list": list,
    "dict": lambda weights: dict(weights).items(),
    "sorted": lambda weights: sorted(weights, key=lambda entry: entry[0]),
    "reversed": lambda weights: reversed(list(weights)),
    "look ahead": _look_ahead,
    "groups": lambda weights: [
        entry for _, group in groupby(weights, key=lambda entry: entry[0][0]) for entry in list(group)
    ],
}
THREE = ("x0", "x1", "y0")


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
@pytest.mark.parametrize("hold", HOLD)
def test_a5_a_loader_that_holds_its_input_gets_every_tensor_right(hold: str, dtype: str) -> None:
    metas = [TensorMeta(name, (3, 2), dtype) for name in THREE]
    load: Load = lambda residents, weights: plain(residents, HOLD[hold](weights))  # noqa: E731
    assert set(outcome_of_load(lambda: load, metas).classes.values()) == {PathClass.XOR}


@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_a5_a_pair_that_waits_for_its_other_half_across_calls_is_refused(dtype: str) -> None:
    metas = [TensorMeta(name, (3, 2), dtype) for name in ("q", "k")]

    def fresh() -> Load:
        waiting: dict[str, Tensor] = {}

        def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
            waiting.update(weights)
            if len(waiting) < 2:
                return []
            residents["qk"].copy_(torch.cat([integer_view(waiting[n]) for n in ("q", "k")]).view(waiting["q"].dtype))
            waiting.clear()
            return ["qk"]

        return load

    outcome = outcome_of_load(fresh, metas, lambda: {"qk": torch.zeros(6, 2, dtype=torch_dtype(dtype))})
    assert outcome.refused == "LC12"


# -- A6: a second copy that transforms what the first one stored

COMPOSED: dict[str, Callable[[Tensor], Tensor]] = {
    "-exp": lambda p: -p.exp(),
    "1 + p": lambda p: 1 + p,
    "negated": lambda p: -p,
    "thrice": lambda p: p * 3,
}


@pytest.mark.parametrize(("dtype", "resident"), [*((d, d) for d in FLOAT_KINDS), ("BF16", "F32"), ("F16", "F32")])
@pytest.mark.parametrize("transform", COMPOSED)
def test_a6_a_composed_loader_transforms_the_sent_elements_and_no_others(
    transform: str, dtype: str, resident: str
) -> None:
    act: Act = lambda p, t: (p.copy_(t), p.copy_(COMPOSED[transform](p)))  # noqa: E731
    outcome = outcome_of(act, dtype, resident=resident)
    assert (outcome.detail, outcome.classes) == ("", {"w": PathClass.OVERWRITE})


@pytest.mark.parametrize("dtype", FLOAT_KINDS)
def test_a6_xor_items_are_refused_on_a_composed_path(dtype: str) -> None:
    meta = TensorMeta("w", (4, 2), dtype)
    old, new = versions([meta])
    model = ScriptedModel({"w": zeros(meta)}, each_by(lambda p, t: (p.copy_(t), p.copy_(-p.exp()))))
    dense_load(model, [meta], old)
    table, before = prewarm(model, [meta]), stored_bits(model)
    mask = Item.run(meta, Encoding.XOR, 1, (old["w"] ^ new["w"])[1:2])
    with pytest.raises(ConditionViolated) as caught:
        Applier(model, table).apply([mask])
    assert caught.value.condition == "LC5"
    assert stored_bits(model) == before


@pytest.mark.parametrize("dtype", FLOAT_KINDS)
def test_a6_stages_that_move_elements_and_move_them_back_are_refused(dtype: str) -> None:
    """The result is elementwise, the stored values between the stages are not."""
    act: Act = lambda p, t: (p.copy_(t), p.copy_(p.flip(0)), p.copy_(p.flip(0)))  # noqa: E731
    assert outcome_of(act, dtype).refused == "LC4"


# -- A8: reports

REPORTS: dict[str, Callable[[list[str]], list[str]]] = {
    "the stale name instead of the copied one": lambda names: ["b"],
    "the copied and the stale name": lambda names: ["a", "b"],
    "a resident name that nothing wrote": lambda names: [*names, "table"],
    "nothing at all": lambda names: [],
}


@pytest.mark.parametrize("dtype", ["BF16", "I64", "U8"])
@pytest.mark.parametrize("report", REPORTS)
def test_a8_a_report_is_reconciled_name_by_name(report: str, dtype: str) -> None:
    metas = [TensorMeta(name, (4,), dtype) for name in ("a", "b")]

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = plain(residents, ((name, tensor) for name, tensor in weights if name == "a"))
        return REPORTS[report](names)

    residents = lambda: {m.name: zeros(m) for m in metas} | {"table": torch.arange(3.0)}  # noqa: E731
    assert outcome_of_load(lambda: load, metas, residents).refused == "LC2"


# -- A10: threads

OTHER_WORK: dict[str, Callable[[Tensor], object]] = {
    "int64 copy_": lambda other: other.copy_(torch.arange(4)),
    "item assignment": lambda other: other.__setitem__(slice(None), torch.arange(4)),
    "arithmetic": lambda other: other.zero_().add_(torch.arange(4)),
}


@pytest.mark.parametrize("work", OTHER_WORK)
def test_a10_work_of_other_threads_goes_on_while_items_are_applied(work: str) -> None:
    other, errors = torch.full((4,), 9), []

    def run() -> None:
        try:
            OTHER_WORK[work](other)
        except Exception as error:
            errors.append(error)

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        other.fill_(9) if not started else None
        names = []
        for name, tensor in weights:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            started.append(thread)
            names += plain(residents, [(name, tensor)])
        return names

    started: list[threading.Thread] = []
    meta = TensorMeta("w", (4, 2), "BF16")
    assert outcome_of_load(lambda: load, [meta]).exact
    assert len(started) > 4
    assert errors == []
    assert other.tolist() == [0, 1, 2, 3]


def _in_thread(act: Callable[[], object]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def _in_pool(act: Callable[[], object]) -> None:
    with ThreadPoolExecutor(2) as pool:
        pool.submit(act).result()


HIDDEN: dict[str, Act] = {
    "copy in a thread": lambda p, t: _in_thread(lambda: p.copy_(t)),
    "computed copy in a thread": lambda p, t: _in_thread(lambda: p.copy_(t.clone())),
    "copy in a pool": lambda p, t: _in_pool(lambda: p.copy_(t)),
    "value made in a thread": lambda p, t: (made := [], _in_thread(lambda: made.append(t.clone())), p.copy_(made[0])),
    "item assignment in a thread": lambda p, t: _in_thread(lambda: p.__setitem__(slice(None), t)),
}


@pytest.mark.parametrize("dtype", ["BF16", "I64", "BOOL"])
@pytest.mark.parametrize("form", HIDDEN)
def test_a10_a_loader_whose_copies_other_threads_make_is_refused(form: str, dtype: str) -> None:
    assert outcome_of(HIDDEN[form], dtype).refused in {"LC1", "LC2"}


@pytest.mark.parametrize("kind", ["thread", "pool"])
def test_a10_a_thread_that_outlives_the_load_is_refused(kind: str) -> None:
    """It could write at any time."""
    stop, wanted, pools = threading.Event(), threading.Event(), []

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        if wanted.is_set():
            wanted.clear()
            pools.append(ThreadPoolExecutor(1))
            threading.Thread(target=stop.wait).start() if kind == "thread" else pools[0].submit(stop.wait)
        return plain(residents, weights)

    meta = TensorMeta("w", (4, 2), "BF16")
    model = ScriptedModel({"w": zeros(meta)}, load)
    dense_load(model, [meta], versions([meta])[0])
    wanted.set()
    try:
        reasons = prewarm(model, [meta]).reasons
    finally:
        stop.set()
    assert [code for code, _ in reasons.values()] == ["LC1"]
    assert "still run" in reasons["w"][1]


# -- A11: XOR needs the stored bits to arrive as they are

KEEPING: dict[str, Act] = {
    "narrow": lambda p, t: p.copy_(t.narrow(0, 0, 4)),
    "transposed views": lambda p, t: p.t().copy_(t.t()),
    "bits as integers": lambda p, t: integer_view(p).copy_(integer_view(t)),
}
CHANGING: dict[str, Act] = {
    "clone": lambda p, t: p.copy_(t.clone()),
    "transpose and contiguous": lambda p, t: p.copy_(t.t().contiguous().t()),
    "to another device": lambda p, t: p.copy_(t.to("cpu", copy=True)),
    "concatenated parts": lambda p, t: p.copy_(torch.cat([t[:2].clone(), t[2:].clone()])),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("source", [*KEEPING, *CHANGING])
def test_a11_only_same_dtype_views_of_the_scratch_take_xor(source: str, dtype: str) -> None:
    wanted = PathClass.XOR if source in KEEPING else PathClass.OVERWRITE
    outcome = outcome_of((KEEPING | CHANGING)[source], dtype)
    assert (outcome.detail, outcome.classes) == ("", {"w": wanted})


@pytest.mark.parametrize("dtype", FLOAT_KINDS)
@pytest.mark.parametrize("resident", FLOAT_KINDS)
def test_a11_a_cast_in_the_copy_takes_overwrites_only(resident: str, dtype: str) -> None:
    wanted = PathClass.XOR if dtype == resident else PathClass.OVERWRITE
    outcome = outcome_of(lambda p, t: p.copy_(t), dtype, resident=resident)
    assert (outcome.detail, outcome.classes) == ("", {"w": wanted})


@pytest.mark.parametrize("casting", [0, 1, 2])
def test_a11_one_casting_rank_makes_a_name_overwrite_only_on_all_of_them(casting: int) -> None:
    meta = TensorMeta("w", (4, 2), "BF16")
    old, new = versions([meta])
    ranks = [
        lambda dtype=dtype: ScriptedModel({"w": zeros(meta, dtype=dtype)}, plain)
        for dtype in ("F32" if rank == casting else "BF16" for rank in range(3))
    ]
    assert refit_outcome(ranks, [meta], old, new).classes == {"w": PathClass.OVERWRITE}


# -- A13: overlapping destinations

DISJOINT: dict[str, Act] = {
    "even and odd rows": lambda p, t: (p[::2].copy_(t[:2]), p[1::2].copy_(t[2:])),
    "even and odd columns": lambda p, t: (p[:, ::2].copy_(t[:, :1]), p[:, 1::2].copy_(t[:, 1:])),
    "halves in turn": lambda p, t: (p[2:].copy_(t[2:]), p[:2].copy_(t[:2])),
}
MEETING: dict[str, Act] = {
    "one row twice": lambda p, t: (p[:3].copy_(t[:3]), p[2:].copy_(t[2:])),
    "rows across columns": lambda p, t: (p[0].copy_(t[0]), p[:, 0].copy_(t[:, 0])),
    "a view over itself": lambda p, t: p.as_strided((4, 2), (1, 1)).copy_(t),
}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("form", DISJOINT)
def test_a13_interleaved_copies_are_told_from_overlapping_ones(form: str, dtype: str) -> None:
    assert outcome_of(DISJOINT[form], dtype).classes == {"w": PathClass.XOR}


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("form", MEETING)
def test_a13_copies_that_share_a_byte_are_refused(form: str, dtype: str) -> None:
    assert outcome_of(MEETING[form], dtype).refused == "LC7"


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("second", [(1,), (0, 1, 2), (1, 3)], ids=str)
@pytest.mark.parametrize("dtype", KINDS)
def test_a13_an_element_that_two_xor_items_carry_is_refused_across_items_and_calls(
    dtype: str, second: tuple[int, ...], calls: int
) -> None:
    meta = TensorMeta("w", (4, 2), dtype)
    model = ScriptedModel({"w": zeros(meta)}, plain)
    applier = Applier(model, prewarm(model, [meta]))
    ones = np.ones(4, dtype=unsigned(dtype))
    items = [Item.of(meta, Encoding.XOR, np.array(at), ones[: len(at)]) for at in ((1, 5), second)]
    groups = [items] if calls == 1 else [items[:1], items[1:]]
    with pytest.raises(ConditionViolated) as caught:
        [applier.apply(group, attempt=AttemptId(1)) for group in groups]
    assert caught.value.condition == "LC6"


@pytest.mark.parametrize("first", [0, 3, 4, 6])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "U8"])
def test_a13_storages_that_share_memory_are_one_destination(dtype: str, first: int) -> None:
    """Two storages over one array: torch does not know that they meet, and an XOR through both would cancel."""
    metas = [TensorMeta(name, (4,), dtype) for name in ("a", "b")]

    def residents() -> dict[str, Tensor]:
        array = np.zeros(16 * metas[0].width, dtype="u1")
        whole = [torch.from_numpy(array).view(torch_dtype(dtype)) for _ in metas]
        return {"a": whole[0][:4], "b": whole[1][first : first + 4]}

    outcome = outcome_of_load(lambda: plain, metas, residents)
    assert (outcome.refused, outcome.exact) == (("LC7", False) if first < 4 else ("", True))


# -- A15: expert stacks

EXPERTS, HIDDEN_SIZE, INNER = 3, 4, 4


def _expert_rank(layout: str, tp: int, ep: int, rank: int, dtype: str) -> ScriptedModel:
    """w13 holds gate over up, w2 the down projection; experts are split over `ep` groups, the inner axis over `tp`."""
    mine = [expert for expert in range(EXPERTS) if expert * ep // EXPERTS == rank // tp]
    share, first = INNER // tp, rank % tp * (INNER // tp)
    inner = slice(first, first + share)

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        loaded = []
        for name, tensor in weights:
            for slot, expert in enumerate(mine):
                if name == "down":
                    residents["w2"][slot].copy_(tensor[expert, inner].t())
                    continue
                gate, up = (tensor[expert, :, 0::2], tensor[expert, :, 1::2])
                if layout == "halves":
                    gate, up = tensor[expert, :, :INNER], tensor[expert, :, INNER:]
                residents["w13"][slot, :share].copy_(gate[:, inner].t())
                residents["w13"][slot, share:].copy_(up[:, inner].t())
            loaded += ["w2" if name == "down" else "w13"] if mine else []
        return loaded

    kind = torch_dtype(dtype)
    shapes = {"w13": (len(mine), 2 * share, HIDDEN_SIZE), "w2": (len(mine), HIDDEN_SIZE, share)}
    return ScriptedModel({name: torch.zeros(shape, dtype=kind) for name, shape in shapes.items()}, load)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3"])
def test_a15_expert_stacks_land_where_a_dense_load_puts_them(dtype: str, layout: str, tp: int, ep: int) -> None:
    metas = [
        TensorMeta("gate_up", (EXPERTS, HIDDEN_SIZE, 2 * INNER), dtype),
        TensorMeta("down", (EXPERTS, INNER, HIDDEN_SIZE), dtype),
    ]
    old, new = versions(metas)
    ranks = [lambda rank=rank: _expert_rank(layout, tp, ep, rank, dtype) for rank in range(tp * ep)]
    assert set(refit_outcome(ranks, metas, old, new).classes.values()) == {PathClass.XOR}


def test_a11_the_union_is_the_most_restrictive_class_whatever_the_order() -> None:
    one, other = {"w": PathClass.XOR}, {"w": PathClass.OVERWRITE}
    for tables in ({"r/0": one, "r/1": other}, {"r/0": other, "r/1": one}):
        assert unite_tables(tables) == {"w": PathClass.OVERWRITE}
