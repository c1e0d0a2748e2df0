"""The demo's chunk and bucket targets give every owner of the real 135M checkpoint at least 15 payloads."""

from __future__ import annotations

from math import prod

import pytest

from nemo_dcr.cli.job import OWNERS, PAYLOADS_AT_LEAST, TARGET_BYTES
from nemo_dcr.codec.buckets import group_chunks
from nemo_dcr.source.dtensor import chunk_bounds

WIDTH, KEYS, INNER, LAYERS, WORDS = 576, 192, 1536, 30, 49152
LAYER = {
    "input_layernorm": (WIDTH,),
    "mlp.down_proj": (WIDTH, INNER),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "post_attention_layernorm": (WIDTH,),
    "self_attn.k_proj": (KEYS, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.v_proj": (KEYS, WIDTH),
}
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens": (WORDS, WIDTH),
    "model.norm": (WIDTH,),
    **{f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in LAYER.items()},
}


@pytest.mark.parametrize("owner", range(OWNERS))
def test_every_owner_of_the_135m_checkpoint_sends_at_least_15_payloads(owner: int) -> None:
    """When each chunk has a change; chunk and bucket targets are the same, so each chunk is one payload."""
    assert sum(map(prod, SHAPES.values())) == 134_515_008
    assert TARGET_BYTES == 4 << 20
    shards = []
    for name, shape in sorted(SHAPES.items()):
        rows = chunk_bounds(shape[0], OWNERS, owner)[1]
        shards.append((name, 2 * prod((rows, *shape[1:]))))
    payloads = [size for _, size in group_chunks(shards, TARGET_BYTES)]
    assert len(payloads) >= PAYLOADS_AT_LEAST
    assert len(payloads) == 26
