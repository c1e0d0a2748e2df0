"""vLLM's own post-load step: what it repacks is found and refused; loader layout on CPUs leaves nothing to refuse."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


def processed(workshop, model: str, **options):
    """A loaded model after the real step, and what the watch saw."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from nemo_dcr.adapters.vllm.forged import Place
    from nemo_dcr.adapters.vllm.transforms import transforms_of, watching
    from nemo_dcr.testing.refit_outcome import dense_load

    engine = workshop.build(model, Place(), **options)
    _, tensors, old, _ = workshop.of(model)
    dense_load(engine, tensors, old)
    with engine.at_its_place():
        watching(process_weights_after_loading)(engine.module, engine.config.model_config, torch.device("cpu"))
    return engine, {transform.name: transform for transform in transforms_of(engine.module)}


@pytest.fixture
def selected():
    """The options that select this engine, with its layout in force."""
    from vllm.config import WeightTransferConfig

    from nemo_dcr.adapters.vllm.cpu_layout import keep_loader_layout
    from nemo_dcr.adapters.vllm.settings import BACKEND

    keep_loader_layout()
    return {"weight_transfer_config": WeightTransferConfig(backend=BACKEND)}


def test_stock_experts_are_repacked_and_refused(workshop):
    _, found = processed(workshop, "qwen3_moe")
    packed = {name for name in found if name.endswith(("w13_weight", "w2_weight"))}
    assert len(packed) == 4
    assert {found[name].code for name in packed} == {"LC9"}


@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3_moe", "gpt_oss", "deepseek_v2", "falcon_h1"])
def test_selected_engine_keeps_every_parameter_as_it_was_loaded(model, workshop, selected):
    _, found = processed(workshop, model, **selected)
    assert found == {}


def test_absorbed_matrices_are_views_and_follow_a_refit(workshop, selected):
    from nemo_dcr.receiver.residents import storage_key

    engine, found = processed(workshop, "deepseek_v2", **selected)
    assert found == {}
    parameters = dict(engine.named_parameters(remove_duplicate=False))
    absorbed = [name for name in parameters if name.endswith(("W_UV", "W_UK_T"))]
    loaded = {storage_key(parameters[name]) for name in parameters if name.endswith("kv_b_proj.weight")}
    assert len(absorbed) == 4
    assert {storage_key(parameters[name]) for name in absorbed} == loaded


def test_selected_engine_computes_with_what_is_resident_now(workshop, selected):
    engine, _ = processed(workshop, "llama", **selected)
    layer = engine.module.model.layers[0].mlp.down_proj
    given = torch.ones(1, layer.weight.shape[1], dtype=torch.bfloat16)
    layer.weight.data.zero_()
    with engine.at_its_place():
        assert bool((layer(given)[0] == 0).all())
