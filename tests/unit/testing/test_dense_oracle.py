"""The oracle finds every differing bit, wherever it is, and says where the first one is."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words, integer_view
from nemo_dcr.testing.checkpoint import read_config
from nemo_dcr.testing.dense_check import (
    compare_storage,
    dump_storage,
    dump_tensors,
    expected_storage,
    expected_tracker,
    read_storage,
    run_job,
    storage_of,
)
from nemo_dcr.testing.reference_engine import ReferenceEngine
from nemo_dcr.testing.synthetic import synthetic_config, synthetic_tensors, write_checkpoint

ODD = {
    "scalar": torch.tensor(-0.0),
    "empty": torch.empty(0, 3, dtype=torch.bfloat16),
    "nan": torch.tensor([0x7FC1, 0xFFA5, 0x8000, 1, 0x7F80], dtype=torch.int32).to(torch.int16).view(torch.bfloat16),
    "wide": torch.tensor([float("nan"), -0.0, 5e-324], dtype=torch.float64),
    "counter": torch.tensor([2**63 - 1, -1]),
    "mask": torch.tensor([True, False]),
    "scale": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e5m2),
    "column": torch.arange(6.0).reshape(2, 3).t(),
}


class Odd(nn.Module):
    """Buffers of every kind that safetensors and torch share."""

    def __init__(self):
        super().__init__()
        for name, tensor in ODD.items():
            self.register_buffer(name, tensor.clone(), persistent=name != "mask")


def single_bit_flips(model):
    """Every stored tensor of `model`, each with one bit flipped and then put back."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel():
            last = tuple(size - 1 for size in tensor.shape)
            integer_view(tensor)[last] ^= 1
            yield name
            integer_view(tensor)[last] ^= 1


@pytest.fixture
def directory(tmp_path):
    config = synthetic_config()
    return write_checkpoint(tmp_path / "model", config, synthetic_tensors(config, seed=7, random_bits=True))


def dense_rank(directory, rank=0, tp=1):
    config = read_config(directory)
    engine = ReferenceEngine(config, rank, tp, vocab_padding=100)
    engine.load_weights(synthetic_tensors(config, seed=7, random_bits=True).items())
    return engine


def test_storage_equals_itself_with_every_dtype_shape_and_special_value():
    found = compare_storage(storage_of(Odd()), storage_of(Odd()))
    assert (found.mismatched_bits, found.first, found.equal) == (0, None, True)
    assert found.compared_elements == sum(t.numel() for t in ODD.values())


def test_one_flipped_bit_in_any_tensor_is_one_mismatched_bit_and_is_named():
    model, flipped = Odd(), []
    reference = storage_of(model)
    for name in single_bit_flips(model):
        found = compare_storage(reference, storage_of(model))
        assert found.mismatched_bits == 1
        assert found.first.startswith(f"{name}[{ODD[name].numel() - 1}] is 0x")
        flipped.append(name)
    assert set(flipped) == set(ODD) - {"empty"}
    assert compare_storage(reference, storage_of(model)).equal


def test_equal_values_with_other_bits_differ():
    zero = {"x": ("F32", (1,), np.array([0x00000000], "<u4"))}
    negative_zero = {"x": ("F32", (1,), np.array([0x80000000], "<u4"))}
    found = compare_storage(zero, negative_zero)
    assert (found.mismatched_bits, found.first) == (1, "x[0] is 0x80000000, expected 0x0")


def test_missing_unexpected_retyped_and_reshaped_tensors_count_all_their_bits():
    stored = {"x": ("BF16", (2, 3), np.zeros(6, "<u2"))}
    cases = {
        "missing": {},
        "unexpected": {**stored, "y": ("U8", (4,), np.zeros(4, "<u1"))},
        "F16": {"x": ("F16", (2, 3), np.zeros(6, "<u2"))},
        r"(3, 2)": {"x": ("BF16", (3, 2), np.zeros(6, "<u2"))},
    }
    for text, actual in cases.items():
        found = compare_storage(stored, actual)
        assert found.mismatched_bits == (32 if text == "unexpected" else 96)
        assert text in found.first


def test_missing_empty_tensor_is_a_difference_without_bits():
    found = compare_storage({"x": ("BF16", (0,), np.zeros(0, "<u2"))}, {})
    assert (found.mismatched_bits, found.equal) == (0, False)


def test_dump_and_read_keep_every_bit_and_both_names_of_shared_storage(tmp_path, directory):
    for model in (Odd(), dense_rank(directory)):
        dump_storage(model, tmp_path / "dump.safetensors")
        assert compare_storage(storage_of(model), read_storage(tmp_path / "dump.safetensors")).equal
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= read_storage(tmp_path / "dump.safetensors").keys()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("tp", [1, 2, 6])
def test_expected_storage_is_that_of_a_dense_load_on_every_rank(directory, tp):
    for rank in range(tp):
        expected = expected_storage(read_config(directory), rank, tp, directory, vocab_padding=100)
        assert compare_storage(expected, storage_of(dense_rank(directory, rank, tp))).equal


def test_flipped_bit_in_any_parameter_or_buffer_of_a_rank_is_found(directory):
    engine = dense_rank(directory, 1, 2)
    expected = expected_storage(read_config(directory), 1, 2, directory, vocab_padding=100)
    names = []
    for name in single_bit_flips(engine):
        found = compare_storage(expected, storage_of(engine))
        tied = name == "model.embed_tokens.weight"
        assert found.mismatched_bits == (2 if tied else 1)
        assert found.first.startswith("lm_head.weight[" if tied else f"{name}[")
        names.append(name)
    assert len(names) == len(list(engine.parameters())) + 2


def test_position_that_the_loader_leaves_unwritten_shows(tmp_path):
    config = synthetic_config()
    tensors = synthetic_tensors(config)
    missing = tensors.pop("model.layers.0.self_attn.v_proj.weight")
    directory = write_checkpoint(tmp_path, config, tensors)
    engine = ReferenceEngine(config, 0, 1)
    for parameter in engine.parameters():
        parameter.zero_()
    engine.load_weights(tensors.items())
    found = compare_storage(expected_storage(config, 0, 1, directory), storage_of(engine))
    assert found.mismatched_bits == missing.numel() * 16 // 2  # the poison 0xA5 has four of eight bits set
    assert found.first.startswith(f"model.layers.0.self_attn.qkv_proj.weight[{32 * 24}]")


def test_tracker_of_a_box_holds_that_slice_of_the_checkpoint():
    tensor = ODD["nan"].repeat(4, 2)
    dtype, shape, flat = expected_tracker({"w": tensor, "s": ODD["scalar"]}, "w", [(1, 3), (2, 7)])
    assert (dtype, shape) == ("BF16", (2, 5))
    assert equal_words(flat, copied_words(tensor[1:3, 2:7]))
    assert expected_tracker({"w": tensor}, "w", [(4, 4), (0, 10)])[1] == (0, 10)
    assert expected_tracker({"s": ODD["scalar"]}, "s", [])[2].tolist() == [0x80000000]


@pytest.mark.parametrize("box", [[(0, 2)], [(0, 5), (0, 10)], [(3, 2), (0, 10)], [(-1, 2), (0, 10)], [(0, 1)] * 3])
def test_box_that_does_not_fit_is_refused(box):
    with pytest.raises(ValueError, match="does not fit"):
        expected_tracker({"w": torch.zeros(4, 10)}, "w", box)


def job_of(tmp_path, directory, engines, tracker):
    receivers = []
    for rank, engine in enumerate(engines):
        dump_storage(engine, tmp_path / f"rank{rank}.safetensors")
        path = str(tmp_path / f"rank{rank}.safetensors")
        receivers.append({"name": f"a/{rank}", "rank": rank, "tp": len(engines), "storage": path})
    dump_tensors({"0": tracker}, tmp_path / "owner.safetensors")
    entry = {"key": "0", "tensor": "model.norm.weight", "box": [[12, 24]]}
    trackers = [{"name": "owner 1", "storage": str(tmp_path / "owner.safetensors"), "entries": [entry]}]
    return {"checkpoint": str(directory), "vocab_padding": 100, "receivers": receivers, "trackers": trackers}


def test_job_reports_each_dump_and_any_flipped_bit_makes_it_fail(tmp_path, directory):
    engines = [dense_rank(directory, rank, 2) for rank in range(2)]
    norm = synthetic_tensors(read_config(directory), seed=7, random_bits=True)["model.norm.weight"]
    report = run_job(job_of(tmp_path, directory, engines, norm[12:]))
    assert (report["ok"], report["mismatched_bits"]) == (True, 0)
    assert [check["name"] for check in report["checks"]] == ["a/0", "a/1", "owner 1"]
    integer_view(engines[1].model.norm.weight)[3] ^= 6
    report = run_job(job_of(tmp_path, directory, engines, norm[11:23]))
    assert report["ok"] is False
    assert [check["mismatched_bits"] > 0 for check in report["checks"]] == [False, True, True]
    assert report["checks"][1]["mismatched_bits"] == 2
    assert report["checks"][1]["first"].startswith("model.norm.weight[3] is ")


def test_job_that_compares_nothing_is_not_ok(directory):
    assert run_job({"checkpoint": str(directory)})["ok"] is False


def run_module(job, tmp_path):
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "nemo_dcr.testing.dense_check", str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)


def test_module_exits_with_zero_only_when_every_bit_is_equal(tmp_path, directory):
    engine = dense_rank(directory)
    norm = synthetic_tensors(read_config(directory), seed=7, random_bits=True)["model.norm.weight"]
    assert run_module(job_of(tmp_path, directory, [engine], norm[12:]), tmp_path)[0] == 0
    integer_view(engine.lm_head.weight)[0, 0] ^= 1
    code, report = run_module(job_of(tmp_path, directory, [engine], norm[12:]), tmp_path)
    assert (code, report["mismatched_bits"]) == (1, 2)


def test_module_answers_each_job_named_on_standard_input_with_a_line(tmp_path, directory):
    engine = dense_rank(directory)
    norm = synthetic_tensors(read_config(directory), seed=7, random_bits=True)["model.norm.weight"]
    for name, tensor in (("one", norm[12:]), ("two", norm[11:23])):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.json").write_text(json.dumps(job_of(tmp_path / name, directory, [engine], tensor)))
    command = [sys.executable, "-m", "nemo_dcr.testing.dense_check", "-"]
    jobs = f"{tmp_path / 'one.json'}\n{tmp_path / 'two.json'}\n"
    done = subprocess.run(command, input=jobs, capture_output=True, text=True, timeout=120, check=False)
    assert [json.loads(line)["ok"] for line in done.stdout.splitlines()] == [True, False]
    assert done.returncode == 1


def test_oracle_shares_no_code_with_what_it_checks():
    code = "import sys, nemo_dcr.testing.dense_check; print(*[m for m in sys.modules if m.startswith('nemo_dcr')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) <= {
        "nemo_dcr",
        "nemo_dcr.bits",
        "nemo_dcr.bits.tensors",
        "nemo_dcr.canonical",
        "nemo_dcr.errors",
        "nemo_dcr.testing",
        "nemo_dcr.testing.checkpoint",
        "nemo_dcr.testing.dense_check",
        "nemo_dcr.testing.llama_config",
        "nemo_dcr.testing.reference_engine",
    }
