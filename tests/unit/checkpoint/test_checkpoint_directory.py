"""Directories: which file is the checkpoint, which files lie beside it, and words that alias the file."""

from __future__ import annotations

import json

import pytest

from nemo_dcr.checkpoint.directory import JOURNAL, WORK_DIRECTORY, open_checkpoint, safe_path
from nemo_dcr.errors import CheckpointInvalid, InvalidConfig
from tests.unit.checkpoint.checkpoints import BITS, safetensors_bytes, tensor, write_checkpoint

TENSORS = {"b": tensor("BF16", (3, 5)), "a": tensor("F32", ()), "c": tensor("U8", (0,))}


def test_words_are_the_stored_bits_of_every_dtype_also_where_the_file_is_not_aligned(tmp_path):
    tensors = {"odd": tensor("U8", (1,))} | {dtype: tensor(dtype, (8,), seed) for seed, dtype in enumerate(BITS)}
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "c", tensors))
    for name, (_, _, data) in tensors.items():
        assert checkpoint.words(name).tobytes() == data
        assert not checkpoint.words(name).flags.writeable


def test_single_file_of_any_name_and_shards_with_an_index_are_found(tmp_path):
    one = write_checkpoint(tmp_path / "one", TENSORS, files={"config.json": b"{}", "sub/notes.txt": b"x"})
    assert open_checkpoint(one).files == ("config.json", "sub/notes.txt")
    (one / "model.safetensors").rename(one / "adapter_model.safetensors")
    assert list(open_checkpoint(one).tensors) == ["b", "a", "c"]
    many = open_checkpoint(write_checkpoint(tmp_path / "many", TENSORS, shards=3))
    assert list(many.shards) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert many.files == ("model.safetensors.index.json",)
    assert {name: many.words(name).tobytes() for name in TENSORS} == {name: t[2] for name, t in TENSORS.items()}


def test_files_beside_an_index_are_carried_as_they_are_and_dot_folders_are_left_alone(tmp_path):
    files = {"consolidated.safetensors": b"not even one", ".gitattributes": b"x", ".git/HEAD": b"y"}
    directory = write_checkpoint(tmp_path / "c", TENSORS, shards=2, files=files)
    wanted = (".gitattributes", "consolidated.safetensors", "model.safetensors.index.json")
    assert open_checkpoint(directory).files == wanted


def test_link_to_a_file_is_read_through_and_link_to_a_directory_is_refused(tmp_path):
    real = write_checkpoint(tmp_path / "real", TENSORS, files={"config.json": b"{}"})
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("model.safetensors", "config.json"):
        (linked / name).symlink_to(real / name)
    assert open_checkpoint(linked).words("b").tobytes() == TENSORS["b"][2]
    (linked / "more").symlink_to(real)
    with pytest.raises(CheckpointInvalid, match="link to a directory"):
        open_checkpoint(linked)


def test_directory_without_one_checkpoint_is_a_usage_error(tmp_path):
    with pytest.raises(InvalidConfig, match="not a directory"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(InvalidConfig, match="no safetensors file"):
        open_checkpoint(tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(safetensors_bytes(TENSORS))
    with pytest.raises(InvalidConfig, match="2 checkpoints"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"{", "weight_map"),
        (b"[]", "weight_map"),
        (b'{"weight_map": 3}', "weight_map"),
        (b'{"weight_map": {}}', "empty"),
        (b'{"weight_map": {"b": "../model.safetensors"}}', "elsewhere"),
        (b'{"weight_map": {"b": ".."}}', "elsewhere"),
        (b'{"weight_map": {"b": "none.safetensors"}}', "cannot be read"),
        (b'{"weight_map": {"d": "model.safetensors"}}', "does not hold 'd'"),
    ],
)
def test_index_that_names_what_is_not_there_is_refused(index, message, tmp_path):
    directory = write_checkpoint(tmp_path / "c", TENSORS)
    (directory / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(CheckpointInvalid, match=message):
        open_checkpoint(directory)


def test_tensor_in_two_files_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path / "c", TENSORS)
    (directory / "other.safetensors").write_bytes(safetensors_bytes(TENSORS))
    index = {"weight_map": {"b": "model.safetensors", "a": "other.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointInvalid, match="in two files"):
        open_checkpoint(directory)


def test_checkpoint_with_a_journal_is_refused_because_it_may_be_a_mixture(tmp_path):
    directory = write_checkpoint(tmp_path / "c", TENSORS)
    (directory / WORK_DIRECTORY).mkdir()
    assert open_checkpoint(directory).files == ()
    (directory / WORK_DIRECTORY / JOURNAL).write_bytes(b"")
    with pytest.raises(CheckpointInvalid, match="run that command again"):
        open_checkpoint(directory)


def test_file_that_became_shorter_is_a_typed_error(tmp_path):
    directory = write_checkpoint(tmp_path / "c", {"a": tensor("U8", (10_000,))})
    checkpoint = open_checkpoint(directory)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointInvalid, match="cannot be mapped"):
        checkpoint.words("a")


@pytest.mark.parametrize(
    "path",
    ["", ".", "..", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "./a", "a\0b", f"{WORK_DIRECTORY}/journal"],
)
def test_path_that_leaves_the_checkpoint_is_not_safe(path):
    assert not safe_path(path)


@pytest.mark.parametrize("path", ["a", "a/b.json", ".gitattributes", "a..b/..c"])
def test_plain_relative_path_is_safe(path):
    assert safe_path(path)
