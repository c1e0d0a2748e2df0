"""Tasks of PyTorch modules on real ranks: each element is compared with the full tensor, and all of them are owned."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from nemo_dcr.adapters.huggingface import checkpoint_maps
from nemo_dcr.adapters.pytorch import module_tasks
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import GroupExchange
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.testing.ranks import run_in_processes

WIDE, VOCABULARY = 10, 7


class Router(nn.Module):
    """A router with an FP32 bias that is a buffer, as in models whose load balancing is not trained by gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDE))
        self.register_buffer("bias", torch.randn(4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class Policy(nn.Module):
    """Projections of uneven sizes, a norm, an embedding, a router."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDE)
        self.up = nn.Linear(WIDE, 9)
        self.down = nn.Linear(9, WIDE, bias=False)
        self.norm = nn.LayerNorm(WIDE)
        self.router = Router()


def table(dtypes: dict[str, str]) -> list[TensorMeta]:
    state = Policy().state_dict()
    return [TensorMeta(name, tuple(value.shape), dtypes.get(name, "BF16")) for name, value in state.items()]


TABLE = table({"router.bias": "F32"})


def wrapped(kind: str, policy: Policy, world: int) -> nn.Module:
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if kind == "fsdp2":
        return fully_shard(policy, mesh=init_device_mesh("cpu", (world,)), mp_policy=bf16)
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
        return fully_shard(policy, mesh=mesh, mp_policy=bf16)
    if kind == "ddp":
        return DistributedDataParallel(policy)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "tensor parallel":
        return parallelize_module(policy, init_device_mesh("cpu", (world,)), plan)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(policy, mesh["tensor"], plan)
    return fully_shard(policy, mesh=mesh["data"], mp_policy=bf16)


def canonical(policy: nn.Module) -> dict[str, Words]:
    """What the full tensors are when they are served."""
    kinds = {"BF16": torch.bfloat16, "F32": torch.float32}
    state = policy.state_dict()
    return {t.name: copied_words(state[t.name].detach().to(kinds[t.dtype])) for t in TABLE}


KINDS = ("fsdp2", "hsdp", "ddp", "tensor parallel", "tensor parallel under fsdp2")


def rank_work(store: Any, rank: int, world: int) -> None:
    """All kinds in one set of processes: starting them costs far more than the work."""
    for kind in KINDS:
        one_kind(type(store)(kind, store), rank, world, kind)
    stacked_experts(type(store)("experts", store), rank, world)


def one_kind(store: Any, rank: int, world: int, kind: str) -> None:
    torch.manual_seed(7)
    whole = Policy()
    torch.manual_seed(7)
    module = wrapped(kind, Policy(), world)
    tasks = module_tasks(module, checkpoint_maps(whole, TABLE))
    full = canonical(whole)
    for task in tasks:
        assert task.words().tobytes() == task.map.take(full[task.tensor.name]).tobytes(), task.key
    exchange = GroupExchange(store)
    plan = agree_plan(exchange, tasks, expected=TABLE)
    owned = plan.owned_affine(OwnerId(rank), tasks)
    delta = DeltaOwner(OwnerId(rank), owned)
    delta.capture(Version(0))
    with torch.no_grad():  # only a buffer in FP32 changes
        for name, buffer in module.named_buffers():
            if name.endswith("router.bias"):
                buffer[2] += 1
    buckets = delta.stream(AttemptMode.XOR, dict.fromkeys((t.name for t in TABLE), PathClass.XOR))
    found = [(i.tensor.name, i.flat_indices().tolist()) for bucket in buckets for i in bucket.items]
    everything = [each for part in exchange.gather(json.dumps(found).encode()) for each in json.loads(part)]
    assert everything == [["router.bias", [2]]]


def stacked_experts(store: Any, rank: int, world: int) -> None:
    """Experts that transformers fuses are those of the checkpoint, on ranks that hold some of them or none."""
    from tests.unit.adapters.test_huggingface_maps import small

    model = small("qwen3_moe", num_experts=3, num_hidden_layers=1)
    full = {name: copied_words(value) for name, value in model.state_dict().items()}
    fused, at = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts."
    tensors = [TensorMeta(f"{at}{e}.{k}_proj.weight", (8, 16), "BF16") for e in range(3) for k in ("gate", "up")]
    maps = checkpoint_maps(model, tensors)
    assert set(maps) == {fused}
    model.requires_grad_(False)
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))  # type: ignore[arg-type]
    tasks = module_tasks(model, maps)
    halves = full[fused].reshape(3, 2, 8 * 16)
    for task in tasks:
        expert, kind = task.tensor.name.removeprefix(at).split(".")[:2]
        assert task.words().tolist() == halves[int(expert), int(kind == "up_proj")].tolist()
    assert len(tasks) == (2, 2, 2, 0)[rank]  # three experts on four ranks
    assert agree_plan(GroupExchange(store), tasks, expected=tensors).tensors == tuple(sorted(tensors))


@pytest.mark.slow
def test_ranks_hold_what_their_tasks_say_and_own_everything_once() -> None:
    """FSDP2, HSDP, DDP, tensor parallel, both together, and stacked experts, on four real ranks."""
    run_in_processes(4, rank_work)


# ------------------------------------------------------------------------------------------------------- one process


# torch itself uses what it deprecates when its compiler is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_plain_and_a_compiled_module_have_the_same_tasks() -> None:
    policy = Policy()
    maps = checkpoint_maps(policy, TABLE)
    plain, compiled = module_tasks(policy, maps), module_tasks(torch.compile(policy), maps)  # type: ignore[arg-type]
    assert [task.key for task in plain] == [task.key for task in compiled]
    assert {task.tensor for task in plain} == set(TABLE)


def test_what_is_trained_and_not_mapped_is_refused_and_what_is_not_trained_is_left_out() -> None:
    policy = Policy()
    maps = checkpoint_maps(policy, [t for t in TABLE if t.name != "up.bias"])
    with pytest.raises(UnsupportedMapping, match=r"up\.bias.*it is trained"):
        module_tasks(policy, maps)
    policy.up.bias.requires_grad_(False)
    assert "up.bias" not in {task.tensor.name for task in module_tasks(policy, maps)}
    with pytest.raises(UnsupportedMapping, match="no parameter or persistent buffer"):
        module_tasks(nn.Linear(2, 2), maps)


def test_a_child_called_module_keeps_its_name() -> None:
    """Only what wraps a module has no name, not what happens to be called like it."""
    policy = nn.ModuleDict({"module": nn.Linear(2, 3, bias=False, dtype=torch.bfloat16)})
    (task,) = module_tasks(policy, checkpoint_maps(policy, [TensorMeta("module.weight", (3, 2), "BF16")]))
    assert task.tensor.name == "module.weight"


def test_a_parameter_that_nobody_said_is_cast_is_refused() -> None:
    policy = Policy().bfloat16()
    with pytest.raises(UnsupportedMapping, match=r"router\.bias.*the parameter is BF16, the canonical tensor F32"):
        module_tasks(policy, checkpoint_maps(policy, TABLE))


def test_a_tied_parameter_is_named_once() -> None:
    policy = Policy()
    policy.head = nn.Linear(WIDE, VOCABULARY, bias=False)
    policy.head.weight = policy.embed.weight
    assert {t.tensor for t in module_tasks(policy, checkpoint_maps(policy, TABLE))} == set(TABLE)
    both = [*TABLE, TensorMeta("head.weight", (VOCABULARY, WIDE), "BF16")]
    with pytest.raises(UnsupportedMapping, match="same parameter as"):
        module_tasks(policy, checkpoint_maps(policy, both))
