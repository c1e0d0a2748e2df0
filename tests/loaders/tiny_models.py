"""Tiny configurations of architectures of vLLM's registry: small enough for thousands of loads, split by 8 ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 509,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 8, "mamba_d_state": 16, "mamba_d_conv": 4}


@dataclass(frozen=True)
class TinyModel:
    """A configuration; `vocabulary` 512 where the vocabulary is not padded."""

    architecture: str
    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    kind: str = "dense"
    drop: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys that transformers does not write and vLLM reads."""

    @property
    def is_moe(self) -> bool:
        """Its experts can be shared out over ranks."""
        return "moe" in self.kind

    def config(self) -> PreTrainedConfig:
        """As transformers builds it."""
        sizes = {key: value for key, value in SIZES.items() if key not in self.drop}
        config = AutoConfig.for_model(self.model_type, **{**sizes, **self.changes})
        config.architectures = [self.architecture]
        for key, value in self.extra.items():
            setattr(config, key, value)
        return config

    def write(self, directory: Path) -> Path:
        """Make a directory with nothing but `config.json`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.config().save_pretrained(directory)
        return directory


def dense(architecture: str, model_type: str, *, drop: tuple[str, ...] = (), **changes: Any) -> TinyModel:
    return TinyModel(architecture, model_type, changes, "dense", drop)


def moe(architecture: str, model_type: str, *, extra: dict[str, Any] | None = None, **changes: Any) -> TinyModel:
    return TinyModel(architecture, model_type, changes, "moe", extra=extra or {})


def mixed(
    architecture: str,
    model_type: str,
    kind: str,
    *,
    drop: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    **changes: Any,
) -> TinyModel:
    return TinyModel(architecture, model_type, changes, kind, drop, extra or {})


MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
GPT = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 128, "n_inner": 128}
AUDIO = {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 32, "num_attention_heads": 8}
MODELS: dict[str, TinyModel] = {
    "llama": dense("LlamaForCausalLM", "llama"),
    "mistral": dense("MistralForCausalLM", "mistral"),
    "qwen2": dense("Qwen2ForCausalLM", "qwen2", tie_word_embeddings=True),
    "qwen3": dense("Qwen3ForCausalLM", "qwen3", vocab_size=512),
    "gemma": dense("GemmaForCausalLM", "gemma"),
    "gemma2": dense("Gemma2ForCausalLM", "gemma2"),
    "gemma3": dense("Gemma3ForCausalLM", "gemma3_text"),
    "phi": dense("PhiForCausalLM", "phi"),
    "phi3": dense("Phi3ForCausalLM", "phi3"),
    "glm": dense("GlmForCausalLM", "glm"),
    "glm4": dense("Glm4ForCausalLM", "glm4"),
    "granite": dense("GraniteForCausalLM", "granite"),
    "cohere": dense("CohereForCausalLM", "cohere"),
    "cohere2": dense("Cohere2ForCausalLM", "cohere2"),
    "olmo": dense("OlmoForCausalLM", "olmo"),
    "olmo2": dense("Olmo2ForCausalLM", "olmo2"),
    "olmo3": dense("Olmo3ForCausalLM", "olmo3"),
    "stablelm": dense("StableLmForCausalLM", "stablelm"),
    "starcoder2": dense("Starcoder2ForCausalLM", "starcoder2"),
    "gpt2": dense("GPT2LMHeadModel", "gpt2", drop=tuple(SIZES.keys() - {"vocab_size"}), **GPT),
    "gpt_neox": dense("GPTNeoXForCausalLM", "gpt_neox"),
    "gptj": dense("GPTJForCausalLM", "gptj", drop=tuple(SIZES.keys() - {"vocab_size"}), **GPT, rotary_dim=8),
    "gpt_bigcode": dense("GPTBigCodeForCausalLM", "gpt_bigcode", drop=tuple(SIZES.keys() - {"vocab_size"}), **GPT),
    "opt": dense("OPTForCausalLM", "opt", ffn_dim=128, word_embed_proj_dim=64),
    "bloom": dense("BloomForCausalLM", "bloom", n_layer=2, n_head=8),
    "falcon": dense("FalconForCausalLM", "falcon", drop=("head_dim",)),
    "exaone4": dense("Exaone4ForCausalLM", "exaone4"),
    "nemotron": dense("NemotronForCausalLM", "nemotron"),
    "apertus": dense("ApertusForCausalLM", "apertus"),
    "smollm3": dense("SmolLM3ForCausalLM", "smollm3"),
    "seed_oss": dense("SeedOssForCausalLM", "seed_oss"),
    "ernie4_5": dense("Ernie4_5ForCausalLM", "ernie4_5"),
    "arcee": dense("ArceeForCausalLM", "arcee"),
    "hunyuan": dense("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "persimmon": dense("PersimmonForCausalLM", "persimmon"),
    "minicpm3": mixed("MiniCPM3ForCausalLM", "minicpm3", "mla", q_lora_rank=16, kv_lora_rank=16),
    "mixtral": moe("MixtralForCausalLM", "mixtral", **LOCAL_EXPERTS),
    "qwen2_moe": moe("Qwen2MoeForCausalLM", "qwen2_moe", **EXPERTS, shared_expert_intermediate_size=64),
    "qwen3_moe": moe("Qwen3MoeForCausalLM", "qwen3_moe", **EXPERTS),
    "olmoe": moe("OlmoeForCausalLM", "olmoe", num_experts=8, num_experts_per_tok=2),
    "phimoe": moe("PhiMoEForCausalLM", "phimoe", **LOCAL_EXPERTS, attention_bias=True, lm_head_bias=True),
    "granitemoe": moe("GraniteMoeForCausalLM", "granitemoe", **LOCAL_EXPERTS),
    "granitemoeshared": moe(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", **LOCAL_EXPERTS, shared_intermediate_size=64
    ),
    "gpt_oss": moe(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=256,
        num_hidden_layers=1,
        num_key_value_heads=8,
    ),
    "deepseek_v2": mixed("DeepseekV2ForCausalLM", "deepseek_v2", "mla, moe", **MLA),
    "deepseek_v3": mixed("DeepseekV3ForCausalLM", "deepseek_v3", "mla, moe", **MLA, extra={"topk_method": "noaux_tc"}),
    "glm4_moe": moe(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "ernie4_5_moe": moe(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        moe_num_experts=8,
        moe_k=2,
        moe_intermediate_size=64,
        moe_layer_start_index=1,
    ),
    "dots1": moe(
        "Dots1ForCausalLM",
        "dots1",
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "flex_olmo": moe("FlexOlmoForCausalLM", "flex_olmo", num_experts=8, num_experts_per_tok=2),
    "hunyuan_moe": moe("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", num_experts=8, moe_topk=2),
    "minimax_m2": moe(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        **LOCAL_EXPERTS,
        extra={"rotary_dim": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "qwen3_next": mixed(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        "linear attention, moe",
        **EXPERTS,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        num_hidden_layers=4,
    ),
    "nemotron_h": mixed(
        "NemotronHForCausalLM",
        "nemotron_h",
        "mamba hybrid",
        drop=("num_hidden_layers",),
        hybrid_override_pattern="M*M-",
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=8,
        ssm_state_size=16,
    ),
    "mamba": mixed("MambaForCausalLM", "mamba", "mamba", state_size=16, time_step_rank=8),
    "falcon_mamba": mixed("FalconMambaForCausalLM", "falcon_mamba", "mamba", state_size=16, time_step_rank=8),
    "mamba2": mixed(
        "Mamba2ForCausalLM", "mamba2", "mamba", num_heads=16, head_dim=8, n_groups=8, state_size=16, expand=2
    ),
    "falcon_h1": mixed("FalconH1ForCausalLM", "falcon_h1", "mamba hybrid", **MAMBA2, mamba_d_ssm=128),
    "granitemoehybrid": mixed(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        "mamba hybrid, moe",
        **LOCAL_EXPERTS,
        **MAMBA2,
        shared_intermediate_size=64,
        layer_types=["mamba", "attention"],
    ),
    "jamba": mixed(
        "JambaForCausalLM",
        "jamba",
        "mamba hybrid, moe",
        num_experts=8,
        num_experts_per_tok=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=8,
        mamba_d_state=16,
    ),
    "zamba2": mixed(
        "Zamba2ForCausalLM",
        "zamba2",
        "mamba hybrid",
        drop=("head_dim",),
        num_hidden_layers=4,
        hybrid_layer_ids=[1, 3],
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
        num_mem_blocks=1,
        num_key_value_heads=8,
        mamba_ngroups=8,
        n_mamba_heads=8,
        mamba_headdim=16,
        adapter_rank=8,
    ),
    "lfm2": mixed(
        "Lfm2ForCausalLM",
        "lfm2",
        "convolution hybrid",
        layer_types=["conv", "full_attention"],
        extra={
            "conv_dim": 64,
            "conv_dim_out": 64,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 8,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
        },
    ),
    "lfm2_moe": mixed(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        "convolution hybrid, moe",
        **EXPERTS,
        layer_types=["conv", "full_attention"],
        num_dense_layers=1,
        extra={"conv_dim": 64, "conv_dim_out": 64},
    ),
    "glm4_moe_lite": mixed("Glm4MoeLiteForCausalLM", "glm4_moe_lite", "mla, moe", **MLA),
    "exaone_moe": moe(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        **EXPERTS,
        num_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        is_moe_layer=[False, True],
        layer_types=["sliding_attention", "full_attention"],
    ),
    "llava": mixed(
        "LlavaForConditionalGeneration",
        "llava",
        "multimodal",
        drop=tuple(SIZES),
        text_config={**SIZES, "model_type": "llama"},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 64,
        },
    ),
    "qwen2_audio": mixed(
        "Qwen2AudioForConditionalGeneration",
        "qwen2_audio",
        "multimodal",
        drop=tuple(SIZES),
        text_config={**SIZES, "model_type": "qwen2"},
        audio_config={**AUDIO, "encoder_attention_heads": 8, "encoder_ffn_dim": 128, "encoder_layers": 2},
    ),
    "granite_speech": mixed(
        "GraniteSpeechForConditionalGeneration",
        "granite_speech",
        "multimodal",
        drop=tuple(SIZES),
        text_config={**SIZES, "model_type": "granite"},
        encoder_config={"hidden_dim": 64, "num_layers": 2, "num_heads": 8, "dim_head": 8, "output_dim": 16},
        projector_config={
            "model_type": "blip_2_qformer",
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
            "encoder_hidden_size": 64,
        },
    ),
}
