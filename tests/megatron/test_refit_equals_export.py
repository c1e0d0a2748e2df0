"""The delta of a real megatron-core model, applied to the old checkpoint, is Bridge's export of the new weights."""

from __future__ import annotations

import pytest

from nemo_dcr.adapters.megatron import mappings
from nemo_dcr.adapters.megatron.source import MegatronSource
from nemo_dcr.source.classes import Handling, MappingClass
from nemo_dcr.source.fused import concatenated
from tests.megatron.refit import Case, refit
from tests.megatron.tiny import checkpoint
from tests.megatron.trainer import Checkpoint, Layout, run_ranks

pytestmark = pytest.mark.megatron
PAD = (("should_pad_vocab", True), ("make_vocab_size_divisible_by", 128))


def all_maps(source: MegatronSource) -> None:
    assert source.classified.of(Handling.RESIDUAL) == (), source.summary()
    assert source.residual == source.inputs == ()


def some_residual(source: MegatronSource) -> None:
    found = {row.mapping for row in source.classified.of(Handling.RESIDUAL)}
    assert found == {MappingClass.QKV, MappingClass.PADDED}, source.summary()
    assert source.residual


def anything(source: MegatronSource) -> None:
    del source


@pytest.mark.parametrize(
    "case",
    [
        Case("dense", Layout(tensor=2), "step", wrapped="bf16"),
        Case("mixture", Layout(expert=2, data=2), "step"),
        Case("mixture", Layout(tensor=2, expert_tensor=2)),
        Case("dense", Layout(pipeline=2, virtual=2)),
        Case("mixture", Layout(tensor=2, expert=2, pipeline=2)),
        Case("mixture", Layout(tensor=2, data=2, expert=2, expert_tensor=2), wrapped="ddp"),
    ],
    ids=["dense-tp2-trained", "mixture-ep2-trained", "tp2-etp2", "pp2-with-stages", "tp2-ep2-pp2", "tp2-ep2-etp2-ddp"],
)
def test_delta_of_index_maps_equals_the_export_bit_for_bit(case: Case) -> None:
    run_ranks(case.layout, refit, case, checkpoint(case.kind, num_hidden_layers=4), all_maps)


@pytest.mark.parametrize(
    "case",
    [
        Case("dense", Layout(tensor=2), mapping="paper"),
        Case("mixture", Layout(pipeline=2, expert=1), mapping="paper"),
    ],
    ids=["dense-tp2", "mixture-pp2"],
)
def test_delta_under_the_papers_classes_equals_the_export_bit_for_bit(case: Case) -> None:
    run_ranks(case.layout, refit, case, checkpoint(case.kind), some_residual)


def test_rows_of_padding_are_no_part_of_the_delta() -> None:
    case = Case("dense", Layout(tensor=2), model=PAD)
    run_ranks(case.layout, refit, case, checkpoint("dense", vocab_size=500), all_maps)


def test_tied_head_that_the_checkpoint_does_not_list_is_no_tensor() -> None:
    case = Case("dense", Layout(tensor=2))
    run_ranks(case.layout, refit, case, checkpoint("dense", tie_word_embeddings=True), all_maps)


def tied_head(source: MegatronSource) -> None:
    residual = source.classified.of(Handling.RESIDUAL)
    assert {row.tensor.name for row in residual} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert {row.mapping for row in residual} == {MappingClass.TIED}


def test_tied_head_that_the_checkpoint_lists_too_is_residual_and_exact() -> None:
    case = Case("dense", Layout(tensor=2))
    given = checkpoint("dense", tie_word_embeddings=True)
    both = {**given.tensors, "lm_head.weight": given.tensors["model.embed_tokens.weight"].clone()}
    run_ranks(case.layout, refit, case, Checkpoint(given.config, both), tied_head)


def swapped(held: mappings.Held) -> tuple[MappingClass, object]:
    rank, ranks = held.rank
    return MappingClass.SLICE, concatenated([held.tensor("up"), held.tensor("gate")], rank=rank, ranks=ranks)


def test_wrong_map_is_refused_by_the_check_and_fails_the_comparison_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: up before gate has the right shape, and is wrong."""
    monkeypatch.setattr(mappings, "LAYOUTS", {**mappings.LAYOUTS, "GatedMLPMapping": swapped})
    layout = Layout(tensor=2)
    with pytest.raises(AssertionError, match="Bridge's export puts other elements at"):
        run_ranks(layout, refit, Case("dense", layout), checkpoint("dense"), anything)
    with pytest.raises(AssertionError, match=r"mlp\.gate_proj\.weight"):
        run_ranks(layout, refit, Case("dense", layout, verify=False), checkpoint("dense"), anything)
