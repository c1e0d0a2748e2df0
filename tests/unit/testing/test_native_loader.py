"""The reference engine's storage: what each rank holds after a load, and how the loader writes it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words, integer_view
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.testing.llama_config import LlamaShape
from nemo_dcr.testing.reference_engine import ReferenceEngine
from nemo_dcr.testing.synthetic import synthetic_config, synthetic_tensors

SPLITS = [(2, 1), (2, 2), (2, 6), (3, 3), (3, 6), (6, 3)]
"""(KV heads, ranks): KV heads split, whole, and replicated on two or three ranks."""


def loaded(config, tensors, rank=0, tp=1, padding=100):
    engine = ReferenceEngine(config, rank, tp, vocab_padding=padding)
    for parameter in engine.parameters():
        integer_view(parameter).fill_(0x55)
    return engine, engine.load_weights(tensors.items())


def words(tensor):
    return copied_words(tensor).reshape(tuple(tensor.shape))


def rank_rows(array, rank, tp, heads=None, head_dim=4):
    """Rows of one rank by numpy alone; `heads` is the number of KV heads where ranks may share them."""
    if heads is not None and tp > heads:
        head = rank * heads // tp
        return array[head * head_dim : (head + 1) * head_dim]
    return np.split(array, tp)[rank]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(("kv_heads", "tp"), SPLITS)
def test_every_rank_holds_its_slices_of_the_checkpoint_bit_for_bit(kv_heads, tp, dtype):
    config = synthetic_config(num_key_value_heads=kv_heads, attention_bias=True, mlp_bias=True, dtype=dtype)
    tensors = synthetic_tensors(config, random_bits=True)
    source = {name: words(tensor) for name, tensor in tensors.items()}
    for rank in range(tp):
        engine, _ = loaded(config, tensors, rank, tp)
        held = {name: words(p) for name, p in engine.named_parameters(remove_duplicate=False)}
        expected = {}
        for i in range(2):
            at = f"model.layers.{i}."
            for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                expected[at + norm] = source[at + norm]
            for kind in ("weight", "bias"):
                q = rank_rows(source[f"{at}self_attn.q_proj.{kind}"], rank, tp)
                k = rank_rows(source[f"{at}self_attn.k_proj.{kind}"], rank, tp, kv_heads)
                v = rank_rows(source[f"{at}self_attn.v_proj.{kind}"], rank, tp, kv_heads)
                expected[f"{at}self_attn.qkv_proj.{kind}"] = np.concatenate([q, k, v])
                both = [rank_rows(source[f"{at}mlp.{part}_proj.{kind}"], rank, tp) for part in ("gate", "up")]
                expected[f"{at}mlp.gate_up_proj.{kind}"] = np.concatenate(both)
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                expected[f"{at}{name}.weight"] = np.split(source[f"{at}{name}.weight"], tp, axis=1)[rank]
                expected[f"{at}{name}.bias"] = source[f"{at}{name}.bias"]
        table = source["model.embed_tokens.weight"]
        padded = np.zeros((engine.shape.padded_vocab, table.shape[1]), table.dtype)
        padded[: len(table)] = table
        expected["model.norm.weight"] = source["model.norm.weight"]
        expected["model.embed_tokens.weight"] = expected["lm_head.weight"] = np.split(padded, tp)[rank]
        assert held.keys() == expected.keys()
        assert [n for n in held if held[n].shape != expected[n].shape] == []
        assert [n for n in held if not equal_words(held[n].reshape(-1), expected[n].reshape(-1))] == []


@pytest.mark.parametrize(("tp", "padding", "padded"), [(1, 1000, 1000), (3, 1000, 3000), (2, 64, 320), (3, 1, 258)])
def test_vocabulary_is_padded_to_a_multiple_that_the_ranks_can_share(tp, padding, padded):
    shape = LlamaShape.of(
        synthetic_config(num_key_value_heads=3 if tp == 3 else 2), rank=0, tp=tp, vocab_padding=padding
    )
    assert shape.padded_vocab == padded


class Writes(TorchDispatchMode):
    """Records every operator whose schema writes into storage of the engine."""

    def __init__(self, engine):
        super().__init__()
        self.live = {p.untyped_storage().data_ptr() for p in engine.parameters()}
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and value.untyped_storage().data_ptr() in self.live:
                self.seen.append((func.overloadpacket.__name__, value, args[1]))
        return func(*args, **kwargs)


@pytest.mark.parametrize("tp", [1, 2, 6])
def test_loader_writes_only_copies_of_source_views_and_zeroed_pad_rows(tp):
    config = synthetic_config()
    tensors = synthetic_tensors(config)
    sources = {t.untyped_storage().data_ptr() for t in tensors.values()}
    for rank in range(tp):
        engine = ReferenceEngine(config, rank, tp, vocab_padding=100)
        with Writes(engine) as writes:
            engine.load_weights(tensors.items())
        copies = [entry for entry in writes.seen if entry[0] == "copy_"]
        fills = [entry for entry in writes.seen if entry[0] == "fill_"]
        assert len(copies) + len(fills) == len(writes.seen)
        assert len(copies) == len(tensors)
        assert all(source.untyped_storage().data_ptr() in sources for _, _, source in copies)
        owns_padding = (rank + 1) * engine.lm_head.rows > config["vocab_size"]
        assert len(fills) == owns_padding
        assert all(target.numel() > 0 and value == 0 for _, target, value in fills)


def test_rank_of_pad_rows_alone_is_zeroed_and_reported():
    config = synthetic_config()
    engine, names = loaded(config, synthetic_tensors(config, random_bits=True), rank=5, tp=6, padding=500)
    assert engine.lm_head.first >= config["vocab_size"]
    assert "model.embed_tokens.weight" in names
    assert not words(engine.lm_head.weight).any()


def test_load_keeps_every_address_and_repeats_to_the_same_bits():
    config = synthetic_config()
    engine, _ = loaded(config, synthetic_tensors(config, seed=1, random_bits=True), 1, 2)
    addresses = {name: p.data_ptr() for name, p in engine.named_parameters(remove_duplicate=False)}
    engine.load_weights(synthetic_tensors(config, seed=2, random_bits=True).items())
    fresh, _ = loaded(config, synthetic_tensors(config, seed=2, random_bits=True), 1, 2)
    assert addresses == {name: p.data_ptr() for name, p in engine.named_parameters(remove_duplicate=False)}
    for (name, left), (_, right) in zip(engine.named_parameters(), fresh.named_parameters(), strict=True):
        assert equal_words(copied_words(left), copied_words(right)), name


def test_loader_consumes_each_tensor_before_it_asks_for_the_next():
    config = synthetic_config(tie_word_embeddings=False)
    tensors = synthetic_tensors(config, random_bits=True)
    scratch = torch.empty(max(t.numel() for t in tensors.values()), dtype=torch.bfloat16)

    def through_one_buffer():
        for name, tensor in tensors.items():
            view = scratch[: tensor.numel()].view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            integer_view(scratch).fill_(0x1234)

    engine = ReferenceEngine(config, 0, 1)
    engine.load_weights(through_one_buffer())
    whole, _ = loaded(config, tensors, padding=1000)
    for (name, left), (_, right) in zip(engine.named_parameters(), whole.named_parameters(), strict=True):
        assert equal_words(copied_words(left), copied_words(right)), name


def test_tied_head_is_one_parameter_under_two_names_and_its_tensor_is_skipped():
    config = synthetic_config()
    engine, names = loaded(config, synthetic_tensors(config))
    assert engine.lm_head.weight is engine.model.embed_tokens.weight
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= dict(
        engine.named_parameters(remove_duplicate=False)
    ).keys()
    assert "lm_head.weight" not in names
    before = copied_words(engine.lm_head.weight)
    assert engine.load_weights([("lm_head.weight", torch.zeros(258, 24))]) == set()
    assert equal_words(before, copied_words(engine.lm_head.weight))


def test_untied_head_has_storage_of_its_own():
    config = synthetic_config(tie_word_embeddings=False)
    tensors = synthetic_tensors(config)
    engine, names = loaded(config, tensors)
    assert "lm_head.weight" in names
    assert engine.lm_head.weight.data_ptr() != engine.model.embed_tokens.weight.data_ptr()
    assert equal_words(copied_words(engine.lm_head.weight[:258]), copied_words(tensors["lm_head.weight"]))


def test_report_names_the_written_parameters_only():
    config = synthetic_config()
    tensors = synthetic_tensors(config)
    engine, names = loaded(config, tensors)
    assert names == set(dict(engine.named_parameters()))
    one = "model.layers.1.self_attn.k_proj.weight"
    assert engine.load_weights([(one, tensors[one])]) == {"model.layers.1.self_attn.qkv_proj.weight"}


def test_wider_parameters_take_checkpoint_values_through_a_cast():
    tensors = synthetic_tensors(synthetic_config())
    engine, _ = loaded(synthetic_config(dtype="float32"), tensors)
    name = "model.layers.0.mlp.down_proj.weight"
    assert equal_words(copied_words(dict(engine.named_parameters())[name]), copied_words(tensors[name].float()))


def test_rotary_buffers_are_fp32_not_persistent_and_equal_on_every_rank():
    engines = [ReferenceEngine(synthetic_config(), rank, 2) for rank in range(2)]
    buffers = [dict(engine.named_buffers(remove_duplicate=False)) for engine in engines]
    assert buffers[0].keys() == {"model.rotary_emb.inv_freq", "model.rotary_emb.cos_sin_cache"}
    assert all(buffer.dtype is torch.float32 for buffer in buffers[0].values())
    assert not [name for name in engines[0].state_dict() if "rotary" in name]
    assert all(equal_words(copied_words(buffers[0][name]), copied_words(buffers[1][name])) for name in buffers[0])


def test_parameters_and_storage_have_the_checkpoint_dtype_and_no_gradient():
    engine = ReferenceEngine(synthetic_config(dtype="float16"), 0, 1)
    assert {(p.dtype, p.requires_grad) for p in engine.parameters()} == {(torch.float16, False)}


@pytest.mark.parametrize("name", ["model.layers.9.input_layernorm.weight", "visual.patch.weight"])
def test_tensor_without_a_place_is_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        ReferenceEngine(synthetic_config(), 0, 1).load_weights([(name, torch.zeros(24))])


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_tensor_of_another_shape_is_refused(name):
    with pytest.raises(ValueError, match=r"cannot load shape|vocabulary rows"):
        ReferenceEngine(synthetic_config(), 0, 1).load_weights([(name, torch.zeros(1, 24))])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "gpt2"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("quantization_config", {"bits": 4}),
        ("sliding_window", 128),
        ("dtype", "float8_e4m3fn"),
        ("hidden_size", None),
        ("vocab_size", 0),
        ("head_dim", 5),
        ("num_key_value_heads", 4),
    ],
)
def test_unsupported_configuration_is_refused_by_field(field, value):
    with pytest.raises(InvalidConfig, match=field):
        ReferenceEngine(synthetic_config(**{field: value}), 0, 1)


def test_rotary_scaling_is_refused_in_both_spellings():
    for rope in (
        {"rope_parameters": {"rope_type": "llama3"}},
        {"rope_parameters": None, "rope_scaling": {"type": "yarn"}},
    ):
        with pytest.raises(InvalidConfig, match="no rotary scaling"):
            ReferenceEngine(synthetic_config(**rope), 0, 1)


@pytest.mark.parametrize(
    ("kv_heads", "rank", "tp"), [(2, 0, 4), (2, 0, 3), (3, 0, 2), (2, 2, 2), (2, -1, 2), (6, 0, 9)]
)
def test_split_that_the_heads_do_not_allow_is_refused(kv_heads, rank, tp):
    with pytest.raises(InvalidConfig):
        ReferenceEngine(synthetic_config(num_key_value_heads=kv_heads), rank, tp)


def test_old_spelling_of_rotary_base_and_dtype_is_read():
    config = synthetic_config(rope_theta=5000.0, torch_dtype="torch.float16", rope_parameters=None)
    del config["dtype"]
    shape = LlamaShape.of(config, rank=0, tp=1, vocab_padding=1)
    assert (shape.rope_theta, shape.dtype) == (5000.0, torch.float16)
