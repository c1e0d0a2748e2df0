"""Two trainer geometries of one model give the same canonical changed set, bit for bit, over real ranks.

FSDP2 trains a small model with real gradients; the fused tensor-parallel layout holds the same two versions. Full
tensors are gathered for the comparison only, after each delta is complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import Destination, TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import AttemptFailed, EndpointLost
from nemo_dcr.ids import AttemptId, OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.dtensor import dtensor_tasks
from nemo_dcr.source.exchange import Exchange, GroupExchange, KeyStore
from nemo_dcr.source.ownership import stable_hash
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.testing.checkpoint import read_checkpoint, smollm2_checkpoint, tensor_table
from nemo_dcr.testing.fused_layout import FusedRank, FusedShape, Load
from nemo_dcr.testing.ranks import run_in_processes, run_in_threads
from nemo_dcr.testing.source_cases import apply_items, changed_set, changed_words, random_words

V0, V1 = Version(0), Version(1)
SMALL = CodecConfig(chunk_target_bytes=400, bucket_target_bytes=1000)
SMOLLM2 = FusedShape(
    layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152, vocab_multiple=1000
)
COLLECTIVES = [
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather", "gather_object"),
    *("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "barrier", "monitored_barrier"),
    *("broadcast", "broadcast_object_list", "scatter", "scatter_object_list"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv"),
]


class Forbidden(Exception):
    pass


class NoCollectiveOps(TorchDispatchMode):
    """Refuse operators that communicate, however they are reached."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace or "symm_mem" in func.namespace:
            raise Forbidden(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Make `full_tensor`, redistribution and every collective raise."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Forbidden("communication")

    with pytest.MonkeyPatch.context() as patch, NoCollectiveOps():
        for module in (dist, dist.distributed_c10d):
            for name in COLLECTIVES:
                patch.setattr(module, name, refuse)
        for name in ("full_tensor", "redistribute"):
            patch.setattr(DTensor, name, refuse)
        yield


def records(items: list[Item], old: dict[str, Words]) -> dict[Destination, int]:
    return apply_items({name: flat.copy() for name, flat in old.items()}, items)


def united(exchange: Exchange, mine: dict[Destination, int]) -> dict[Destination, int]:
    """The records of all ranks; no destination has two."""
    rows = [(d.name, d.index, word) for d, word in mine.items()]
    every = [msgspec.msgpack.decode(data) for data in exchange.gather(msgspec.msgpack.encode(rows))]
    merged = {Destination(name, index): word for found in every for name, index, word in found}
    assert len(merged) == sum(len(found) for found in every)
    return merged


def emitted(owner: DeltaOwner, mode: AttemptMode, attempt: int) -> list[Item]:
    classes = {tensor.name: PathClass.XOR for tensor in owner.tensor_table()}
    buckets = owner.stream(mode, classes, attempt=AttemptId(attempt), base=V0)
    return [item for bucket in buckets for item in bucket.items]


class Block(nn.Module):
    """One decoder layer with the parameter names of the checkpoint."""

    def __init__(self, shape: FusedShape) -> None:
        super().__init__()
        wide, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(wide), nn.RMSNorm(wide)
        sizes = {"q_proj": (wide, q), "k_proj": (wide, kv), "v_proj": (wide, kv), "o_proj": (q, wide)}
        self.self_attn = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        inner = shape.intermediate
        sizes = {"gate_proj": (wide, inner), "up_proj": (wide, inner), "down_proj": (inner, wide)}
        self.mlp = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        normed, attention = self.input_layernorm(hidden), self.self_attn
        query, key, value = (
            attention[name](normed).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + attention["o_proj"](mixed.transpose(1, 2).reshape(batch, length, -1))
        normed, mlp = self.post_attention_layernorm(hidden), self.mlp
        return hidden + mlp["down_proj"](functional.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))


class Policy(nn.Module):
    """A small decoder with a tied head, an FP32 bias of one element and an FP32 buffer."""

    def __init__(self, shape: FusedShape) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab, shape.hidden),
                "layers": nn.ModuleList(Block(shape) for _ in range(shape.layers)),
                "norm": nn.RMSNorm(shape.hidden),
            }
        )
        self.temperature = nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.tensor(0.1))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.model["embed_tokens"](tokens)
        for layer in self.model["layers"]:
            hidden = layer(hidden)
        logits = functional.linear(self.model["norm"](hidden), self.model["embed_tokens"].weight)
        return logits * torch.exp(self.temperature)


def small_shape(world: int) -> FusedShape:
    return FusedShape(
        layers=2,
        hidden=10,
        heads=2 * world,
        kv_heads=world,
        head_dim=4,
        intermediate=7 * world,
        vocab=37,
        vocab_multiple=4,
    )


class FsdpTrainer:
    """The policy under FSDP2: FP32 master shards, BF16 compute, AdamW on a real loss."""

    def __init__(self, shape: FusedShape, rank: int, world: int) -> None:
        torch.manual_seed(5)
        mesh = init_device_mesh("cpu", (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        self.rank, self.module = rank, Policy(shape)
        for layer in self.module.model["layers"]:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.module, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, weight_decay=0.0)
        self.vocab = shape.vocab

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(100 * number + self.rank)
        tokens = torch.randint(0, self.vocab, (2, 9), generator=generator)
        logits = self.module(tokens[:, :-1])
        functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.module.steps += 1

    def named(self) -> dict[TensorMeta, Tensor]:
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        kept = {"temperature", "steps"}
        return {
            TensorMeta(name, tuple(value.shape), "F32" if name in kept else "BF16"): value.detach()
            for name, value in tensors.items()
        }

    def full(self) -> dict[str, Words]:
        """The oracle: gathered full tensors, cast after the gathering."""
        found = {}
        for tensor, value in self.named().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[tensor.name] = copied_words(whole.to(torch.bfloat16) if tensor.dtype == "BF16" else whole)
        return found


def keep_the_exchange_contract(store: KeyStore, rank: int, world: int) -> None:
    """The contract of an exchange, over gloo and a file store."""
    exchange = GroupExchange(store)
    assert (exchange.rank, exchange.world) == (rank, world)
    exchange.meet("a")
    assert exchange.gather(bytes([rank]) * rank) == [bytes([other]) * other for other in range(world)]
    parts = [b"" if other == rank else b"%d>%d" % (rank, other) for other in range(world)]
    expected = [b"" if other == rank else b"%d>%d" % (other, rank) for other in range(world)]
    assert exchange.scatter(parts) == expected
    assert exchange.scatter([b""] * world) == [b""] * world
    if rank == 0:
        exchange.give_up("b")
    with pytest.raises(AttemptFailed, match="stopped at b"):
        exchange.meet("b")
    exchange.meet("c")
    # A rank that does not answer inside a round is a lost endpoint.
    hasty = GroupExchange(store, dist.new_group(list(range(world)), timeout=timedelta(seconds=1)))
    if rank == 0:
        with pytest.raises(EndpointLost, match="trainer ranks"):
            hasty.gather(b"x")


def train_and_compare(store: KeyStore, rank: int, world: int) -> None:
    keep_the_exchange_contract(store, rank, world)
    exchange = GroupExchange(store)
    shape = small_shape(world)
    trainer = FsdpTrainer(shape, rank, world)
    trainer.step(0)
    tasks = dtensor_tasks(trainer.named().items())
    if world == 3:
        lengths = {task.tensor.name: [task.map.extent] for task in tasks}
        assert lengths["temperature"] == ([(1,)] if rank == 0 else [(0,)])
        assert lengths["model.embed_tokens.weight"] == [((13, 13, 11)[rank], 10)]
    plan = agree_plan(exchange, tasks)
    owner = DeltaOwner(OwnerId(rank), plan.owned_affine(OwnerId(rank), tasks), config=SMALL)
    owner.capture(V0)
    old = trainer.full()
    for number in (1, 2):
        trainer.step(number)
    with no_collectives():
        for call in (lambda: next(iter(trainer.named().values())).full_tensor(), lambda: exchange.gather(b"")):
            with pytest.raises(Forbidden):
                call()
        with pytest.raises(Forbidden):
            torch.ops._c10d_functional.all_reduce(torch.zeros(1), "sum", "0")
        dtensor_tasks(trainer.named().items())
        sparse, retry = emitted(owner, AttemptMode.XOR, 1), emitted(owner, AttemptMode.OVERWRITE, 2)
        dense = emitted(owner, AttemptMode.DENSE, 3)
    new = trainer.full()
    expected = changed_set(old, new)
    assert 0 < len(expected) < sum(map(len, old.values()))
    from_fsdp = united(exchange, records(sparse, old))
    assert from_fsdp == expected
    assert united(exchange, records(retry, old)) == expected
    assert len(united(exchange, records(dense, {n: np.zeros_like(w) for n, w in old.items()}))) == sum(
        map(len, old.values())
    )
    assert {item.encoding for item in sparse} <= {Encoding.XOR}
    from_fused = united(exchange, fused_records(exchange, shape, old, new))
    assert from_fused == {d: word for d, word in from_fsdp.items() if d.name not in ("temperature", "steps")}
    owner.update_baseline(V1)
    for tensor, box, held in owner.tracker_words():
        assert held.tobytes() == box.take(new[tensor.name]).tobytes()


def fused_owner(exchange: Exchange, layout: FusedRank, config: CodecConfig) -> DeltaOwner:
    affine, (inputs, tasks) = layout.affine_tasks(), layout.residual()
    plan = agree_plan(exchange, affine, inputs, tasks)
    assert plan.tensors == layout.shape.tensors()
    kinds = ("qkv", "q_proj", "k_proj", "v_proj", "embed_tokens", "lm_head")
    expected = [tensor for tensor in plan.tensors if any(kind in tensor.name for kind in kinds)]
    assert list(plan.dependencies.all_tensors()) == expected
    residual = ResidualConverter(plan, exchange, inputs, tasks, chunk_target_bytes=config.chunk_target_bytes)
    rank = OwnerId(exchange.rank)
    owner = DeltaOwner(rank, plan.owned_affine(rank, affine), residual=residual, config=config)
    owner.capture(V0)
    return owner


def fused_records(
    exchange: Exchange, shape: FusedShape, old: dict[str, Words], new: dict[str, Words]
) -> dict[Destination, int]:
    layout = FusedRank(shape, exchange.rank, exchange.world, lambda tensor: old[tensor.name])
    owner = fused_owner(exchange, layout, SMALL)
    layout.load(lambda tensor: new[tensor.name])
    found = records(emitted(owner, AttemptMode.XOR, 1), old)
    assert records(emitted(owner, AttemptMode.OVERWRITE, 2), old) == found
    owner.update_baseline(V1)
    for tensor, box, held in owner.tracker_words():
        assert held.tobytes() == box.take(new[tensor.name]).tobytes()
    return found


def checkpoint_version(directory: Path, version: int) -> Load:
    """Words of the real checkpoint; in version 1 about 0.5% of each tensor's elements have another last bit."""
    tensors = {tensor.name: value for tensor, value in read_checkpoint(directory)}

    def load(tensor: TensorMeta) -> Words:
        flat = copied_words(tensors[tensor.name])
        if version:
            draw = np.random.default_rng(stable_hash(tensor.name))
            flat[draw.integers(0, tensor.numel, tensor.numel // 200 + 1)] ^= 1
        return flat

    return load


def fused_checkpoint(store: KeyStore, rank: int, world: int, directory: Path) -> None:
    """9 heads and 3 key-value heads: 272 tensors, 91 of them residual (query, key, value, embedding)."""
    exchange = GroupExchange(store)
    before, after = checkpoint_version(directory, 0), checkpoint_version(directory, 1)
    layout = FusedRank(SMOLLM2, rank, world, before)
    assert layout.shape.tensors() == tensor_table(directory)
    owner = fused_owner(exchange, layout, CodecConfig(chunk_target_bytes=16 << 20))
    layout.load(after)
    found: dict[str, list[bytes]] = {}
    for item in emitted(owner, AttemptMode.XOR, 1):
        new = after(item.tensor)[item.flat_indices()]
        old = before(item.tensor)[item.flat_indices()]
        assert item.values.tobytes() == (new ^ old if item.encoding is Encoding.XOR else new).tobytes()
        found[item.tensor.name] = [item.flat_indices().tobytes()]
    every = [msgspec.msgpack.decode(data) for data in exchange.gather(msgspec.msgpack.encode(found))]
    for tensor in layout.shape.tensors()[rank::world]:
        parts = [np.frombuffer(data, dtype=np.int64) for ranks in every for data in ranks.get(tensor.name, [])]
        expected = np.flatnonzero(before(tensor) != after(tensor))
        assert np.array_equal(np.sort(np.concatenate(parts)), expected)


@pytest.mark.slow
def test_fused_ranks_of_the_real_checkpoint_emit_its_changed_set(tmp_path: Path) -> None:
    run_in_processes(3, fused_checkpoint, smollm2_checkpoint(tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp2_and_fused_ranks_emit_the_changed_set_of_the_gathered_weights(world: int) -> None:
    """With 3 ranks also: uneven and empty FSDP shards."""
    run_in_processes(world, train_and_compare)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("head", ["absent", "tied", "own"])
def test_fused_layouts_of_any_size_emit_the_same_changed_set(ranks: int, head: str) -> None:
    shape = FusedShape(
        layers=2,
        hidden=12,
        heads=8,
        kv_heads=4,
        head_dim=3,
        intermediate=20,
        vocab=37,
        vocab_multiple=5,
        tied=head != "own",
        head_in_checkpoint=head == "tied",
    )
    rng = np.random.default_rng(11)
    old = {tensor.name: random_words(rng, tensor.dtype, tensor.numel) for tensor in shape.tensors()}
    new = {name: changed_words(rng, "BF16", flat, 0.1) for name, flat in old.items()}
    if head == "tied":
        for version in (old, new):
            version["lm_head.weight"] = version["model.embed_tokens.weight"]
    found = run_in_threads(ranks, lambda exchange: fused_records(exchange, shape, old, new))
    merged = {destination: word for records_of in found for destination, word in records_of.items()}
    assert merged == changed_set(old, new)
    assert len(merged) == sum(map(len, found))


def test_data_parallel_replicas_of_fused_ranks_share_the_work() -> None:
    """Two replicas of two tensor-parallel ranks: every element still has one record."""
    shape = small_shape(2)
    rng = np.random.default_rng(12)
    old = {tensor.name: random_words(rng, tensor.dtype, tensor.numel) for tensor in shape.tensors()}
    new = {name: changed_words(rng, "BF16", flat, 0.2) for name, flat in old.items()}

    def work(exchange: Exchange) -> tuple[dict[Destination, int], int]:
        layout = FusedRank(shape, exchange.rank % 2, 2, lambda tensor: old[tensor.name])
        owner = fused_owner(exchange, layout, SMALL)
        layout.load(lambda tensor: new[tensor.name])
        return records(emitted(owner, AttemptMode.XOR, 1), old), owner.source_elements

    found = run_in_threads(4, work)
    merged = {destination: word for mine, _ in found for destination, word in mine.items()}
    assert merged == changed_set(old, new)
    assert len(merged) == sum(len(mine) for mine, _ in found)
    padded = (40 - 37) * shape.hidden
    assert sum(count for _, count in found) == sum(map(len, old.values())) + padded
    assert min(count for _, count in found) > 0
