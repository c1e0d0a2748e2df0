"""Known failures that only real classes of vLLM show: no engine starts, a rank is built and loaded in this process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def workshop():
    """Builds tiny models."""
    from tests.loaders.paths_table import Workshop

    return Workshop()


@pytest.fixture
def selected():
    """The options that select this engine, with its layout in force."""
    from vllm.config import WeightTransferConfig

    from nemo_dcr.adapters.vllm.cpu_layout import keep_loader_layout
    from nemo_dcr.adapters.vllm.settings import BACKEND

    keep_loader_layout()
    return {"weight_transfer_config": WeightTransferConfig(backend=BACKEND)}


def after_loading(engine, tensors, version):
    """Load a version densely and run vLLM's own step after loading under the watch."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from nemo_dcr.adapters.vllm.transforms import watching
    from nemo_dcr.testing.refit_outcome import dense_load

    dense_load(engine, tensors, version)
    with engine.at_its_place():
        watching(process_weights_after_loading)(engine.module, engine.config.model_config, torch.device("cpu"))
    return engine


def reachable_bits(engine):
    """Every tensor that the model holds anywhere."""
    from nemo_dcr.adapters.vllm.transforms import reachable_tensors
    from nemo_dcr.bits.tensors import copied_words

    return {path: (tuple(t.shape), copied_words(t).tobytes()) for path, t in reachable_tensors(engine.module)}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("model", ["deepseek_v2", "minicpm3"])
def test_e1_absorbed_matrices_of_a_real_layer_follow_a_refit(model, overwrite, workshop, selected):
    from nemo_dcr.adapters.vllm.forged import Place
    from nemo_dcr.adapters.vllm.transforms import require_loader_layout, transforms_of
    from nemo_dcr.codec.records import choose_encoding
    from nemo_dcr.ids import AttemptId
    from nemo_dcr.receiver.apply import Applier
    from nemo_dcr.receiver.prewarm import prewarm
    from nemo_dcr.testing.refit_outcome import change_items

    _, tensors, old, new = workshop.of(model)
    engine, twin = (
        after_loading(workshop.build(model, Place(), **selected), tensors, version) for version in (old, new)
    )
    require_loader_layout(transforms_of(engine.module))
    before, wanted = reachable_bits(engine), reachable_bits(twin)
    table = prewarm(engine, tensors)
    encodings = {
        name: choose_encoding(overwrite_attempt=overwrite, bits_preserved=True, path=path)
        for name, path in table.classes.items()
    }
    Applier(engine, table).apply(change_items(tensors, old, new, encodings), attempt=AttemptId(1))
    found = reachable_bits(engine)
    assert [path for path in wanted if found.get(path) != wanted[path]] == []
    absorbed = [path for path in found if path.endswith(("W_UV", "W_UK_T"))]
    assert all(before[path] != found[path] for path in absorbed)
    assert absorbed or model == "minicpm3"


@pytest.mark.parametrize(("model", "name"), [("mixtral", "w2_weight"), ("qwen3_moe", "w13_weight")])
def test_e1_weights_that_vllm_repacks_are_refused_where_the_layout_is_not_kept(model, name, workshop):
    from nemo_dcr.adapters.vllm.forged import Place
    from nemo_dcr.adapters.vllm.transforms import require_loader_layout, transforms_of
    from nemo_dcr.errors import UnsupportedLoaderPath

    _, tensors, old, _ = workshop.of(model)
    engine = after_loading(workshop.build(model, Place()), tensors, old)
    found = {transform.name for transform in transforms_of(engine.module)}
    assert any(changed.endswith(name) for changed in found)
    with pytest.raises(UnsupportedLoaderPath, match="LC9"):
        require_loader_layout(transforms_of(engine.module))


UNPROVED = {
    "draft by n-grams": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "a draft model or MTP head",
    ),
    "adapters": ({"enable_lora": True}, "LoRA adapters"),
    "quantized on loading": ({"quantization": "fp8"}, "quantization 'fp8'"),
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    "fronts": ({"_api_process_count": 2}, "several API server processes"),
    "replicas": ({"data_parallel_size": 2}, "data parallelism inside one engine"),
}


@pytest.mark.parametrize("case", UNPROVED)
def test_configurations_that_vllm_accepts_and_nobody_proved_are_refused(case, workshop):
    from vllm.engine.arg_utils import EngineArgs

    from nemo_dcr.adapters.vllm.support import require_supported
    from nemo_dcr.errors import OperatorNeeded

    options, reason = UNPROVED[case]
    common = {"model": str(workshop.of("llama")[0]), "skip_tokenizer_init": True, "dtype": "bfloat16"}
    require_supported(EngineArgs(**common).create_engine_config())
    with pytest.raises(OperatorNeeded, match=reason):
        require_supported(EngineArgs(**common, **options).create_engine_config())


def test_e8_a_quantized_model_is_refused_before_it_is_built(workshop, selected):
    """Building it may end in an error of a kernel, which says nothing about refits."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import base_loader

    from nemo_dcr.adapters.vllm.plugin import register
    from nemo_dcr.errors import OperatorNeeded

    register()
    common = {"model": str(workshop.of("llama")[0]), "skip_tokenizer_init": True, "dtype": "bfloat16"}
    config = EngineArgs(**common, quantization="fp8", **selected).create_engine_config()
    with pytest.raises(OperatorNeeded, match="quantization 'fp8'"):
        base_loader.initialize_model(vllm_config=config)


@pytest.mark.parametrize("equal", [True, False])
def test_b4_a_head_that_vllm_ties_again_is_refused_and_a_different_one_is_exact(equal, tmp_path, selected):
    """The configuration ties the head, the checkpoint carries one; vLLM shares the storage again where they agree."""
    from nemo_dcr.adapters.vllm.checkpoint_table import table_of_directory
    from nemo_dcr.adapters.vllm.forged import ForgedModel, Place
    from nemo_dcr.adapters.vllm.transforms import require_loader_layout, transforms_of
    from nemo_dcr.errors import UnsupportedLoaderPath
    from nemo_dcr.receiver.residents import storage_key
    from tests.engines import tiny
    from tests.loaders.exactness import Rank, two_versions

    directory = tiny.write_checkpoint(tmp_path / "model", tiny.qwen3(tie_word_embeddings=True))
    weights = tiny.read(directory)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone() + (0 if equal else 1)
    tiny.write_tensors(directory, weights)
    tensors = table_of_directory(directory)
    assert "lm_head.weight" in {meta.name for meta in tensors}
    old, new = two_versions(tensors, seed=1, special=False)  # vLLM compares values, and no NaN equals itself
    if equal:
        old["lm_head.weight"] = old["model.embed_tokens.weight"]
    engine = after_loading(ForgedModel(directory, Place(), load_format="auto", **selected), tensors, old)
    assert engine.config.model_config.word_embeddings_untied_by_checkpoint
    parameters = dict(engine.named_parameters(remove_duplicate=False))
    head, embedding = parameters["lm_head.weight"], parameters["model.embed_tokens.weight"]
    assert (storage_key(head) == storage_key(embedding)) == equal
    if equal:
        with pytest.raises(UnsupportedLoaderPath, match=r"lm_head\.weight.*shares the storage"):
            require_loader_layout(transforms_of(engine.module))
        return
    require_loader_layout(transforms_of(engine.module))
    rank = Rank(engine, tensors, old, new)
    assert rank.play(np.random.default_rng(0)).faults == ()
    assert not rank.table.reasons


@pytest.mark.parametrize(
    ("model", "tp", "ep", "rank"),
    [("qwen3_moe", 2, 1, 1), ("qwen3_moe", 1, 4, 2), ("gpt_oss", 2, 1, 1), ("granitemoe", 2, 2, 0)],
)
def test_a15_experts_of_real_models_land_where_a_dense_load_puts_them(model, tp, ep, rank, workshop):
    assert workshop.run(model, tp, ep, ranks=[rank]).verdict == "exact"
