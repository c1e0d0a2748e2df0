"""Application by index: which paths take it, what it costs, and what its guards see."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.bits.tensors import copied_words, dtype_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.receiver import place_indexed
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.index_map import IndexMap, index_map
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.scratch import Scratch
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
Act = Callable[[Tensor, Tensor], object]
META = TensorMeta("w", (4, 6), "BF16")


def engine(act: Act, resident: Tensor | None = None, meta: TensorMeta = META) -> ScriptedModel:
    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        for _, tensor in weights:
            model.act(residents["w"], tensor)
        return ["w"]

    resident = torch.zeros(meta.shape, dtype=torch.bfloat16) if resident is None else resident
    model = ScriptedModel({"w": resident}, load)
    model.act = act
    return model


def copy(p: Tensor, t: Tensor) -> None:
    p.copy_(t)


def xor(meta: TensorMeta = META, at: Iterable[int] = (1, 8, 23), mask: int = 0x4000) -> Item:
    indices = np.array(list(at), dtype=np.int64)
    return Item.of(meta, Encoding.XOR, indices, np.full(len(indices), mask, dtype="<u2"))


BY_INDEX: dict[str, tuple[Act, tuple[int, ...]]] = {
    "whole": (copy, (4, 6)),
    "columns": (lambda p, t: p.copy_(t[:, 2:5]), (4, 3)),
    "transposed": (lambda p, t: p.copy_(t.t()), (6, 4)),
    "every other column": (lambda p, t: p[:, ::2].copy_(t[:, 1::2]), (4, 6)),
    "repeated": (lambda p, t: p.copy_(t), (3, 4, 6)),
    "twice": (lambda p, t: (p[0].copy_(t), p[1].copy_(t)), (2, 4, 6)),
    "bits as integers": (lambda p, t: p.view(torch.int16).copy_(t.view(torch.int16)), (4, 6)),
    "no element": (lambda p, t: p.copy_(t[:0]), (0, 6)),
}
OVER_SCRATCH: dict[str, tuple[Act, Tensor]] = {
    "a cast": (copy, torch.zeros(4, 6)),
    "a clone": (lambda p, t: p.copy_(t.clone()), torch.zeros(4, 6, dtype=torch.bfloat16)),
    "a second copy": (lambda p, t: (p.copy_(t), p.copy_(-p)), torch.zeros(4, 6, dtype=torch.bfloat16)),
    "windows that overlap": (
        lambda p, t: p.copy_(t.flatten().unfold(0, 4, 2)),
        torch.zeros(11, 4, dtype=torch.bfloat16),
    ),
    "halves of words": (
        lambda p, t: p.copy_(t.view(torch.uint8)),
        torch.zeros(4, 12, dtype=torch.uint8),
    ),
    "very many repeats": (lambda p, t: p.copy_(t), torch.zeros(5000, 4, 6, dtype=torch.bfloat16)),
}


@pytest.fixture
def no_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anything that lays an item out over the scratch fails the test."""

    def load(self: Scratch, item: Item, placeholder: int) -> None:
        pytest.fail("the scratch was written")

    monkeypatch.setattr(Scratch, "load", load)


@pytest.mark.usefixtures("no_scratch")
@pytest.mark.parametrize("encoding", list(Encoding))
@pytest.mark.parametrize("form", BY_INDEX)
def test_a_copy_of_a_view_places_entries_without_the_scratch(form: str, encoding: Encoding) -> None:
    act, shape = BY_INDEX[form]
    model, dense = (engine(act, torch.zeros(shape, dtype=torch.bfloat16)) for _ in range(2))
    table = prewarm(model, [META])
    item = xor()
    values = np.zeros(24, dtype="<u2")
    values[item.flat_indices()] = item.values
    dense.load_weights([("w", torch.from_numpy(values.view("<i2")).view(torch.bfloat16).view(4, 6))])
    item = Item(META, encoding, item.start, item.indices, item.values)
    report = Applier(model, table).apply([item])
    assert copied_words(model.w).tolist() == copied_words(dense.w).tolist()
    assert report.copies == table.paths["w"].copies


@pytest.mark.parametrize("form", OVER_SCRATCH)
def test_every_other_copy_takes_the_scratch(form: str) -> None:
    act, resident = OVER_SCRATCH[form]
    model = engine(act, resident)
    path = prewarm(model, [META]).paths["w"]
    assert (path.by_index, path.breach) == (None, None)


def test_an_item_that_changes_most_of_a_large_tensor_takes_the_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a loop over the whole tensor is faster than one over its entries."""
    meta = TensorMeta("w", (40_000,), "BF16")
    model = engine(copy, torch.zeros(40_000, dtype=torch.bfloat16), meta)
    applier = Applier(model, prewarm(model, [meta]))
    applier.apply([xor(meta, range(0, 40_000, 5))])
    loaded: list[int] = []
    load = Scratch.load

    def noted(self: Scratch, item: Item, placeholder: int) -> None:
        loaded.append(item.count)
        load(self, item, placeholder)

    monkeypatch.setattr(Scratch, "load", noted)
    applier.apply([xor(meta, range(0, 40_000, 5))])
    assert loaded == []
    applier.apply([xor(meta, range(0, 40_000, 2))])
    assert loaded == [20_000]
    assert copied_words(model.w).tolist() == [0x4000 * (at % 2 == 0) for at in range(40_000)]


def test_a_write_into_the_scratch_from_another_thread_fails_the_attempt_before_the_copy() -> None:
    """No operator of the loading thread shows it; torch counts it."""

    def act(p: Tensor, t: Tensor) -> None:
        writer = threading.Thread(target=t.add_, args=(1,))
        writer.start()
        writer.join()
        p.copy_(t)

    model = engine(copy)
    table = prewarm(model, [META])
    model.act = act
    with pytest.raises(ConditionViolated, match="another thread edits the given tensor") as caught:
        Applier(model, table).apply([xor()])
    assert caught.value.condition == "LC5"
    assert copied_words(model.w).tolist() == [0] * 24


def test_a_write_into_the_scratch_after_the_copy_fails_the_attempt_too() -> None:
    def act(p: Tensor, t: Tensor) -> None:
        p.copy_(t)
        writer = threading.Thread(target=t.zero_)
        writer.start()
        writer.join()

    model = engine(copy)
    table = prewarm(model, [META])
    model.act = act
    with pytest.raises(ConditionViolated, match="another thread"):
        Applier(model, table).apply([xor()])


SURPRISES: dict[str, Act] = {
    "other columns": lambda p, t: p.copy_(t.flip(1)),
    "a computed source": lambda p, t: p.copy_(t + 0),
    "a source of its own": lambda p, t: p.copy_(torch.ones_like(t)),
    "another target": lambda p, t: p[:2].copy_(t[:2]),
    "another order": lambda p, t: p.copy_(t.view(6, 4).t()),
    "a transform in place": lambda p, t: p.mul_(2),
}


@pytest.mark.parametrize("surprise", SURPRISES)
def test_a_copy_that_prewarm_did_not_see_fails_the_attempt_before_any_write(surprise: str) -> None:
    model = engine(copy)
    table = prewarm(model, [META])
    assert table.paths["w"].by_index == 24
    model.act = SURPRISES[surprise]
    with pytest.raises(ConditionViolated):
        Applier(model, table).apply([xor()])
    assert copied_words(model.w).tolist() == [0] * 24


@pytest.mark.parametrize("met", [-1, 1])
def test_entries_that_meet_more_or_fewer_copies_than_prewarm_saw_fail_the_attempt(
    met: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine(copy)
    table = prewarm(model, [META])
    write = IndexMap.write
    monkeypatch.setattr(IndexMap, "write", lambda self, *args: write(self, *args) + met)
    with pytest.raises(ConditionViolated, match=f"{3 + met} of 3 entries") as caught:
        Applier(model, table).apply([xor()])
    assert caught.value.condition == "LC2"


def test_the_post_apply_check_compares_with_the_scratch_and_not_with_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong map would agree with itself."""
    model = engine(lambda p, t: p.copy_(t.t()), torch.zeros(6, 4, dtype=torch.bfloat16))
    table = prewarm(model, [META])

    def untransposed(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...]) -> IndexMap | None:
        return index_map(shape, target, target)

    monkeypatch.setattr(place_indexed, "index_map", untransposed)
    Applier(model, table).apply([xor()])
    for encoding in Encoding:
        item = xor(mask=0x0101)
        with pytest.raises(Exception, match="written elements"):
            Applier(model, table, post_apply_check=True).apply(
                [Item(META, encoding, item.start, item.indices, item.values)]
            )
        assert not table.scratch._bytes.any()


def test_a_loader_reads_what_was_placed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are in place when the copy returns, as they are after a dense load."""
    seen: list[float] = []

    def act(p: Tensor, t: Tensor) -> None:
        p.copy_(t)
        seen.append(float(p.sum()))

    model = engine(act)
    table = prewarm(model, [META])
    seen.clear()
    Applier(model, table).apply([xor(at=[3, 5])])
    assert seen == [4.0]


def test_residents_that_share_one_storage_of_several_dtypes_are_addressed_by_their_own_words() -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    residents = {"w": memory[:16].view(torch.bfloat16), "v": memory[16:48].view(torch.float32)}
    metas = [TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in residents.items()]

    def load(inside: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return [name for name, tensor in weights if inside[name].copy_(tensor) is not None]

    model = ScriptedModel(residents, load)
    table = prewarm(model, metas)
    assert [table.paths[meta.name].by_index for meta in metas] == [8, 8]
    items = [
        Item.run(metas[0], Encoding.OVERWRITE, 7, np.array([0x0102], dtype="<u2")),
        Item.run(metas[1], Encoding.XOR, 0, np.array([0x03040506], dtype="<u4")),
    ]
    Applier(model, table).apply(items)
    assert memory.tolist() == [0] * 14 + [2, 1, 6, 5, 4, 3] + [0] * 44


def test_the_scratch_counts_writes_although_it_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        scratch = Scratch(8)
    before = scratch.version
    scratch.tensor(TensorMeta("w", (4,), "BF16")).add_(1)
    assert scratch.version > before


def test_items_of_both_kinds_follow_each_other_in_one_call() -> None:
    model = engine(lambda p, t: p.copy_(t))
    table = prewarm(model, [META])
    whole = Item.run(META, Encoding.OVERWRITE, 0, np.arange(24, dtype="<u2"))
    Applier(model, table).apply([xor(at=[0]), whole, xor(at=[1, 2])])
    assert copied_words(model.w).tolist() == [0, 0x4001, 0x4002, *range(3, 24)]
    assert not table.scratch._bytes.any()
