"""The reference engine computes the model: the same logits as transformers, alone and split over ranks."""

from __future__ import annotations

import pytest
import torch

from nemo_dcr.testing.checkpoint import read_checkpoint, read_config
from nemo_dcr.testing.reference_engine import ReferenceEngine
from nemo_dcr.testing.synthetic import synthetic_config, synthetic_tensors, write_checkpoint

TOKENS = torch.tensor([[1, 77, 200, 5, 256, 42, 9], [3, 3, 90, 14, 8, 100, 257]])
MODELS = {
    "tied llama": {},
    "untied llama with biases": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "attention_bias": None},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8},
}


def ranks(config, tensors, tp):
    engines = [ReferenceEngine(config, rank, tp, vocab_padding=100) for rank in range(tp)]
    for engine in engines:
        engine.load_weights(tensors.items())
    return engines


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_logits_equal_those_of_transformers(tmp_path, model):
    from transformers import AutoModelForCausalLM

    config = {k: v for k, v in synthetic_config(dtype="float32", **MODELS[model]).items() if v is not None}
    tensors = synthetic_tensors(config, seed=3)
    reference = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, config, tensors)).eval()
    with torch.inference_mode():
        expected = reference(TOKENS).logits
    found = ranks(config, tensors, 1)[0](TOKENS)
    assert found.shape == expected.shape == (2, 7, 258)
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize(("kv_heads", "tp"), [(2, 2), (2, 6), (3, 3), (3, 6)])
@pytest.mark.parametrize("model", ["tied llama", "untied llama with biases", "qwen3"])
def test_ranks_in_lockstep_compute_the_logits_of_one_rank(in_lockstep, model, kv_heads, tp):
    config = synthetic_config(dtype="float32", **{**MODELS[model], "num_key_value_heads": kv_heads})
    tensors = synthetic_tensors(config, seed=4)
    alone = ranks(config, tensors, 1)[0](TOKENS)
    engines = ranks(config, tensors, tp)
    split = in_lockstep(tp, lambda rank, reduce: engines[rank](TOKENS, reduce))
    for logits in split:
        assert logits.shape == alone.shape
        assert float((logits - alone).abs().max()) < 1e-4 * float(alone.abs().max())


def test_every_layer_and_the_head_take_part_in_the_logits():
    config = synthetic_config(dtype="float32", tie_word_embeddings=False)
    tensors = synthetic_tensors(config, seed=5)
    engine = ranks(config, tensors, 1)[0]
    before = engine(TOKENS)
    for name, tensor in tensors.items():
        engine.load_weights([(name, tensor * 1.5)])
        assert float((engine(TOKENS) - before).abs().max()) > 0, name
        engine.load_weights([(name, tensor)])


def test_greedy_tokens_repeat_the_best_logit():
    config = synthetic_config(dtype="float32")
    engine = ranks(config, synthetic_tensors(config, seed=6), 1)[0]
    first, second = engine.generate([1, 2, 3], 2)
    assert first == int(engine(torch.tensor([[1, 2, 3]]))[0, -1].argmax())
    assert second == int(engine(torch.tensor([[1, 2, 3, first]]))[0, -1].argmax())


def test_split_rank_refuses_to_run_without_a_sum_over_the_ranks():
    with pytest.raises(ValueError, match="reduce"):
        ReferenceEngine(synthetic_config(), 0, 2)(TOKENS)


@pytest.mark.slow
def test_real_checkpoint_gives_the_logits_and_tokens_of_transformers_alone_and_on_three_ranks(smollm2, in_lockstep):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = {**read_config(smollm2), "dtype": "float32"}
    prompt = AutoTokenizer.from_pretrained(smollm2)("The capital of France is").input_ids
    tokens = torch.tensor([prompt])
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(tokens).logits
    greedy = reference.generate(tokens, max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()
    for tp in (1, 3):
        engines = [ReferenceEngine(config, rank, tp) for rank in range(tp)]
        for engine in engines:
            engine.load_weights((meta.name, tensor) for meta, tensor in read_checkpoint(smollm2))
        for logits in in_lockstep(tp, lambda rank, reduce, e=engines: e[rank](tokens, reduce)):
            assert float((logits - expected).abs().max()) < 1e-3 * float(expected.abs().max())
        for found in in_lockstep(tp, lambda rank, reduce, e=engines: e[rank].generate(prompt, 4, reduce)):
            assert found == greedy
