"""Which of Bridge's real mapping objects are index maps: their classes, what was replaced, the share of the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.bridge.models.conversion import param_mapping
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ColumnParallelMapping,
    ConcatenatedQKVMapping,
    DirectMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    KVMapping,
    MambaConv1dMapping,
    MambaInProjMapping,
    QKVMapping,
    ReplicatedMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
    RowParallelMapping,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import Qwen3MoeConfig

from nemo_dcr.adapters.megatron.mappings import Held, describe
from nemo_dcr.adapters.megatron.source import MegatronSource, megatron_source
from nemo_dcr.adapters.megatron.verification import check_exports
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.classes import Handling, MappingClass
from nemo_dcr.source.exchange import GroupExchange, LoneExchange
from nemo_dcr.source.piecewise import IndexMap
from nemo_dcr.testing.paper_models import qwen3_30b_a3b
from tests.megatron.refit import Case, refit
from tests.megatron.tiny import BRIDGES, checkpoint
from tests.megatron.trainer import Checkpoint, Layout, build, run_ranks

pytestmark = pytest.mark.megatron
HIDDEN = 8


def meta(name: str, *shape: int) -> TensorMeta:
    return TensorMeta(name, shape, "BF16")


def described(mapping: Any, module: Any, shape: tuple[int, ...], *tensors: TensorMeta) -> Any:
    return describe(Held(mapping, module, shape, {tensor.name: tensor for tensor in tensors}))


# ------------------------------------------------------------------------------------------- the paper's checkpoint


def classify_whole(store: Any) -> None:
    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, intermediate_size=6144, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        decoder_sparse_step=1, tie_word_embeddings=False, dtype="bfloat16", architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    bridge = BRIDGES["mixture"]()
    options = {"init_model_with_meta_device": True, "perform_initialization": False}
    models = build(bridge, Checkpoint(config, {}), Layout(), **options)
    rows = sorted(qwen3_30b_a3b(), key=lambda row: row.tensor)
    tensors = [row.tensor for row in rows]
    for mapping, share in (("paper", 3.69), ("extended", 0.0)):
        source = megatron_source(bridge, models, config, tensors, LoneExchange(), mapping=mapping, verify=False)
        print(f"Qwen3-30B-A3B under {mapping} classes\n{source.summary()}")
        assert list(source.classified.rows) == rows
        assert source.residual_share <= 0.04
        assert round(100 * source.residual_share, 2) == share
        held = sum(task.map.domain for task in source.affine)
        mapped = [*source.classified.of(Handling.AFFINE), *source.classified.of(Handling.PIECEWISE)]
        assert held == sum(row.tensor.numel for row in mapped)
    del store


def test_real_mapping_objects_of_qwen3_30b_a3b_classify_as_the_table_does() -> None:
    run_ranks(Layout(), classify_whole)


# ------------------------------------------------------------------------------------ every class that has a map


def every_map_is_what_the_export_does(store: Any) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, kv_channels=2,
        mamba_num_heads=4, mamba_head_dim=2, mamba_num_groups=2, mamba_state_dim=4, tensor_model_parallel_size=2,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, params_dtype=torch.bfloat16,
    )  # fmt: skip
    for name in ("linear_key_head_dim", "linear_num_key_heads", "linear_value_head_dim"):
        setattr(config, name, 2)
    config.linear_num_value_heads = 4
    held = [
        (ColumnParallelMapping("a", "a"), (3, 5), [meta("a", 6, 5)], MappingClass.COLUMN),
        (ColumnParallelMapping("output_layer.weight", "v"), (4, 5), [meta("v", 7, 5)], MappingClass.PADDED),
        (RowParallelMapping("b", "b"), (6, 5), [meta("b", 6, 10)], MappingClass.ROW),
        (RowParallelMapping("b1", "b1"), (6,), [meta("b1", 6)], MappingClass.REPLICATED),
        (ReplicatedMapping("c", "c"), (5,), [meta("c", 5)], MappingClass.REPLICATED),
        (DirectMapping("d", "d"), (5, 2), [meta("d", 5, 2)], MappingClass.REPLICATED),
        (AutoMapping("e", "e"), (3, HIDDEN), [meta("e", 6, HIDDEN)], MappingClass.COLUMN),
        (AutoMapping("f", "f", (1, 0)), (3, HIDDEN), [meta("f", HIDDEN, 6)], MappingClass.PERMUTED),
        (GatedMLPMapping("g", "gate", "up"), (6, 4), [meta("gate", 6, 4), meta("up", 6, 4)], MappingClass.SLICE),
        (
            QKVMapping("h", "q", "k", "v"),
            (8, HIDDEN),
            [meta("q", 8, HIDDEN), meta("k", 4, HIDDEN), meta("v", 4, HIDDEN)],
            MappingClass.QKV,
        ),
        (QKVMapping("i", "q", "k", "v"), (8,), [meta("q", 8), meta("k", 4), meta("v", 4)], MappingClass.QKV),
        (KVMapping("j", "k", "v"), (4, HIDDEN), [meta("k", 4, HIDDEN), meta("v", 4, HIDDEN)], MappingClass.QKV),
        (ConcatenatedQKVMapping("k", "qkv"), (8, HIDDEN), [meta("qkv", 16, HIDDEN)], MappingClass.QKV),
        (MambaInProjMapping("l", "in"), (18, HIDDEN), [meta("in", 36, HIDDEN)], MappingClass.SECTIONS),
        (MambaConv1dMapping("m.weight", "conv"), (12, 1, 4), [meta("conv", 24, 1, 4)], MappingClass.SECTIONS),
        (MambaConv1dMapping("m.bias", "bias"), (12,), [meta("bias", 24)], MappingClass.SECTIONS),
        (GDNConv1dMapping("n.weight", "gdn"), (8, 1, 4), [meta("gdn", 16, 1, 4)], MappingClass.SECTIONS),
    ]
    module = ColumnParallelLinear(
        HIDDEN, 6, config=config, init_method=torch.nn.init.ones_, bias=False, skip_bias_add=True
    )
    covered = set()
    for mapping, shape, tensors, wanted in held:
        found = described(mapping, module, shape, *tensors)
        assert found.mapping is wanted, (mapping.megatron_param, found)
        task = SimpleNamespace(mapping=mapping, megatron_module=module, param_weight=module.weight)
        names = check_exports([(task, found.map)], {tensor.name: tensor for tensor in tensors})
        assert names == tuple(sorted(tensor.name for tensor in tensors))
        covered.add(type(mapping).__name__)
    from nemo_dcr.adapters.megatron.mappings import LAYOUTS

    assert covered == set(LAYOUTS), "a class with a map has no check"
    row = RowParallelLinear(
        10, 6, config=config, init_method=torch.nn.init.ones_, bias=False, input_is_parallel=True, skip_bias_add=True
    )
    auto = AutoMapping("o", "o")
    found = described(auto, row, (6, 5), meta("o", 6, 10))
    assert found.mapping is MappingClass.ROW
    check_exports(
        [(SimpleNamespace(mapping=auto, megatron_module=row, param_weight=row.weight), found.map)],
        {"o": meta("o", 6, 10)},
    )
    del store


def test_map_of_every_class_is_what_its_export_does_on_two_ranks() -> None:
    run_ranks(Layout(tensor=2), every_map_is_what_the_export_does)


# -------------------------------------------------------------------------------------------------- never a guess


class Overridden(ColumnParallelMapping):
    """Looks like Bridge's class, is not."""


def test_subclass_of_a_known_class_is_unknown() -> None:
    found = described(Overridden("a", "a"), torch.nn.Linear(5, 6), (6, 5), meta("a", 6, 5))
    assert (found.mapping, found.map) == (MappingClass.UNKNOWN, None)
    assert "none of Bridge's own classes" in found.reason


def test_foreign_class_under_the_name_of_a_known_one_is_unknown() -> None:
    impostor = type("ColumnParallelMapping", (ColumnParallelMapping,), {})
    found = described(impostor("a", "a"), torch.nn.Linear(5, 6), (6, 5), meta("a", 6, 5))
    assert found.mapping is MappingClass.UNKNOWN


def test_object_whose_export_was_replaced_is_unknown() -> None:
    mapping = ColumnParallelMapping("a", "a")
    assert described(mapping, None, (6, 5), meta("a", 6, 5)).mapping is MappingClass.COLUMN
    mapping.megatron_to_hf = lambda weights, module: {"a": weights * 2}
    found = described(mapping, None, (6, 5), meta("a", 6, 5))
    assert (found.mapping, found.reason) == (
        MappingClass.UNKNOWN,
        "megatron_to_hf of ColumnParallelMapping was replaced",
    )


@pytest.mark.parametrize("owner", [ColumnParallelMapping, param_mapping.MegatronParamMapping])
def test_class_whose_method_was_replaced_is_unknown(monkeypatch: pytest.MonkeyPatch, owner: type[Any]) -> None:
    monkeypatch.setattr(owner, "gather_from_tp_ranks", lambda self, tensor: [tensor + 1])
    found = described(ColumnParallelMapping("a", "a"), None, (6, 5), meta("a", 6, 5))
    assert "gather_from_tp_ranks" in found.reason
    assert found.mapping is MappingClass.UNKNOWN


def test_object_with_a_foreign_object_inside_is_unknown() -> None:
    mapping = MambaInProjMapping("a", "a")
    mapping._tp_mapping = Overridden("a", "a")
    assert described(mapping, None, (6, 5), meta("a", 6, 5)).mapping is MappingClass.UNKNOWN


def test_object_that_asks_for_the_grouped_export_is_unknown() -> None:
    mapping = ColumnParallelMapping("a", "a")
    mapping.is_grouped_export = True
    assert described(mapping, None, (6, 5), meta("a", 6, 5)).mapping is MappingClass.UNKNOWN


def test_classes_that_compute_say_why() -> None:
    norm = RMSNorm2ZeroCenteredRMSNormMapping("a", "a")
    assert described(norm, torch.nn.LayerNorm(5), (5,), meta("a", 5)).mapping is MappingClass.COMPUTED
    experts = FusedExpertMapping("experts.linear_fc2.weight0", "a")
    assert "gathers the experts" in described(experts, None, (5, 4), meta("a", 3, 5, 4)).reason


def test_parameter_of_another_shape_and_module_of_an_unknown_class_are_unknown() -> None:
    found = described(ColumnParallelMapping("a", "a"), None, (5, 5), meta("a", 6, 5))
    assert (found.mapping, found.reason) == (
        MappingClass.UNKNOWN,
        "ColumnParallelMapping gives shape (6, 5), the parameter has (5, 5)",
    )
    found = described(AutoMapping("a", "a"), torch.nn.Bilinear(2, 2, 2), (6, 5), meta("a", 6, 5))
    assert "Cannot determine parallelism type" in found.reason


class Doubled(ReplicatedMapping):
    """A checkpoint that holds twice the value: exact in BF16, and no movement of elements."""

    def hf_to_megatron(self, hf_weights: torch.Tensor, megatron_module: Any) -> torch.Tensor:
        return super().hf_to_megatron(hf_weights / 2, megatron_module)

    def megatron_to_hf(self, megatron_weights: Any, megatron_module: Any) -> dict[str, torch.Tensor]:
        return {name: value * 2 for name, value in super().megatron_to_hf(megatron_weights, megatron_module).items()}


class DoublingBridge(BRIDGES["dense"]):  # type: ignore[misc]
    """Its final norm is doubled."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        known = [each for each in super().mapping_registry() if "final_layernorm" not in each.megatron_param]
        return MegatronMappingRegistry(*known, Doubled("decoder.final_layernorm.weight", "model.norm.weight"))


class HookedBridge(BRIDGES["mixture"]):  # type: ignore[misc]
    """Its export negates one kind of tensor in a hook of the bridge."""

    def maybe_modify_converted_hf_weight(self, task: Any, converted_weights_dict: Any, hf_state_dict: Any) -> Any:
        return {name: -value if "gate.weight" in name else value for name, value in converted_weights_dict.items()}

    def maybe_modify_loaded_hf_weight(self, hf_param: Any, hf_state_dict: Any) -> Any:
        loaded = super().maybe_modify_loaded_hf_weight(hf_param, hf_state_dict)
        return -loaded if "gate.weight" in str(hf_param) else loaded


class StackedBridge(BRIDGES["mixture"]):  # type: ignore[misc]
    """A checkpoint whose experts are one tensor of three axes, as transformers 5 holds them."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        known = [each for each in super().mapping_registry() if ".experts." not in each.megatron_param]
        local, stacked = "decoder.layers.*.mlp.experts.local_experts.*.", "model.layers.*.mlp.experts."
        return MegatronMappingRegistry(
            *known,
            FusedGatedExpertMapping(f"{local}linear_fc1.weight", f"{stacked}gate_up_proj"),
            FusedExpertMapping(f"{local}linear_fc2.weight", f"{stacked}down_proj"),
        )


def experts_are_residual(source: MegatronSource) -> None:
    names = {row.tensor.name.rpartition(".")[2] for row in source.classified.of(Handling.RESIDUAL)}
    assert names == {"gate_up_proj", "down_proj"}
    assert len(source.residual) == 4


def test_stacked_experts_are_converted_together_and_exact() -> None:
    case = Case("mixture", Layout(expert=2, data=2), bridge=StackedBridge)
    run_ranks(case.layout, refit, case, checkpoint("mixture", stacked=True), experts_are_residual)


def norm_is_residual(source: MegatronSource) -> None:
    assert [row.tensor.name for row in source.classified.of(Handling.RESIDUAL)] == ["model.norm.weight"]
    assert "Doubled is none of Bridge's own classes" in source.reasons["model.norm.weight"]


def all_is_residual(source: MegatronSource) -> None:
    assert source.affine == ()
    assert source.residual_share == 1.0
    assert set(source.reasons.values()) == {"the bridge has its own maybe_modify_converted_hf_weight"}


def test_mapping_class_of_a_user_is_converted_and_exact() -> None:
    case = Case("dense", Layout(tensor=2), bridge=DoublingBridge)
    run_ranks(case.layout, refit, case, checkpoint("dense"), norm_is_residual)


def test_bridge_with_a_hook_converts_everything_and_is_exact() -> None:
    case = Case("mixture", Layout(expert=2, data=2), bridge=HookedBridge)
    run_ranks(case.layout, refit, case, checkpoint("mixture", num_hidden_layers=1), all_is_residual)


def trained_beside(store: Any) -> None:
    given = checkpoint("dense", num_hidden_layers=1)
    bridge = BRIDGES["dense"]()
    (model,) = build(bridge, given, Layout())
    model.decoder.register_parameter("adapter", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    tensors = [meta(name, *value.shape) for name, value in given.tensors.items()]
    with pytest.raises(UnsupportedMapping, match=r"decoder\.adapter.*it is trained and Bridge maps it to no tensor"):
        megatron_source(bridge, model, given, tensors, GroupExchange(store))


def test_trained_parameter_that_bridge_does_not_map_is_refused() -> None:
    run_ranks(Layout(), trained_beside)


def test_labels_of_a_wrong_map_do_not_pass() -> None:
    tensor = meta("a", 4, 3)
    mapping = ColumnParallelMapping("a", "a")
    task = SimpleNamespace(mapping=mapping, megatron_module=None, param_weight=torch.zeros(4, 3))
    right = described(mapping, None, (4, 3), tensor).map
    assert check_exports([(task, right)], {"a": tensor}) == ("a",)
    wrong = IndexMap.concatenate([right.narrow(0, 2, 2), right.narrow(0, 0, 2)], 0)
    with pytest.raises(UnsupportedMapping, match="Bridge's export puts other elements at 12 of its 12 places"):
        check_exports([(task, wrong)], {"a": tensor})
    with pytest.raises(UnsupportedMapping, match="the checkpoint lacks it"):
        check_exports([(task, right)], {})
