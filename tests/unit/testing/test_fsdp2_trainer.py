"""Real FSDP2 ranks over gloo: what a refit may rely on, with even, uneven and empty shards, and the real model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.errors import InternalError, InvalidConfig
from nemo_dcr.testing.checkpoint import CONFIG_FILE, SINGLE_FILE, read_checkpoint, tensor_table
from nemo_dcr.testing.ranks import run_in_processes
from nemo_dcr.testing.synthetic import synthetic_checkpoint, synthetic_config, synthetic_tensors, write_checkpoint
from nemo_dcr.testing.trainer import Fsdp2Trainer

pytestmark = pytest.mark.slow

# Per-head norms of four elements: three ranks hold two, two and none of them; nineteen rows are cut 7, 7, 5.
UNEVEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "intermediate_size": 19, "hidden_size": 20}


def local_rows(tensor, rank, world):
    """This rank's rows by torch.chunk's rule."""
    step = -(-tensor.shape[0] // world)
    return tensor[min(rank * step, tensor.shape[0]) : (rank + 1) * step]


def candidate(trainer):
    return {name: trainer.candidate_words(name) for name, _ in trainer.local_shards()}


def same(left, right):
    return left.keys() == right.keys() and all(equal_words(left[name], right[name]) for name in left)


def changed(left, right):
    return sum(int(np.count_nonzero(left[name] != right[name])) for name in left)


def refit_facts(store, rank, world, directory, gathered):
    """Runs on every rank; every check is about this rank's shards."""
    del store
    checkpoint = {meta.name: tensor for meta, tensor in read_checkpoint(directory)}
    trainer = Fsdp2Trainer(directory, rank, world, lr=1e-3, batch_size=2, length=24)
    assert [name for name, _ in trainer.local_shards()] == [meta.name for meta in tensor_table(directory)]
    first = candidate(trainer)
    assert same(first, {name: copied_words(local_rows(t, rank, world)) for name, t in checkpoint.items()})

    losses = [trainer.step(), trainer.step()]
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    trainer.freeze()
    second = candidate(trainer)
    assert changed(first, second) > 0
    with pytest.raises(InternalError, match="frozen"):
        trainer.step()
    assert same(second, candidate(trainer))
    assert all(p.to_local().dtype is torch.float32 for _, p in trainer.local_shards())

    trainer.gather_canonical(gathered)
    torch.distributed.barrier()
    whole = {meta.name: tensor for meta, tensor in read_checkpoint(gathered)}
    assert tensor_table(gathered) == tensor_table(directory)
    assert same(second, {name: copied_words(local_rows(t, rank, world)) for name, t in whole.items()})

    trainer.release()
    again = Fsdp2Trainer(directory, rank, world, lr=1e-3, batch_size=2, length=24)
    assert [again.step(), again.step()] == losses
    assert same(second, candidate(again))
    other = Fsdp2Trainer(directory, rank, world, lr=1e-3, batch_size=2, length=24, seed=1)
    other.step()
    other.step()
    assert not same(second, candidate(other))

    for name, flat in first.items():
        trainer.restore_words(name, flat)
    assert same(first, candidate(trainer))
    trainer.step()
    assert changed(first, candidate(trainer)) > 0
    with pytest.raises(ValueError, match=r"shape|size"):
        trainer.restore_words("model.norm.weight", np.zeros(1000, "<u2"))


@pytest.mark.parametrize(("world", "fields"), [(2, {}), (3, UNEVEN | {"tie_word_embeddings": False})])
def test_shards_are_frozen_repeatable_and_equal_to_the_gathered_checkpoint(tmp_path, world, fields):
    directory = synthetic_checkpoint(tmp_path / "model", **fields)
    run_in_processes(world, refit_facts, directory, tmp_path / "gathered")
    assert (tmp_path / "gathered" / CONFIG_FILE).read_bytes() == (directory / CONFIG_FILE).read_bytes()


def refuse_odd_checkpoints(store, rank, world, directories):
    del store
    for directory, fault in directories:
        with pytest.raises(InvalidConfig, match=fault):
            Fsdp2Trainer(directory, rank, world)


def test_checkpoint_that_is_not_bf16_or_not_the_models_is_refused(tmp_path):
    config = synthetic_config()
    wide = synthetic_checkpoint(tmp_path / "wide", dtype="float32")
    extra = synthetic_checkpoint(tmp_path / "extra")
    tensors = synthetic_tensors(config) | {"model.extra.weight": torch.zeros(3, dtype=torch.bfloat16)}
    write_checkpoint(extra, config, tensors)
    run_in_processes(1, refuse_odd_checkpoints, [(wide, "BF16"), (extra, "does not train model.extra.weight")])


def train_the_real_model(store, rank, world, directory, report):
    del store
    trainer = Fsdp2Trainer(directory, rank, world)
    before, rates, losses = candidate(trainer), [], []
    total = sum(len(flat) for flat in before.values())
    for _ in range(2):
        losses.append(trainer.step())
        after = candidate(trainer)
        rates.append(changed(before, after) / total)
        before = after
    (report / f"{rank}.json").write_text(json.dumps({"rates": rates, "losses": losses, "total": total}))


def test_real_training_step_changes_a_small_share_of_the_stored_bits(tmp_path, smollm2):
    run_in_processes(2, train_the_real_model, Path(smollm2), tmp_path)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert sum(each["total"] for each in found) == sum(meta.numel for meta in tensor_table(smollm2)) == 134_515_008
    for each in found:
        assert all(0.002 < rate < 0.01 for rate in each["rates"])
        assert all(1 < loss < 6 for loss in each["losses"])
    assert found[0]["losses"] != found[1]["losses"]


def test_real_checkpoint_has_the_published_size_and_is_reused(smollm2, tmp_path):
    from nemo_dcr.testing.checkpoint import smollm2_checkpoint

    table = tensor_table(smollm2)
    assert (len(table), sum(meta.nbytes for meta in table), {meta.dtype for meta in table}) == (
        272,
        269_030_016,
        {"BF16"},
    )
    assert "lm_head.weight" not in {meta.name for meta in table}
    stamp = (smollm2 / SINGLE_FILE).stat().st_mtime_ns
    assert smollm2_checkpoint(smollm2) == smollm2
    assert (smollm2 / SINGLE_FILE).stat().st_mtime_ns == stamp
