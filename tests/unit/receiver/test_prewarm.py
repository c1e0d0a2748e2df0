"""Prewarm: what it records, what it needs, and that it writes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import UnsupportedLoaderPath
from nemo_dcr.receiver.paths import StepKind, unite_tables
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import resident_digest, resident_dump
from nemo_dcr.testing import toy_loader as toy

Weights = Iterable[tuple[str, Tensor]]


def filled(tensors: tuple[TensorMeta, ...], rules: dict[str, toy.Rule], rank: int = 0, world: int = 1) -> toy.ToyModel:
    """A toy rank that its loader filled with words of one exponent."""
    model = toy.ToyModel(tensors, rules, rank, world)
    rng = np.random.default_rng(3)
    model.load_weights(
        (meta.name, tensor_from_words(rng.integers(0x3F00, 0x4100, meta.numel).astype("<u2"), "BF16", meta.shape))
        for meta in tensors
    )
    return model


def test_a_path_records_copies_targets_and_covered_elements() -> None:
    metas = (TensorMeta("w", (6, 4), "BF16"), TensorMeta("e", (5, 2), "BF16"), TensorMeta("x", (3,), "BF16"))
    rules: dict[str, toy.Rule] = {"w": toy.Slice(1), "e": toy.PadRows(4), "x": toy.OnRank(0)}
    table = prewarm(filled(metas, rules, rank=1, world=2), metas)
    path = table.paths["w"]
    assert (path.path_class, path.copies, path.covered, path.breach) == (PathClass.XOR, 1, 12, None)
    assert path.steps[0].source is not None
    assert path.steps[0].source.dims == ((6, 4), (2, 1))
    assert path.steps[0].source.offset == 2
    padded = table.paths["e"]
    assert [step.kind for step in padded.steps] == [StepKind.DIRECT, StepKind.CONSTANT]
    assert (padded.copies, padded.covered) == (1, 2)
    assert table.classes["x"] is PathClass.SKIPPED
    assert table.skipped == {"x"}
    assert table.unwritten == ("frequencies",)


def test_the_shadow_is_at_most_the_largest_storage_and_direct_paths_need_none() -> None:
    rows = tuple(TensorMeta(f"r{number}", (4, 8), "BF16") for number in range(6))
    fused: dict[str, toy.Rule] = {meta.name: toy.Fuse("fused", 4 * k, 24) for k, meta in enumerate(rows)}
    assert prewarm(filled(rows, fused), rows).shadow_bytes == 0
    derived = (TensorMeta("small", (4, 8), "BF16"), TensorMeta("large", (32, 8), "BF16"), rows[0])
    rules: dict[str, toy.Rule] = {"small": toy.Negate(), "large": toy.Transpose(contiguous=True), "r0": toy.Replicate()}
    model = filled(derived, rules)
    table = prewarm(model, derived)
    assert table.shadow_bytes == 32 * 8 * 2
    assert table.scratch.capacity == 32 * 8 * 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_rank_table_unites_to_the_most_restrictive_class(world: int) -> None:
    metas = tuple(TensorMeta(name, (3, 4), "BF16") for name in ("direct", "computed", "expert"))
    rules: dict[str, toy.Rule] = {"direct": toy.Slice(0), "computed": toy.Negate(), "expert": toy.OnRank(1)}
    tables = {f"e/{rank}": prewarm(filled(metas, rules, rank, world), metas).classes for rank in range(world)}
    assert unite_tables(tables) == {
        "direct": PathClass.XOR,
        "computed": PathClass.OVERWRITE,
        "expert": PathClass.XOR,
    }


def test_tables_over_different_names_are_refused() -> None:
    with pytest.raises(UnsupportedLoaderPath, match="not prewarmed"):
        unite_tables({"e/0": {"a": PathClass.XOR}, "e/1": {"b": PathClass.XOR}})
    with pytest.raises(UnsupportedLoaderPath, match=r"LC1.*receiver e/1: mul_ writes"):
        unite_tables(
            {"e/0": {"a": PathClass.XOR}, "e/1": {"a": PathClass.UNSUPPORTED}},
            {"e/1": {"a": ("LC1", "mul_ writes")}},
        )


def test_a_bad_name_does_not_hide_the_others_and_check_raises_for_it() -> None:
    tensors = {name: torch.ones(3) for name in ("a", "b", "c", "d")}
    metas = [TensorMeta(name, (3,), "F32") for name in ("a", "b", "c", "d", "unknown")]

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            if name == "b":
                resident[name].add_(tensor)
            elif name == "d":
                raise ValueError("no such layout")
            resident[name].copy_(tensor)
            names.append(name)
        return names

    table = prewarm(toy.ScriptedModel(tensors, load), metas)
    assert table.classes == {
        "a": PathClass.XOR,
        "b": PathClass.UNSUPPORTED,
        "c": PathClass.XOR,
        "d": PathClass.UNSUPPORTED,
        "unknown": PathClass.UNSUPPORTED,
    }
    assert "no such layout" in table.reasons["d"][1]
    with pytest.raises(UnsupportedLoaderPath) as caught:
        table.check()
    assert (caught.value.tensor, caught.value.condition) == ("b", "LC1")


def test_an_exception_that_the_loader_swallows_still_makes_the_path_unsupported() -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            try:
                resident[name].mul_(tensor)
            except Exception:
                names.append(name)
        return names

    table = prewarm(toy.ScriptedModel({"a": torch.ones(3)}, load), [TensorMeta("a", (3,), "F32")])
    assert table.reasons["a"][0] == "LC1"


def test_a_copy_into_a_dtype_without_an_unsigned_view_is_refused() -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            resident[name].copy_(tensor)

    table = prewarm(
        toy.ScriptedModel({"a": torch.ones(3, dtype=torch.complex128)}, load), [TensorMeta("a", (3,), "F32")]
    )
    assert table.classes == {"a": PathClass.UNSUPPORTED}


def test_numpy_cannot_get_at_the_given_tensor_during_prewarm() -> None:
    resident = torch.ones(4)

    def load(tensors: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            tensors[name].numpy()[:] = tensor.numpy()

    table = prewarm(toy.ScriptedModel({"a": resident}, load), [TensorMeta("a", (4,), "F32")])
    assert table.classes == {"a": PathClass.UNSUPPORTED}
    assert resident.tolist() == [1, 1, 1, 1]


def test_temporaries_that_the_loader_fills_are_followed_to_the_copy() -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            temporary = torch.empty_like(resident[name])
            temporary[:2].copy_(tensor[1:])
            temporary[2:] = tensor[:1]
            resident[name].copy_(temporary)

    model = toy.ScriptedModel({"a": torch.ones(3)}, load)
    table = prewarm(model, [TensorMeta("a", (3,), "F32")])
    assert table.classes == {"a": PathClass.OVERWRITE}
    assert table.paths["a"].covered == 3


def test_a_plain_attribute_tensor_is_resident_too() -> None:
    class Scaled(toy.ScriptedModel):
        def __init__(self) -> None:
            super().__init__({"a": torch.ones(3)}, self._place)
            self.scale = torch.ones(3)

        def _place(self, resident: Mapping[str, Tensor], weights: Weights) -> None:
            for name, tensor in weights:
                (self.scale if name == "s" else resident[name]).copy_(tensor)

    table = prewarm(Scaled(), [TensorMeta("a", (3,), "F32"), TensorMeta("s", (3,), "F32")])
    assert table.classes == {"a": PathClass.XOR, "s": PathClass.XOR}


def test_the_tensor_table_may_not_name_a_tensor_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        prewarm(toy.ScriptedModel({}, lambda _, __: None), [TensorMeta("a", (1,), "F32")] * 2)


def test_digest_and_dump_cover_every_parameter_and_buffer_and_every_bit() -> None:
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.tensor([0.0, 1.0])))
    model.register_buffer("tied", model.w.data)
    model.register_buffer("hidden", torch.tensor([3], dtype=torch.int64), persistent=False)
    names = [entry.name for entry in resident_dump(model)]  # type: ignore[arg-type]
    assert names == ["hidden", "tied", "w"]
    before = resident_digest(model)  # type: ignore[arg-type]
    assert before.by_name["w"] == before.by_name["tied"]
    with torch.no_grad():
        model.w[0] = -0.0
    after = resident_digest(model)  # type: ignore[arg-type]
    changed = [name for name in names if before.by_name[name] != after.by_name[name]]
    assert changed == ["tied", "w"]
    assert before.total != after.total
