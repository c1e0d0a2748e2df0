"""`Owner.from_module`: real refits over sockets from trainers of every shape, each bit equal to a dense load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from nemo_dcr.adapters.coordinator_thread import CoordinatorThread
from nemo_dcr.adapters.owner import Owner
from nemo_dcr.adapters.receiver import Receiver
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.digests import content_digest, tensor_digest
from nemo_dcr.checkpoint.directory import open_checkpoint
from nemo_dcr.cli.stats import run_rates
from nemo_dcr.config import BaselineConfig, CodecConfig
from nemo_dcr.errors import ConditionViolated, Conflict, EndpointLost, InvalidConfig, OperatorNeeded, UnsupportedMapping
from nemo_dcr.ids import Version
from nemo_dcr.runtime import coordinator_node
from nemo_dcr.runtime.change_log import read_changes
from nemo_dcr.source.dtensor import dtensor_map
from nemo_dcr.source.tasks import Part, ResidualInput, ResidualTask, tensor_reader
from nemo_dcr.testing.ranks import run_in_processes
from nemo_dcr.transport.object_store import FileObjectStore
from tests.e2e.module_refits import (
    REFIT,
    WAIT_S,
    Engine,
    abort,
    actions,
    bits,
    emitted,
    full_tensors,
    lending,
    serving,
    shared,
    step,
    until,
)
from tests.unit.adapters.test_huggingface_maps import small
from tests.unit.adapters.test_pytorch_module import TABLE, Policy, wrapped

Work = Callable[[Any, int, int, Path], None]
SMALL = CodecConfig(chunk_target_bytes=256, bucket_target_bytes=600)


def policy() -> Policy:
    torch.manual_seed(7)
    return Policy()


def owner_of(model: nn.Module, directory: Path, table: Any = TABLE, **more: Any) -> Owner:
    return Owner.from_module(model, checkpoint=table, directory=directory, refit=REFIT, codec=SMALL, **more)


def refits(model: nn.Module, directory: Path, rank: int, world: int) -> None:
    """An optimizer step, then a step that changes one element of an FP32 buffer and nothing else."""
    engine = Engine(TABLE, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    with serving(engine, directory, rank), owner_of(model, directory) as owner:
        owner.watch(optimizer)
        step(optimizer)
        assert owner.refit(timeout_s=WAIT_S) == Version(1)
        full = full_tensors(model, TABLE)
        assert rank != 0 or engine.stored == engine.dense(full)
        assert emitted(owner, world) > 1
        owner.check_replicas()
        owner.weights_changed()
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                if name.endswith("router.bias"):
                    buffer[2] += 1
        assert owner.refit(timeout_s=WAIT_S) == owner.version == Version(2)
        assert emitted(owner, world) == 1
        full = full_tensors(model, TABLE)
        assert rank != 0 or engine.stored == engine.dense(full)
        if world > 1:
            dist.barrier()


@pytest.mark.slow
def test_one_process_refits_an_engine_to_the_bits_of_its_parameters(tmp_path: Path) -> None:
    refits(policy(), tmp_path, 0, 1)


# ----------------------------------------------------------------------------------------------------- transformers


class Tied(nn.Module):
    """Two names of one parameter; the checkpoint has both, so that its tensors are converted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight


def stacked_experts(store: Any, rank: int, world: int, directory: Path) -> None:
    """A transformers model whose experts are fused, under FSDP2, with real gradients."""
    model = small("qwen3_moe", num_experts=3, num_hidden_layers=1, tie_word_embeddings=True).float()
    expert = "model.layers.0.mlp.experts"
    table = [
        TensorMeta(name, tuple(value.shape), "BF16")
        for name, value in model.state_dict().items()
        if expert not in name and name != "lm_head.weight"
    ]
    fused = {f"{expert}.gate_up_proj": ("gate", "up"), f"{expert}.down_proj": ("down",)}
    whole = dict(model.state_dict())
    for name, kinds in fused.items():
        for at in range(3):
            parts = whole[name][at].chunk(len(kinds))
            table += [
                TensorMeta(f"{expert}.{at}.{kind}_proj.weight", tuple(part.shape), "BF16")
                for kind, part in zip(kinds, parts, strict=True)
            ]
    fully_shard(model.model.layers[0])
    fully_shard(model)
    engine = Engine(table, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    with serving(engine, directory, rank), owner_of(model, directory, table) as owner:
        for _ in range(2):
            with torch.no_grad():  # leaves the root's parameters gathered
                model(input_ids=torch.tensor([[1, 2, 3]]))
            model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            version = owner.refit(timeout_s=WAIT_S)
        assert version == Version(2)
        full = {name: value.full_tensor() for name, value in model.state_dict().items()}
        for name, kinds in fused.items():
            for at in range(3):
                for kind, part in zip(kinds, full[name][at].chunk(len(kinds)), strict=True):
                    full[f"{expert}.{at}.{kind}_proj.weight"] = part
        served = {tensor.name: full[tensor.name].bfloat16() for tensor in table}
        assert rank != 0 or engine.stored == engine.dense(served)
        dist.barrier()


def replicas_differ(store: Any, rank: int, world: int, directory: Path) -> None:
    model = wrapped("ddp", policy(), world)
    with owner_of(model, directory, coordinate=False) as owner:
        owner.check_replicas()
        if rank == 1:
            with torch.no_grad():
                for name in ("norm.weight", "up.bias"):
                    model.module.get_parameter(name)[0] += 1
        with pytest.raises(ConditionViolated, match=r"'norm\.weight\[0:10\]': ranks 0 and 1 .*'up\.bias\[0:9\]'"):
            owner.check_replicas()
        with pytest.raises(ConditionViolated, match="ranks 0 and 1"):
            owner_of(model, shared(directory, "again"), coordinate=False)


def refused(store: Any, rank: int, world: int, directory: Path) -> None:
    """What one rank cannot do ends all of them, with its reason."""
    model = policy()
    if rank == 1:
        model.extra = nn.Linear(2, 2)
    error = UnsupportedMapping if rank == 1 else EndpointLost
    with pytest.raises(error, match=r"extra\.bias.*it is trained"):
        owner_of(model, directory)


def dropped(store: Any, rank: int, world: int, directory: Path) -> None:
    """The engine stands still; the candidate is given up and all replicas are the committed version again."""
    model = wrapped("ddp", policy(), world)
    engine = Engine(TABLE, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    with serving(engine, directory, rank, thread=False) as receivers, owner_of(model, directory) as owner:
        owner.watch(optimizer)
        helper = lending(receivers)
        step(optimizer)
        owner.refit(timeout_s=WAIT_S)
        before = full_tensors(model, TABLE)
        dist.barrier()
        helper.stop()
        step(optimizer)
        owner.freeze()
        with pytest.raises(ConditionViolated, match="is frozen"):
            step(optimizer)
        dist.barrier()
        if rank == 0:
            abort(directory)
        with pytest.raises(OperatorNeeded, match="was given up"):
            owner.wait(WAIT_S)
        after = full_tensors(model, TABLE)
        assert {name: bits(value) for name, value in after.items()} == {n: bits(v) for n, v in before.items()}
        owner.check_replicas()
        helper = lending(receivers)
        optimizer.zero_grad()
        step(optimizer)
        assert owner.refit(timeout_s=WAIT_S) == Version(2)
        full = full_tensors(model, TABLE)
        assert rank != 0 or engine.stored == engine.dense(full)
        dist.barrier()
        helper.stop()


def ties(store: Any, rank: int, world: int, directory: Path) -> None:
    """A tied weight that the checkpoint lists twice: parts of all ranks meet at the owner of each name.

    A gap that one rank leaves is found there, and the attempt fails; the next one has no gap.
    """
    model = Tied()
    fully_shard(model)
    table = [TensorMeta(name, (6, 4), "F32") for name in ("embed.weight", "head.weight")]
    held, gaps = model.embed.weight, list[int]()
    saved = held.to_local().detach().clone()
    boxes = {tensor: dtensor_map(tensor, held) for tensor in table}
    box = boxes[table[0]]
    read = tensor_reader(lambda: held.to_local(), box.label)

    def convert(tensor: TensorMeta) -> list[Part]:
        return [] if gaps and gaps.pop() else [Part(boxes[tensor], read().copy())]

    watched = ResidualInput(name="embed.weight", shard=box.label, dtype="F32", count=box.domain, read=read)
    task = ResidualTask(
        name="tie",
        shard=box.label,
        outputs=tuple(table),
        depends=("embed.weight",),
        nbytes=watched.nbytes,
        convert=convert,
    )
    engine = Engine(table, 2)
    more: dict[str, Any] = {"inputs": [watched], "conversions": [task]}
    with pytest.raises(InvalidConfig, match="restore"):
        owner_of(model, directory, table, **more)
    more["restore"] = lambda: held.to_local().detach().copy_(saved)
    with serving(engine, directory, rank), owner_of(model, directory, table, **more) as owner:
        gaps += [1, 1] if rank == 1 else []
        with torch.no_grad():
            held.to_local()[:1, :1] += rank + 1
        assert owner.refit(timeout_s=WAIT_S) == Version(1)
        assert emitted(owner, world) == 2 * min(world, 3)  # of four ranks the last one holds no row
        whole = held.full_tensor().detach()
        assert rank != 0 or engine.stored == engine.dense({tensor.name: whole for tensor in table})
        dist.barrier()
        assert "FailOwner" in actions(directory, "owner")


def halves(store: Any, rank: int, world: int, directory: Path) -> None:
    """Two trainers in one job, each with a run of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half, place = rank // 2, shared(directory, f"half {rank // 2}")
    model, engine = policy(), Engine(TABLE, 1)
    with pytest.raises(InvalidConfig, match="not in it"):
        owner_of(model, place, group=groups[1 - half])
    with serving(engine, place, rank % 2), owner_of(model, place, group=groups[half]) as owner:
        with torch.no_grad():
            model.norm.bias[half] += 1
        assert owner.refit(timeout_s=WAIT_S) == Version(1)
        assert rank % 2 or engine.stored == engine.dense(full_tensors(model, TABLE))
        dist.barrier()


def trainer_rank(store: Any, rank: int, world: int, kinds: Sequence[str], works: Sequence[Work], place: Path) -> None:
    """One after the other in one set of processes, because starting them costs most."""
    for kind in kinds:
        refits(wrapped(kind, policy(), world), shared(place, kind), rank, world)
    for work in works:
        work(store, rank, world, shared(place, work.__name__))
        dist.barrier()


@pytest.mark.slow
def test_two_ranks_of_every_kind_refit_an_engine_to_the_bits_of_the_full_tensors(tmp_path: Path) -> None:
    """Also stacked experts of transformers, a residual conversion, replicas that differ, a candidate given up."""
    kinds = ("fsdp2", "ddp", "tensor parallel")
    run_in_processes(2, trainer_rank, kinds, (ties, stacked_experts, replicas_differ, refused, dropped), tmp_path)


@pytest.mark.slow
def test_four_ranks_of_every_kind_refit_an_engine_to_the_bits_of_the_full_tensors(tmp_path: Path) -> None:
    """Also a residual conversion with uneven and empty shards, and two trainers in one job."""
    run_in_processes(4, trainer_rank, ("fsdp2", "hsdp", "tensor parallel under fsdp2"), (ties, halves), tmp_path)


# ------------------------------------------------------------------------------------------------------ one process


@pytest.mark.slow
def test_a_checkpoint_that_the_engine_loaded_too_needs_no_payload_for_version_0(tmp_path: Path) -> None:
    model, other = policy(), policy()
    served = full_tensors(model, TABLE)
    save_file(served, tmp_path / "model.safetensors")
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name in served:
                value.copy_(served[name])
    files = open_checkpoint(tmp_path)
    digest = content_digest({name: tensor_digest(each.meta, files.words(name)) for name, each in files.tensors.items()})
    for trained, payloads in ((model, 0), (other, 1)):
        run = shared(tmp_path, f"run {payloads}")
        engine = Engine(TABLE, 1)
        engine.load(served)
        with torch.no_grad():
            trained.norm.bias[0] += payloads
        receiver = Receiver(engine.models[0], directory=run, loaded_digest=digest)
        with receiver, owner_of(trained, run, tmp_path) as owner:
            trained.norm.bias.data[1] += 1
            assert owner.refit(timeout_s=WAIT_S) == Version(1)
            assert engine.stored == engine.dense(full_tensors(trained, TABLE))
        sent = [name for name in actions(run, "owner-0") if name == "EmitPayload"]
        assert (len(sent) > 1) == bool(payloads)


@pytest.mark.slow
def test_a_trainer_that_starts_again_goes_on_from_the_committed_candidate(tmp_path: Path) -> None:
    model, engine = policy(), Engine(TABLE, 1)
    with Receiver(engine.models[0], directory=tmp_path):
        with owner_of(model, tmp_path) as owner:
            model.norm.bias.data[0] += 1
            owner.refit(timeout_s=WAIT_S)
            committed = owner.committed
        with owner_of(model, tmp_path, committed=committed) as owner:
            until(lambda: owner.version == Version(1))
            model.norm.bias.data[1] += 1
            assert owner.refit(timeout_s=WAIT_S) == Version(2)
            assert owner.node.counts.emitted == 1
        with owner_of(model, tmp_path, committed=None) as owner:
            model.norm.bias.data[2] += 1
            assert owner.refit(timeout_s=WAIT_S) == Version(3)
            assert owner.node.counts.emitted == sum(tensor.numel for tensor in TABLE)
        assert engine.stored == engine.dense(full_tensors(model, TABLE))
    rates = run_rates(read_changes(tmp_path / "changes"))
    assert [(row.version, row.changed_elements, row.missing) for row in rates.versions] == [
        (1, 1, ()),
        (2, 1, ()),
        (3, 0, (0,)),
    ]


@pytest.mark.slow
def test_a_trainer_with_an_older_checkpoint_sends_the_difference_to_the_baseline_that_it_kept(tmp_path: Path) -> None:
    model, engine, kept = policy(), Engine(TABLE, 1), BaselineConfig(dir=str(tmp_path / "baseline"))
    older = {name: value.clone() for name, value in model.state_dict().items()}
    everything = sum(tensor.numel for tensor in TABLE)
    with Receiver(engine.models[0], directory=tmp_path):
        with owner_of(model, tmp_path, baseline=kept) as owner:
            model.norm.bias.data[:3] += 1
            owner.refit(timeout_s=WAIT_S)
        model.load_state_dict(older)
        model.norm.bias.data[4] += 1
        with owner_of(model, tmp_path, committed=None, baseline=kept) as owner:
            assert owner.version == Version(1)
            assert owner.refit(timeout_s=WAIT_S) == Version(2)
            assert owner.node.counts.emitted == 4
        assert engine.stored == engine.dense(full_tensors(model, TABLE))
        words = next((tmp_path / "baseline" / "owner-0").glob("*.words"))
        content = bytearray(words.read_bytes())
        content[0] ^= 1
        words.write_bytes(content)
        with owner_of(model, tmp_path, committed=None, baseline=kept) as owner:
            assert owner.version is None
            model.norm.bias.data[5] += 1
            assert owner.refit(timeout_s=WAIT_S) == Version(3)
            assert owner.node.counts.emitted == everything
        assert engine.stored == engine.dense(full_tensors(model, TABLE))


@pytest.mark.slow
def test_a_model_that_does_not_make_the_checkpoint_is_refused_and_nothing_stays_open(tmp_path: Path) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    with pytest.raises(UnsupportedMapping, match="it is trained"):
        owner_of(policy(), tmp_path, [tensor for tensor in TABLE if tensor.name != "up.bias"])
    with pytest.raises(InvalidConfig, match=r"transport\.url"):
        owner_of(policy(), tmp_path, transport="ftp://nowhere")
    with pytest.raises(InvalidConfig, match=r"control\.url"):
        owner_of(policy(), tmp_path, record="ftp://nowhere")
    with pytest.raises(InvalidConfig, match="not a directory"):
        owner_of(policy(), tmp_path, tmp_path / "absent")
    assert {thread.name for thread in threading.enumerate()} == threads


@pytest.mark.slow
def test_another_coordinator_may_take_over_and_a_wait_that_lasts_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_node, "WAIT_TOLD_S", 0.1)
    model, engine = policy(), Engine(TABLE, 1)
    with owner_of(model, tmp_path) as owner, ExitStack() as opened:
        until(lambda: "waits: 0 of 1 engine instances answer" in caplog.text)
        opened.enter_context(Receiver(engine.models[0], directory=tmp_path))
        for version in (1, 2):
            model.norm.bias.data[version] += 1
            assert owner.refit(timeout_s=WAIT_S) == Version(version)
            assert engine.stored == engine.dense(full_tensors(model, TABLE))
            if version == 1:
                payloads = opened.enter_context(closing(FileObjectStore(tmp_path / "store", run="run")))
                url = f"sqlite:///{tmp_path / 'record.sqlite'}"
                second = CoordinatorThread(tmp_path, url, payloads, owners=1, instances=1, refit=REFIT)
                opened.callback(second.close)
                until(lambda: isinstance(owner._coordinator and owner._coordinator.problem, Conflict))


@pytest.mark.slow
def test_a_coordinator_that_failed_ends_the_wait_with_its_fault(tmp_path: Path) -> None:
    model, engine = policy(), Engine(TABLE, 1)
    with Receiver(engine.models[0], directory=tmp_path), owner_of(model, tmp_path) as owner:
        owner.refit(timeout_s=WAIT_S)
        for file in (tmp_path / "addresses").glob("engine-*.json"):
            file.write_text("no JSON")
        owner.freeze()
        with pytest.raises(EndpointLost, match=r"coordinator is lost: OperatorNeeded: .*is not an address file"):
            owner.wait(WAIT_S)
