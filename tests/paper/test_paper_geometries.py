"""Tables D.1 and D.2 and the baseline sizes of Section 5, from the classifier that real trainers go through."""

from __future__ import annotations

import pytest

from nemo_dcr.source.classes import AFFINE, PIECEWISE, Classified, Handling, Mapping, MappingClass, classify, handling
from nemo_dcr.testing.paper_models import nemotron_3_ultra, qwen3_30b_a3b


@pytest.fixture(scope="module")
def qwen() -> Classified:
    return classify(qwen3_30b_a3b(), Mapping.PAPER)


@pytest.fixture(scope="module")
def nemotron() -> Classified:
    return classify(nemotron_3_ultra(), Mapping.PAPER)


def percent(found: Classified, kind: Handling, digits: int) -> float:
    return round(100 * found.share(kind).nbytes / found.nbytes, digits)


def test_table_d2_counts_the_affine_tensors_of_qwen3_30b_a3b(qwen: Classified) -> None:
    assert (qwen.share(Handling.AFFINE).tensors, len(qwen.rows)) == (18721, 18867)
    assert percent(qwen, Handling.AFFINE, 1) == 96.3
    assert percent(qwen, Handling.RESIDUAL, 2) == 3.69


@pytest.mark.parametrize(
    ("degree", "affine", "all_of_them"), [(1, 18721, 18867), (4, 74161, 74307), (8, 148081, 148227)]
)
def test_items_of_qwen3_30b_a3b_at_each_degree(qwen: Classified, degree: int, affine: int, all_of_them: int) -> None:
    items = qwen.affine_items(degree, degree)
    assert items == affine == 18480 * degree + 241
    assert items + qwen.share(Handling.RESIDUAL).tensors == all_of_them


def test_table_d1_counts_the_tensors_of_nemotron_3_ultra(nemotron: Classified) -> None:
    residual = nemotron.of(Handling.RESIDUAL)
    assert len(residual) == 185
    assert sum(row.mapping is MappingClass.PADDED for row in residual) == 2
    assert nemotron.share(Handling.AFFINE).tensors == 50176 + 662
    assert percent(nemotron, Handling.AFFINE, 1) == 97.0
    assert percent(nemotron, Handling.RESIDUAL, 2) == 3.01
    assert round(nemotron.nbytes / 1e9) == 1121


@pytest.mark.parametrize(("tensor", "expert"), [(1, 1), (8, 8), (4, 2)])
def test_items_of_nemotron_3_ultra_at_each_degree(nemotron: Classified, tensor: int, expert: int) -> None:
    assert nemotron.affine_items(tensor, expert) == 50176 * expert + 257 * tensor + 405
    if (tensor, expert) == (8, 8):
        assert nemotron.affine_items(8, 8) == 403869
        assert nemotron.affine_items(8, 8) + nemotron.share(Handling.RESIDUAL).tensors == 404054


def test_xor_share_of_bytes_still_rounds_to_the_affine_share(nemotron: Classified) -> None:
    """Only a few Mamba state parameters are transformed by the native loader."""
    transformed = [row for row in nemotron.of(Handling.AFFINE) if row.transformed]
    assert 0 < len(transformed) < 100
    xor = nemotron.share(Handling.AFFINE).nbytes - sum(row.tensor.nbytes for row in transformed)
    assert round(100 * xor / nemotron.nbytes, 1) == 97.0


def test_baselines_are_1_04_and_1_03_checkpoints_and_36_gb_a_rank(qwen: Classified, nemotron: Classified) -> None:
    assert round(qwen.baseline_nbytes / qwen.nbytes, 2) == 1.04
    assert round(nemotron.baseline_nbytes / nemotron.nbytes, 2) == 1.03
    assert round(nemotron.baseline_nbytes / 32 / 1e9) == 36


def test_piecewise_maps_leave_nothing_residual_of_either_checkpoint() -> None:
    """Both have untied heads and no export hook; what is left in the paper's classes is interleaved, cut or padded."""
    for rows in (qwen3_30b_a3b(), nemotron_3_ultra()):
        extended = classify(rows)
        assert extended.of(Handling.RESIDUAL) == ()
        assert extended.share(Handling.PIECEWISE) == classify(rows, Mapping.PAPER).share(Handling.RESIDUAL)


def test_unknown_and_computed_mappings_are_residual_under_every_use() -> None:
    for mapping in set(MappingClass) - AFFINE - PIECEWISE:
        assert {handling(mapping, use) for use in Mapping} == {Handling.RESIDUAL}
    assert {handling(mapping, Mapping.PAPER) for mapping in PIECEWISE} == {Handling.RESIDUAL}
