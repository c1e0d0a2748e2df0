"""Application through the hook: values, masks, threads, memory, failures."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.bits import unsigned
from nemo_dcr.bits.tensors import copied_words, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.errors import ConditionViolated, PostApplyMismatch
from nemo_dcr.receiver import place
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.paths import LoaderTable
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.testing.strategies import ANY_DTYPE
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[Mapping[str, Tensor], Weights], Iterable[str] | None]


@pytest.fixture(autouse=True, params=[True, False], ids=["by-index", "over-scratch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file holds for both ways of application."""
    monkeypatch.setitem(Applier.__init__.__kwdefaults__, "index_space", request.param)


def plain(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
    return [name for name, tensor in weights if resident[name].copy_(tensor) is not None]


def engine(
    old: Mapping[str, Tensor], load: Load = plain, residents: Mapping[str, Tensor] | None = None
) -> ScriptedModel:
    """A model of residents like `old` (or as given), filled with `old` by its own loader."""
    model = ScriptedModel(residents or {name: torch.zeros_like(tensor) for name, tensor in old.items()}, load)
    model.load_weights(old.items())
    return model


def metas_of(old: Mapping[str, Tensor]) -> list[TensorMeta]:
    from nemo_dcr.bits.tensors import dtype_name

    return [TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in old.items()]


def overwrite(meta: TensorMeta, entries: Mapping[int, int]) -> Item:
    values = np.array(list(entries.values()), dtype=unsigned(meta.dtype))
    return Item.of(meta, Encoding.OVERWRITE, np.array(list(entries), dtype=np.int64), values)


def words(tensor: Tensor) -> list[int]:
    return copied_words(tensor).tolist()


def refit(model: ScriptedModel, metas: list[TensorMeta], items: list[Item]) -> LoaderTable:
    table = prewarm(model, metas)
    Applier(model, table, post_apply_check=True).apply(items)
    return table


@pytest.mark.parametrize("word", [0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0x0000, 0x8000, 0x0001, 0xFFFF])
@pytest.mark.parametrize("source", [lambda t: t, lambda t: t.clone()], ids=["view", "copy"])
def test_any_bit_pattern_is_stored_as_sent(word: int, source: Callable[[Tensor], Tensor]) -> None:
    """NaN payloads, both zeros and subnormals are values like any other (failure A3)."""

    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            resident[name].copy_(source(tensor))

    old = {"w": torch.ones(4, dtype=torch.bfloat16)}
    model = engine(old, load)
    refit(model, metas_of(old), [overwrite(metas_of(old)[0], {1: word, 2: 0x4000})])
    assert words(model.w) == [0x3F80, word, 0x4000, 0x3F80]


@pytest.mark.parametrize("new", [[0x7F, 0xFF, 0x01, 0x02], [0, 1, 2, 3]])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8])
def test_one_byte_values_leave_no_pattern_out(dtype: torch.dtype, new: list[int]) -> None:
    """Failure A4, and the case where all 256 patterns occur in the item."""
    old = {"w": torch.full((300,), 5, dtype=torch.uint8).view(dtype)}
    meta = metas_of(old)[0]
    model = engine(old)
    table = refit(model, [meta], [overwrite(meta, dict(enumerate(new)))])
    assert words(model.w) == [*new, *[5] * 296]
    Applier(model, table).apply([overwrite(meta, {7 + value: value for value in range(256)})])
    assert words(model.w) == [*new, 5, 5, 5, *range(256), *[5] * 37]


@pytest.mark.parametrize("shape", [(), (0, 4), (5,)])
@pytest.mark.parametrize("dtype", ANY_DTYPE)
def test_every_dtype_takes_xor_overwrite_and_a_retry(dtype: str, shape: tuple[int, ...]) -> None:
    """Failure B10: integers, booleans, scalars and empty tensors, also by overwrite."""
    meta = TensorMeta("w", shape, dtype)
    old = tensor_from_words(np.ones(meta.numel, dtype=unsigned(dtype)), dtype, shape)
    model = engine({"w": old})
    table = prewarm(model, [meta])
    assert table.classes == {"w": PathClass.XOR}
    if meta.numel == 0:
        assert Applier(model, table).apply([]).items == 0
        return
    applier = Applier(model, table, post_apply_check=True)
    one = np.ones(1, dtype=unsigned(dtype))
    applier.apply([Item.run(meta, Encoding.XOR, 0, one)])
    assert words(model.w) == [0] + [1] * (meta.numel - 1)
    for _ in range(2):
        applier.apply([Item.run(meta, Encoding.OVERWRITE, meta.numel - 1, one * 0)])
        assert words(model.w)[-1] == 0


def test_a_composed_loader_leaves_untransformed_what_was_not_sent() -> None:
    """Failure A6: raw [0, 1, 2] becomes [0, 0.5, 2], stored as -exp(raw) in FP32."""

    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            resident[name].copy_(tensor)
            resident[name].copy_(-resident[name].exp())

    old = {"w": torch.tensor([0, 1, 2], dtype=torch.bfloat16)}
    model = engine(old, load, {"w": torch.zeros(3)})
    dense = engine({"w": torch.tensor([0, 0.5, 2], dtype=torch.bfloat16)}, load, {"w": torch.zeros(3)})
    table = refit(model, metas_of(old), [overwrite(metas_of(old)[0], {1: 0x3F00})])
    assert words(model.w) == words(dense.w)
    assert table.classes == {"w": PathClass.OVERWRITE}


def test_a_scalar_fp32_buffer_in_a_bf16_model_keeps_every_bit() -> None:
    """Failure B9: one unit in the last place of an FP32 buffer, next to BF16 weights."""
    old = {"bias": torch.tensor([6.817001, 7.063]), "w": torch.ones(3, dtype=torch.bfloat16)}
    model = engine(old)
    bias, weight = metas_of(old)
    changed = words(model.bias)[1] ^ 1
    refit(model, [bias, weight], [overwrite(bias, {1: changed}), overwrite(weight, {0: 0x3F81})])
    assert words(model.bias) == [words(old["bias"])[0], changed]
    assert words(model.w) == [0x3F81, 0x3F80, 0x3F80]
    assert model.bias.dtype is torch.float32


def test_a_tied_head_follows_and_an_untied_equal_one_stays() -> None:
    """Failure B4."""
    shared = torch.zeros(4, dtype=torch.bfloat16)

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return plain(resident, ((name, tensor) for name, tensor in weights))

    old = {"embed": torch.arange(4, dtype=torch.bfloat16)}
    model = engine(old, load, {"embed": shared, "head": shared})
    refit(model, metas_of(old), [overwrite(metas_of(old)[0], {0: 0x4040})])
    assert words(model.head) == words(model.embed)
    assert words(model.head)[0] == 0x4040
    both = {"embed": old["embed"], "head": old["embed"].clone()}
    untied = engine(both)
    refit(untied, metas_of(both), [overwrite(metas_of(both)[0], {0: 0x4040})])
    assert words(untied.head) == words(old["embed"])


@pytest.mark.parametrize(
    ("tp", "rank", "ep", "local"), [(1, 0, 1, 0), (2, 0, 1, 0), (2, 1, 1, 0), (1, 0, 3, 2), (1, 0, 2, 1)]
)
def test_interleaved_stacked_experts_land_where_a_dense_load_puts_them(tp: int, rank: int, ep: int, local: int) -> None:
    """Failure A15: gate and up interleaved on the last axis, experts split over ranks."""
    experts, width, inner = 3, 4, 4

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for _, tensor in weights:
            mine = [e for e in range(experts) if e * ep // experts == local]
            share = inner // tp
            for slot, expert in enumerate(mine):
                gate, up = tensor[expert, :, ::2], tensor[expert, :, 1::2]
                resident["fused"][slot, :share].copy_(gate[:, rank * share : (rank + 1) * share].t())
                resident["fused"][slot, share:].copy_(up[:, rank * share : (rank + 1) * share].t())
                names.append("fused")
        return names

    words_old = np.arange(experts * width * 2 * inner).astype("<u2") + 0x3F00
    old = {"both": tensor_from_words(words_old, "BF16", (experts, width, 2 * inner))}
    words_new = words_old.copy()
    at = np.array([64, 65, 70, 71, 95])  # gate and up elements of expert 2
    words_new[at] ^= 3
    slots = sum(e * ep // experts == local for e in range(experts))

    def rank_of(weights: dict[str, Tensor]) -> ScriptedModel:
        return engine(weights, load, {"fused": torch.zeros(slots, 2 * inner // tp, width, dtype=torch.bfloat16)})

    model, dense = rank_of(old), rank_of({"both": tensor_from_words(words_new, "BF16", (experts, width, 2 * inner))})
    meta = metas_of(old)[0]
    table = refit(model, [meta], [Item.of(meta, Encoding.XOR, at, words_old[at] ^ words_new[at])])
    assert table.classes == {"both": PathClass.XOR}
    assert words(model.fused) == words(dense.fused)


def test_another_thread_may_copy_while_items_are_applied() -> None:
    """Failure A10: interception ends at the applying thread."""
    other = torch.zeros(4, dtype=torch.int64)

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        thread = threading.Thread(target=other.copy_, args=(torch.arange(4),))
        thread.start()
        thread.join()
        return plain(resident, weights)

    old = {"w": torch.ones(2)}
    model = engine(old, load)
    refit(model, metas_of(old), [overwrite(metas_of(old)[0], {0: 7})])
    assert other.tolist() == [0, 1, 2, 3]
    assert words(model.w) == [7, 0x3F800000]


def test_item_assignment_is_intercepted_like_any_copy() -> None:
    """Failure A2."""

    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            resident[name].data[...] = tensor

    old = {"w": torch.ones(4, dtype=torch.bfloat16)}
    model = engine(old, load)
    refit(model, metas_of(old), [overwrite(metas_of(old)[0], {1: 0x4040})])
    assert words(model.w) == [0x3F80, 0x4040, 0x3F80, 0x3F80]


def test_a_group_is_one_call_and_reports_what_it_did() -> None:
    calls: list[int] = []

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = plain(resident, ((name, tensor) for name, tensor in weights if name != "skipped"))
        calls.append(len(names))
        return names

    old = {name: torch.ones(4, dtype=torch.bfloat16) for name in ("a", "b", "skipped")}
    model = engine(old, load)
    table = prewarm(model, metas_of(old))
    calls.clear()
    done: list[str] = []
    items = [overwrite(meta, {1: 0x4040, 3: 0x4041}) for meta in metas_of(old)]
    report = Applier(model, table, post_apply_check=True).apply(
        items, on_item=lambda item: done.append(item.tensor.name)
    )
    assert calls == [2]
    assert done == ["a", "b"]
    assert (report.items, report.skipped, report.copies, report.elements) == (2, 1, 2, 4)
    assert report.checked_elements == 8
    assert Applier(model, table).apply(items).checked_elements == 0


def test_one_change_in_a_large_tensor_needs_no_second_large_buffer() -> None:
    """Failure D8: by index the scratch stays untouched; over it the peak is one scratch and one mask."""
    megabytes = 64
    old = {"w": torch.ones(megabytes << 19, dtype=torch.bfloat16)}
    model = engine(old)
    meta = metas_of(old)[0]
    table = prewarm(model, [meta])
    by_index, over_scratch = Applier(model, table, index_space=True), Applier(model, table, index_space=False)
    del old

    def peak_of(action: Callable[[], object]) -> float:
        gc.collect()  # garbage that goes in the action would hide what the action takes
        ctypes.CDLL(None).malloc_trim(0)  # and so would free memory of earlier tests that is still the process's own
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        action()
        return (_status("VmHWM") - before) / 1024

    for item, limit in (
        (Item.run(meta, Encoding.XOR, 12345, np.ones(1, dtype="<u2")), 1.0),
        (overwrite(meta, {5: 0x4040}), 1.5),
        (overwrite(meta, {5: 0, 9: 7}), 1.5),
    ):
        assert peak_of(lambda item=item: by_index.apply([item])) <= 8
        assert peak_of(lambda item=item: over_scratch.apply([item])) <= limit * megabytes + 8
    assert words(model.w[:10]) == [0x3F80] * 5 + [0] + [0x3F80] * 3 + [7]


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def test_an_exception_of_the_loader_fails_the_attempt_and_a_retry_repairs() -> None:
    old = {"a": torch.ones(4, dtype=torch.bfloat16), "b": torch.ones(4, dtype=torch.bfloat16)}
    model = engine(old)
    metas = metas_of(old)
    table = prewarm(model, metas)

    def failing(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        for name, tensor in weights:
            if name == "b":
                raise RuntimeError("device lost")
            resident[name].copy_(tensor)
        return []

    model._load = failing
    applier = Applier(model, table)
    xor = [Item.run(meta, Encoding.XOR, 2, np.array([0xC1], dtype="<u2")) for meta in metas]
    with pytest.raises(ConditionViolated, match="device lost"):
        applier.apply(xor)
    assert words(model.a) != words(model.b)
    model._load = plain
    applier.apply([overwrite(meta, {2: 0x3F80 ^ 0xC1}) for meta in metas])
    assert words(model.a) == words(model.b) == [0x3F80, 0x3F80, 0x3F41, 0x3F80]


def test_a_failure_that_the_loader_swallows_still_fails_the_attempt() -> None:
    old = {"a": torch.ones(4)}
    model = engine(old)
    table = prewarm(model, metas_of(old))

    def swallowing(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            try:
                resident[name].mul_(2)
            except ConditionViolated:
                resident[name].copy_(tensor)
            names.append(name)
        return names

    model._load = swallowing
    with pytest.raises(ConditionViolated) as caught:
        Applier(model, table).apply([overwrite(metas_of(old)[0], {0: 7})])
    assert caught.value.condition == "LC1"
    assert words(model.a) == [0x3F800000] * 4


def test_items_that_prewarm_did_not_see_are_refused() -> None:
    old = {"a": torch.ones(4)}
    model = engine(old)
    table = prewarm(model, metas_of(old))
    for meta in (TensorMeta("x", (4,), "F32"), TensorMeta("a", (2, 2), "F32"), TensorMeta("a", (4,), "I32")):
        with pytest.raises(ConditionViolated):
            Applier(model, table).apply([overwrite(meta, {0: 7})])
    with pytest.raises(ConditionViolated, match="outside"):
        Applier(model, table).apply([overwrite(metas_of(old)[0], {4: 7})])
    assert words(model.a) == [0x3F800000] * 4


def test_an_item_of_an_unsupported_name_is_refused_with_its_condition() -> None:
    old = {"a": torch.ones(4)}
    model = engine(old)
    model._load = lambda resident, weights: [
        name for name, tensor in weights if resident[name].add_(tensor) is not None
    ]
    table = prewarm(model, metas_of(old))
    with pytest.raises(ConditionViolated) as caught:
        Applier(model, table).apply([overwrite(metas_of(old)[0], {0: 7})])
    assert caught.value.condition == "LC1"


@pytest.mark.parametrize("encoding", list(Encoding))
def test_the_post_apply_check_sees_a_bit_that_did_not_stick(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault is injected into the write itself: the stored word differs from the sent one."""
    old = {"a": torch.ones(4, dtype=torch.int32)}
    model = engine(old)
    table = prewarm(model, metas_of(old))
    applier = Applier(model, table, post_apply_check=True)
    check = place.DenseScratchPlacer._check

    def flip_then_check(self: place.DenseScratchPlacer, name: str, resident: Tensor, expected: Tensor) -> None:
        resident[3].bitwise_xor_(4)
        check(self, name, resident, expected)

    monkeypatch.setattr(place.DenseScratchPlacer, "_check", flip_then_check)
    with pytest.raises(PostApplyMismatch, match="1 written elements"):
        applier.apply([Item.run(metas_of(old)[0], encoding, 0, np.array([7], dtype="<u4"))])


def test_a_model_made_in_inference_mode_can_be_refitted() -> None:
    with torch.inference_mode():
        residents = {"w": torch.ones(4, dtype=torch.bfloat16)}
    model = ScriptedModel(residents, plain)
    meta = TensorMeta("w", (4,), "BF16")
    refit(model, [meta], [Item.run(meta, Encoding.XOR, 1, np.array([0xC0], dtype="<u2"))])
    with torch.inference_mode():
        assert words(model.w) == [0x3F80, 0x3F40, 0x3F80, 0x3F80]


def test_a_parameter_subclass_with_its_own_loader_attribute_works() -> None:
    class Weight(torch.nn.Parameter):
        def weight_loader(self, tensor: Tensor) -> None:
            self.data.narrow(0, 1, 2).copy_(tensor)

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = Weight(torch.zeros(4), requires_grad=True)

        def load_weights(self, weights: Weights) -> set[str]:
            for _, tensor in weights:
                self.w.weight_loader(tensor)
            return {"w"}

    model, meta = Engine(), TensorMeta("w", (2,), "F32")
    table = prewarm(model, [meta])
    Applier(model, table, post_apply_check=True).apply([overwrite(meta, {1: 7})])
    assert words(model.w) == [0, 0, 7, 0]
