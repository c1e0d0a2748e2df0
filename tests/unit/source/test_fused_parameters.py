"""Fused parameters as trainers build them: the delta of their tasks is that of the canonical tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import resident_words, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.fused import concatenated, interleaved_qkv, padded_rows, rank_part, sections, stacked
from nemo_dcr.source.geometry import affine_row, make_plan
from nemo_dcr.source.parameter import parameter_tasks
from nemo_dcr.source.piecewise import IndexMap
from nemo_dcr.source.tasks import AffineTask
from nemo_dcr.testing.source_cases import apply_items, changed_words, random_words

Weights = dict[str, torch.Tensor]
GROUPS, PER_GROUP, HEAD, HIDDEN = 4, 3, 2, 5
Q = TensorMeta("q.weight", (GROUPS * PER_GROUP * HEAD, HIDDEN), "BF16")
K, V = (TensorMeta(f"{n}.weight", (GROUPS * HEAD, HIDDEN), "BF16") for n in "kv")
GATE, UP = (TensorMeta(f"{n}.weight", (8, HIDDEN), "BF16") for n in ("gate", "up"))
IN_PROJ = TensorMeta("in_proj.weight", (8 + 8 + 4 + 4 + 4, HIDDEN), "BF16")
SECTIONS = (8, 8, 4, 4, 4)
EXPERTS = tuple(TensorMeta(f"experts.{e}.weight", (6, HIDDEN), "BF16") for e in range(4))
EMBED = TensorMeta("embed.weight", (13, HIDDEN), "BF16")


def build_qkv(w: Weights, rank: int, ranks: int) -> torch.Tensor:
    """As Megatron does: for each group its query heads, its key head, its value head."""
    heads = [
        torch.cat(
            [
                w[Q.name].view(GROUPS, -1, HIDDEN)[g],
                w[K.name].view(GROUPS, -1, HIDDEN)[g],
                w[V.name].view(GROUPS, -1, HIDDEN)[g],
            ]
        )
        for g in range(GROUPS)
    ]
    return torch.cat(heads).chunk(ranks)[rank].clone()


def build_gated(w: Weights, rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([w[t.name].chunk(ranks)[rank] for t in (GATE, UP)])


def build_mamba(w: Weights, rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([part.chunk(ranks)[rank] for part in w[IN_PROJ.name].split(SECTIONS)])


def build_experts(w: Weights, rank: int, ranks: int) -> torch.Tensor:
    return torch.stack([w[t.name].T for t in EXPERTS]).chunk(ranks)[rank].clone()


def build_embedding(w: Weights, rank: int, ranks: int) -> torch.Tensor:
    rows = torch.cat([w[EMBED.name], torch.full((3, HIDDEN), 7.0, dtype=torch.bfloat16)])
    return rows.chunk(ranks)[rank].clone()


CASES: dict[
    str, tuple[tuple[TensorMeta, ...], Callable[[int, int], IndexMap], Callable[[Weights, int, int], torch.Tensor]]
] = {
    "interleaved heads": (
        (Q, K, V),
        lambda rank, ranks: rank_part(interleaved_qkv(Q, K, V, groups=GROUPS), 0, rank, ranks),
        build_qkv,
    ),
    "gate and up": ((GATE, UP), lambda rank, ranks: concatenated((GATE, UP), rank=rank, ranks=ranks), build_gated),
    "mamba sections": (
        (IN_PROJ,),
        lambda rank, ranks: sections(IN_PROJ, SECTIONS, rank=rank, ranks=ranks),
        build_mamba,
    ),
    "stacked experts": (
        EXPERTS,
        lambda rank, ranks: rank_part(stacked(EXPERTS, transposed=True), 0, rank, ranks),
        build_experts,
    ),
    "padded rows": ((EMBED,), lambda rank, ranks: rank_part(padded_rows(EMBED, 16), 0, rank, ranks), build_embedding),
}


def weights(tensors: tuple[TensorMeta, ...], words: dict[str, Words]) -> Weights:
    return {t.name: tensor_from_words(words[t.name].copy(), t.dtype, t.shape) for t in tensors}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mode", [AttemptMode.XOR, AttemptMode.OVERWRITE])
def test_records_of_all_ranks_turn_the_old_tensors_into_the_new(case: str, ranks: int, mode: AttemptMode) -> None:
    tensors, index_map, build = CASES[case]
    rng = np.random.default_rng(ranks)
    old = {t.name: random_words(rng, t.dtype, t.numel) for t in tensors}
    new = {name: changed_words(rng, "BF16", words, 0.3) for name, words in old.items()}
    held = [build(weights(tensors, old), rank, ranks) for rank in range(ranks)]
    tasks = [parameter_tasks(index_map(rank, ranks), lambda rank=rank: held[rank]) for rank in range(ranks)]  # type: ignore[misc]
    plan = make_plan([affine_row(OwnerId(r), t) for r in range(ranks) for t in tasks[r]], expected=tensors)
    assert plan.tensors == tuple(sorted(tensors))
    owners = [DeltaOwner(OwnerId(rank), tasks[rank]) for rank in range(ranks)]
    for owner in owners:
        owner.capture(Version(0))
    held[:] = [build(weights(tensors, new), rank, ranks) for rank in range(ranks)]
    classes = dict.fromkeys((t.name for t in tensors), PathClass.XOR)
    full = {name: words.copy() for name, words in old.items()}
    written = apply_items(full, [i for o in owners for bucket in o.stream(mode, classes) for i in bucket.items])
    assert {name: words.tobytes() for name, words in full.items()} == {n: w.tobytes() for n, w in new.items()}
    if mode is AttemptMode.XOR:
        assert len(written) == sum(int(np.count_nonzero(old[n] != new[n])) for n in old)


def test_a_part_that_lies_in_one_run_is_read_in_place() -> None:
    held = build_gated({t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for t in (GATE, UP)}, 0, 1)
    tasks = parameter_tasks(concatenated((GATE, UP)), lambda: held)
    words = [task.words() for task in tasks]
    assert all(np.shares_memory(each, resident_words(held)) for each in words)


def test_an_fp32_master_is_compared_as_the_policy_that_it_is_cast_to() -> None:
    master = torch.randn((16, HIDDEN), dtype=torch.float32)
    tasks: list[AffineTask] = parameter_tasks(concatenated((GATE, UP)), lambda: master)
    cast = master.to(torch.bfloat16)
    assert [task.words().tobytes() for task in tasks] == [
        resident_words(p.contiguous()).tobytes() for p in cast.split(8)
    ]


def test_a_parameter_of_another_shape_is_refused_before_and_after() -> None:
    held = torch.zeros((16, HIDDEN), dtype=torch.bfloat16)
    with pytest.raises(UnsupportedMapping, match="the parameter has shape"):
        parameter_tasks(concatenated((GATE, UP)), lambda: held.reshape(-1))
    shapes = [held]
    (first, *_) = parameter_tasks(concatenated((GATE, UP)), lambda: shapes[0])
    shapes[0] = torch.zeros((32, HIDDEN), dtype=torch.bfloat16)
    with pytest.raises(ConditionViolated, match="declare it anew"):
        first.words()


def test_heads_and_sections_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedMapping, match="groups of heads"):
        interleaved_qkv(Q, K, V, groups=5)
    with pytest.raises(UnsupportedMapping, match="equal parts"):
        sections(IN_PROJ, SECTIONS, ranks=8)
    with pytest.raises(UnsupportedMapping, match="padding of 0 and -1"):
        padded_rows(EMBED, 12)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_committed_words_are_written_back_bit_for_bit_also_into_a_strided_parameter(case: str, strided: bool) -> None:
    tensors, index_map, build = CASES[case]
    rng = np.random.default_rng(3)
    old = build(weights(tensors, {t.name: random_words(rng, t.dtype, t.numel) for t in tensors}), 1, 2)
    held = old.mT.contiguous().mT if strided else old.clone()
    assert held.is_contiguous() != strided
    tasks = parameter_tasks(index_map(1, 2), lambda: held)
    committed = [task.words().copy() for task in tasks]
    held.view(torch.int16).bitwise_xor_(1)
    for task, words in zip(tasks, committed, strict=True):
        assert task.write is not None
        task.write(words)
    assert [task.words().tobytes() for task in tasks] == [words.tobytes() for words in committed]
    padding = 3 * HIDDEN if case == "padded rows" else 0
    assert int((held.view(torch.int16) != old.view(torch.int16)).sum()) == padding


def test_an_fp32_master_goes_back_to_the_values_that_were_served() -> None:
    master = torch.randn((16, HIDDEN), dtype=torch.float32)
    tasks = parameter_tasks(concatenated((GATE, UP)), lambda: master)
    committed, served = [task.words().copy() for task in tasks], master.to(torch.bfloat16).float()
    master.mul_(1.5)
    for task, words in zip(tasks, committed, strict=True):
        assert task.write is not None
        task.write(words)
    assert resident_words(master).tobytes() == resident_words(served).tobytes()
