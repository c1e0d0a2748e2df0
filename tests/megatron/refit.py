"""One refit of a Megatron model: the delta of all ranks on the old weights, against Bridge's export of the new ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module

from nemo_dcr.adapters.megatron.source import MegatronSource, megatron_source
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.ids import AttemptId, OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import Exchange, GroupExchange
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.setup import agree_plan
from tests.megatron.tiny import BRIDGES, VOCABULARY, table
from tests.megatron.trainer import Checkpoint, Layout, build, export, train_step

V0 = Version(0)


@dataclass(frozen=True)
class Case:
    """What differs between refits."""

    kind: str
    layout: Layout
    change: str = "bits"
    mapping: str = "extended"
    verify: bool = True
    wrapped: str = ""
    """"bf16": in Megatron's module for BF16 policies; "ddp": in Megatron's DDP too, whose buffer the parameters lie in.
    Without a wrapper norms are FP32."""
    model: tuple[tuple[str, Any], ...] = ()
    """Options of the model."""
    bridge: type[Any] | None = None


def refit(store: Any, case: Case, checkpoint: Checkpoint, look: Callable[[MegatronSource], None]) -> None:
    """One rank of a refit: raises AssertionError unless every bit of every tensor is that of the export."""
    bridge = (case.bridge or BRIDGES[case.kind])()
    models = build(bridge, checkpoint, case.layout, **dict(case.model))
    if case.wrapped:
        models = [Float16Module(model.config, model) for model in models]
    if case.wrapped == "ddp":
        buffers = DistributedDataParallelConfig(use_distributed_optimizer=True)
        models = [DistributedDataParallel(model.config, buffers, model) for model in models]
    exchange = GroupExchange(store)
    tensors = table(checkpoint)
    source = megatron_source(bridge, models, checkpoint, tensors, exchange, mapping=case.mapping, verify=case.verify)
    look(source)
    owner = new_owner(source, exchange, checkpoint)
    owner.capture(V0)
    if case.change == "step":
        train_step(models[0], VOCABULARY, seed=1)
    else:
        flip_bits(models)
    classes = {tensor.name: PathClass.XOR for tensor in tensors}
    items = [
        item
        for bucket in owner.stream(AttemptMode.XOR, classes, attempt=AttemptId(1), base=V0)
        for item in bucket.items
    ]
    made = applied(words_of(checkpoint.tensors), gathered(items))
    new = export(bridge, models, checkpoint)
    cropped = {name: value[: len(checkpoint.tensors[name])] for name, value in new.items()}
    wanted = words_of(cropped)
    assert sorted(wanted) == sorted(made), sorted(set(wanted) ^ set(made))
    wrong = {name: int(np.count_nonzero(wanted[name] != made[name])) for name in wanted}
    assert not any(wrong.values()), f"other bits: { ({name: count for name, count in wrong.items() if count}) }"
    old = words_of(checkpoint.tensors)
    still = [name for name in wanted if np.array_equal(wanted[name], old[name])]
    assert not still, f"{still} did not change, which proves nothing"


def new_owner(source: MegatronSource, exchange: Exchange, checkpoint: Checkpoint) -> DeltaOwner:
    """The owner of this rank."""
    plan = agree_plan(exchange, source.affine, source.inputs, source.residual, expected=table(checkpoint))
    residual = None
    if source.residual:
        residual = ResidualConverter(plan, exchange, source.inputs, source.residual, chunk_target_bytes=1 << 16)
    rank = OwnerId(exchange.rank)
    return DeltaOwner(rank, plan.owned_affine(rank, source.affine), residual=residual)


def words_of(tensors: dict[str, torch.Tensor]) -> dict[str, Words]:
    return {name: copied_words(value) for name, value in tensors.items()}


def flip_bits(models: list[torch.nn.Module]) -> None:
    """Other bits in one element of seven of every parameter, equal on replicas; NaNs are among them."""
    for name, value in (each for model in models for each in model.named_parameters()):
        generator = torch.Generator().manual_seed(len(name))
        bits = value.data.view(torch.int16).view(-1)
        chosen = torch.rand(bits.shape, generator=generator) < 1 / 7
        chosen[:2] = True  # of an FP32 value, the second half is what is served
        noise = torch.randint(1, 1 << 15, bits.shape, generator=generator, dtype=torch.int16)
        bits ^= torch.where(chosen, noise, torch.zeros_like(noise))


Plain = tuple[str, str, Any, Any]


def gathered(items: list[Item]) -> list[Plain]:
    """The records of all ranks."""
    mine = [(item.tensor.name, str(item.encoding), item.flat_indices(), item.values) for item in items]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return [each for rank in found for each in rank]


def applied(words: dict[str, Words], items: list[Plain]) -> dict[str, Words]:
    """The records on old words; raises AssertionError when two of them meet."""
    seen: dict[str, set[int]] = {}
    for name, encoding, indices, values in items:
        assert not seen.setdefault(name, set()) & set(indices.tolist()), name
        seen[name] |= set(indices.tolist())
        old = words[name][indices]
        words[name][indices] = old ^ values if encoding == str(Encoding.XOR) else values
    return words
