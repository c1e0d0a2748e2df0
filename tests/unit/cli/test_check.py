"""The independent oracle is one process for a whole run, and what it answers is counted."""

from __future__ import annotations

import pytest
import torch

from nemo_dcr.bits.tensors import copied_words, dtype_name
from nemo_dcr.cli.check import DumpedReceiver, DumpedTrackers, Oracle
from nemo_dcr.cli.job import plan_job
from nemo_dcr.errors import InternalError
from nemo_dcr.ids import InstanceId, OwnerId, receiver_id
from nemo_dcr.runtime.methods import BoxRow, Storage, TensorRow
from nemo_dcr.testing.checkpoint import read_config
from nemo_dcr.testing.dense_check import stored_tensors
from nemo_dcr.testing.reference_engine import ReferenceEngine
from nemo_dcr.testing.synthetic import synthetic_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def job(tmp_path):
    found = plan_job(tmp_path / "run", synthetic_checkpoint(tmp_path / "model"))
    found.save()
    return found


@pytest.fixture
def oracle(job):
    found = Oracle(job)
    yield found
    found.close()


def row(name, tensor):
    return TensorRow(name, tuple(tensor.shape), dtype_name(tensor.dtype))


def receiver_of(job, flipped=False):
    """The dump of the unsharded instance after a dense load, perhaps with one bit flipped."""
    from nemo_dcr.testing.checkpoint import read_checkpoint

    instance = next(name for name, ranks in job.instances.items() if ranks == 1)
    engine = ReferenceEngine(read_config(job.directory.parent / "model"), 0, 1, vocab_padding=1000)
    checkpoint = job.directory.parent / "model"
    engine.load_weights((meta.name, tensor) for meta, tensor in read_checkpoint(checkpoint))
    tensors = dict(stored_tensors(engine))
    frames = [copied_words(tensor) for tensor in tensors.values()]
    if flipped:
        frames[0][0] ^= 4
    storage = Storage(tuple(row(name, tensor) for name, tensor in tensors.items()))
    return DumpedReceiver(receiver_id(InstanceId(instance), 0), storage, tuple(words.tobytes() for words in frames))


def tracker_of(tensor, name):
    box = BoxRow(tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape), tuple(range(tensor.ndim)))
    return DumpedTrackers(OwnerId(0), Storage((row(name, tensor),), (box,)), (copied_words(tensor).tobytes(),))


def test_one_process_answers_every_comparison_and_counts_each_bit(job, oracle):
    weights = job.directory.parent / "model"
    name = "model.norm.weight"
    norm = torch.zeros(dict(stored_tensors(ReferenceEngine(read_config(weights), 0, 1)))[name].shape).bfloat16()
    first = oracle.check([receiver_of(job)], [], weights)
    process = oracle._process
    wrong = oracle.check([receiver_of(job, flipped=True)], [tracker_of(norm, name)], weights)
    assert list(first.values()) == [0]
    assert [wrong[receiver] for receiver in first] == [1]
    assert wrong["owner-0"] > 0
    assert oracle._process is process


def test_a_comparison_that_cannot_be_made_is_no_verdict(job, oracle):
    with pytest.raises(InternalError, match=r"the independent check ended with 1: [\s\S]*config.json is missing"):
        oracle.check([receiver_of(job)], [], job.directory / "missing")


def test_nothing_to_compare_is_no_verdict(job, oracle):
    with pytest.raises(InternalError, match="does not add up"):
        oracle.check([], [], job.directory.parent / "model")
