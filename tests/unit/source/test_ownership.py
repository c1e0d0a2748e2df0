"""Ownership is a pure, balanced function of names, bytes and replica groups."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.ids import OwnerId
from nemo_dcr.source.ownership import Shard, assign_owners, owner_loads, residual_owner, stable_hash


def qwen3_30b_a3b() -> list[tuple[str, int]]:
    """Names and BF16 bytes of the 18,867 tensors, from the public configuration."""
    hidden, vocab, expert = 2048, 151936, 768
    query, key = 32 * 128, 4 * 128
    sizes = {"model.embed_tokens.weight": vocab * hidden, "lm_head.weight": vocab * hidden, "model.norm.weight": hidden}
    for layer in range(48):
        prefix = f"model.layers.{layer}."
        sizes[f"{prefix}input_layernorm.weight"] = sizes[f"{prefix}post_attention_layernorm.weight"] = hidden
        sizes[f"{prefix}self_attn.q_proj.weight"] = sizes[f"{prefix}self_attn.o_proj.weight"] = query * hidden
        sizes[f"{prefix}self_attn.k_proj.weight"] = sizes[f"{prefix}self_attn.v_proj.weight"] = key * hidden
        sizes[f"{prefix}self_attn.q_norm.weight"] = sizes[f"{prefix}self_attn.k_norm.weight"] = 128
        sizes[f"{prefix}mlp.gate.weight"] = 128 * hidden
        for number in range(128):
            for kind in ("gate", "up", "down"):
                sizes[f"{prefix}mlp.experts.{number}.{kind}_proj.weight"] = expert * hidden
    return sorted((name, 2 * count) for name, count in sizes.items())


@pytest.mark.parametrize("replicas", [8, 32])
def test_the_largest_owner_of_qwen3_30b_a3b_has_at_most_a_tenth_more_than_the_mean(replicas: int) -> None:
    tensors = qwen3_30b_a3b()
    assert len(tensors) == 18867
    assert sum(nbytes for _, nbytes in tensors) == 61_064_245_248
    group = tuple(OwnerId(rank) for rank in range(replicas))
    shards = [Shard(name, nbytes, group) for name, nbytes in tensors]
    loads = owner_loads(shards, assign_owners(shards))
    assert len(loads) == replicas
    assert max(loads.values()) / (sum(loads.values()) / replicas) <= 1.1


@st.composite
def tables(draw: st.DrawFn) -> list[Shard]:
    keys = draw(st.lists(st.text(max_size=8), unique=True, max_size=20))
    ranks = st.sets(st.integers(0, 5), min_size=1).map(lambda found: tuple(OwnerId(rank) for rank in sorted(found)))
    return [Shard(key, draw(st.integers(0, 1000)), draw(ranks)) for key in keys]


@given(tables(), st.integers(0, 2**32 - 1))
def test_each_shard_has_one_holder_as_owner_whatever_the_order(table: list[Shard], seed: int) -> None:
    owners = assign_owners(table)
    assert owners.keys() == {shard.key for shard in table}
    assert all(owners[shard.key] in shard.holders for shard in table)
    random.Random(seed).shuffle(table)
    mixed = [Shard(shard.key, shard.nbytes, tuple(reversed(shard.holders))) for shard in table]
    assert assign_owners(mixed) == owners


@given(tables())
def test_no_owner_exceeds_the_least_loaded_rule(table: list[Shard]) -> None:
    """With one common replica group, greedy placement keeps the spread within the largest shard."""
    group = tuple(OwnerId(rank) for rank in range(4))
    shards = [Shard(shard.key, shard.nbytes, group) for shard in table]
    loads = owner_loads(shards, assign_owners(shards))
    if loads:
        assert max(loads.values()) - min(loads.values()) <= max(shard.nbytes for shard in shards)


def test_shards_without_replicas_count_as_load_before_the_others_choose() -> None:
    names = sorted((f"shard {n}" for n in range(9)), key=stable_hash)
    alone = Shard(names.pop(), 100, (OwnerId(0),))
    shared = [Shard(name, 10, (OwnerId(0), OwnerId(1))) for name in names]
    owners = assign_owners([*shared, alone])
    assert {owners[shard.key] for shard in shared} == {1}


def test_repeated_keys_and_empty_groups_are_refused() -> None:
    shard = Shard("a", 1, (OwnerId(0),))
    with pytest.raises(ValueError, match="repeats"):
        assign_owners([shard, shard])
    with pytest.raises(ValueError, match="no holder"):
        assign_owners([Shard("a", 1, ())])


def test_the_hash_is_the_same_in_another_process() -> None:
    code = "from nemo_dcr.source.ownership import stable_hash, residual_owner as r; print(stable_hash('é'), r('x', 7))"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert [int(word) for word in printed] == [stable_hash("é"), residual_owner("x", 7)]
