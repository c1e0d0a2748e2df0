"""The paper's two checkpoints as tables of canonical tensors and mapping classes: geometry only, no weights.

Qwen3-30B-A3B is what its public configuration says. Nemotron-3-Ultra-550B-A55B is derived, because its configuration
was not at hand. The paper's counts leave one inventory of the smaller public models of that family:

- 50,176 routed up and down projections are 2 x 512 experts x 49 mixture layers;
- 183 residual tensors beside embedding and head are 3 for each Mamba layer (input projection, convolution and its bias)
  and 3 for each attention layer (query, key, value): 61 layers, 48 and 13;
- 662 other affine tensors are 6 for each Mamba layer, 2 for each attention layer, 7 for each mixture layer, the final
  norm, and 4 of multi-token prediction, whose block has one attention and one mixture layer;
- 257 of them split: the output projections of Mamba and attention, and 4 for each mixture layer (shared experts and
  latent projections);
- sizes are those at which bytes come out at 1,121 GB with 3.01% residual: hidden 8,192, vocabulary 131,072, latent
  2,048, experts of 5,120, shared experts of 10,240, 256 Mamba heads of 64, 8 groups of state 128, 64 query heads of 128
  with 2 key-value heads.

Names of tensors follow the public checkpoints of the families.

Paper: Tables D.1 and D.2; Section 5 (baseline memory)
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.source.classes import Degree, MappedTensor, MappingClass


def qwen3_30b_a3b() -> tuple[MappedTensor, ...]:
    """The 18,867 canonical tensors of Qwen3-30B-A3B."""
    hidden, vocabulary, head, inner, experts = 2048, 151936, 128, 768, 128
    rows = [
        _row("model.embed_tokens.weight", (vocabulary, hidden), MappingClass.PADDED),
        _row("lm_head.weight", (vocabulary, hidden), MappingClass.PADDED),
        _row("model.norm.weight", (hidden,), MappingClass.REPLICATED),
    ]
    for layer in range(48):
        at = f"model.layers.{layer}."
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden)):
            rows.append(_row(f"{at}{norm}.weight", (size,), MappingClass.REPLICATED))
        for norm in ("q_norm", "k_norm"):
            rows.append(_row(f"{at}self_attn.{norm}.weight", (head,), MappingClass.REPLICATED))
        for kind, heads in (("q", 32), ("k", 4), ("v", 4)):
            rows.append(_row(f"{at}self_attn.{kind}_proj.weight", (heads * head, hidden), MappingClass.QKV))
        rows.append(_row(f"{at}self_attn.o_proj.weight", (hidden, 32 * head), MappingClass.ROW))
        rows.append(_row(f"{at}mlp.gate.weight", (experts, hidden), MappingClass.REPLICATED))
        for expert in range(experts):
            of = f"{at}mlp.experts.{expert}."
            rows += [
                _row(f"{of}{kind}_proj.weight", (inner, hidden), MappingClass.SLICE, Degree.EXPERT_TENSOR)
                for kind in ("gate", "up")
            ]
            rows.append(_row(f"{of}down_proj.weight", (hidden, inner), MappingClass.ROW, Degree.EXPERT_TENSOR))
    return tuple(rows)


HIDDEN, VOCABULARY, LATENT = 8192, 131072, 2048
EXPERTS, EXPERT_INNER, SHARED_INNER = 512, 5120, 10240
MAMBA_HEADS, MAMBA_HEAD, MAMBA_GROUPS, MAMBA_STATE, KERNEL = 256, 64, 8, 128, 4
HEADS, KV_HEADS, HEAD = 64, 2, 128
MAMBA_INNER = MAMBA_HEADS * MAMBA_HEAD
CONVOLVED = MAMBA_INNER + 2 * MAMBA_GROUPS * MAMBA_STATE


def nemotron_3_ultra() -> tuple[MappedTensor, ...]:
    """The 51,023 canonical tensors that are left for Nemotron-3-Ultra-550B-A55B, see above."""
    rows = [
        _row("backbone.embeddings.weight", (VOCABULARY, HIDDEN), MappingClass.PADDED),
        _row("lm_head.weight", (VOCABULARY, HIDDEN), MappingClass.PADDED),
        _row("backbone.norm_f.weight", (HIDDEN,), MappingClass.REPLICATED),
        _row("mtp.eh_proj.weight", (HIDDEN, 2 * HIDDEN), MappingClass.REPLICATED),
        *(_row(f"mtp.{norm}.weight", (HIDDEN,), MappingClass.REPLICATED) for norm in ("enorm", "hnorm", "final_norm")),
    ]
    for layer in range(48):
        rows += _mamba(f"backbone.mamba.{layer}.")
    for layer in range(12):
        rows += _attention(f"backbone.attention.{layer}.")
    for layer in range(48):
        rows += _mixture(f"backbone.mixture.{layer}.")
    return (*rows, *_attention("mtp.attention."), *_mixture("mtp.mixture."))


def _mamba(at: str) -> Iterator[MappedTensor]:
    projected = MAMBA_INNER + CONVOLVED + MAMBA_HEADS
    yield _row(f"{at}norm.weight", (HIDDEN,), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.in_proj.weight", (projected, HIDDEN), MappingClass.SECTIONS)
    yield _row(f"{at}mixer.conv1d.weight", (CONVOLVED, 1, KERNEL), MappingClass.SECTIONS)
    yield _row(f"{at}mixer.conv1d.bias", (CONVOLVED,), MappingClass.SECTIONS)
    yield _row(f"{at}mixer.A_log", (MAMBA_HEADS,), MappingClass.REPLICATED, transformed=True)
    yield _row(f"{at}mixer.D", (MAMBA_HEADS,), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.dt_bias", (MAMBA_HEADS,), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.norm.weight", (MAMBA_INNER,), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.out_proj.weight", (HIDDEN, MAMBA_INNER), MappingClass.ROW)


def _attention(at: str) -> Iterator[MappedTensor]:
    yield _row(f"{at}norm.weight", (HIDDEN,), MappingClass.REPLICATED)
    for kind, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        yield _row(f"{at}mixer.{kind}_proj.weight", (heads * HEAD, HIDDEN), MappingClass.QKV)
    yield _row(f"{at}mixer.o_proj.weight", (HIDDEN, HEADS * HEAD), MappingClass.ROW)


def _mixture(at: str) -> Iterator[MappedTensor]:
    yield _row(f"{at}norm.weight", (HIDDEN,), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.gate.weight", (EXPERTS, HIDDEN), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.gate.e_score_correction_bias", (EXPERTS,), MappingClass.REPLICATED)
    yield _row(f"{at}mixer.fc1_latent_proj.weight", (LATENT, HIDDEN), MappingClass.COLUMN)
    yield _row(f"{at}mixer.fc2_latent_proj.weight", (HIDDEN, LATENT), MappingClass.ROW)
    yield _row(f"{at}mixer.shared_experts.up_proj.weight", (SHARED_INNER, HIDDEN), MappingClass.COLUMN)
    yield _row(f"{at}mixer.shared_experts.down_proj.weight", (HIDDEN, SHARED_INNER), MappingClass.ROW)
    for expert in range(EXPERTS):
        of, degree = f"{at}mixer.experts.{expert}.", Degree.EXPERT_TENSOR
        yield _row(f"{of}up_proj.weight", (EXPERT_INNER, LATENT), MappingClass.COLUMN, degree)
        yield _row(f"{of}down_proj.weight", (LATENT, EXPERT_INNER), MappingClass.ROW, degree)


def _row(
    name: str,
    shape: tuple[int, ...],
    mapping: MappingClass,
    degree: Degree = Degree.TENSOR,
    *,
    transformed: bool = False,
) -> MappedTensor:
    return MappedTensor(TensorMeta(name, shape, "BF16"), mapping, degree, transformed)
