"""What is wrong is refused with a typed error before anything is written."""

from __future__ import annotations

import shutil

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.apply import apply
from nemo_dcr.checkpoint.diff import diff
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.checkpoint.manifest import (
    MANIFEST,
    FileRow,
    PayloadRow,
    ShardRow,
    TensorRow,
    encode_manifest,
    payload_file,
    payload_key,
    read_manifest,
)
from nemo_dcr.checkpoint.staging import claimed, require_space
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import BaseMismatch, CheckpointInvalid, DeltaInvalid, InvalidConfig, NemoDcrError, OperatorNeeded
from tests.unit.checkpoint.checkpoints import content, flipped, safetensors_bytes, tensor, write_checkpoint

OLD = {
    "a": tensor("BF16", (40,), 1),
    "b": tensor("F32", (10,), 2),
    "gone": tensor("U8", (3,), 3),
    "same": tensor("U8", (4,), 4),
}
NEW = {"a": flipped(OLD["a"], 4, 70), "b": flipped(OLD["b"], 1), "same": OLD["same"], "new": tensor("I64", (2,), 5)}
FILES = {"config.json": b"1", "keep": b"k"}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    tmp = tmp_path_factory.mktemp("refusals")
    old = write_checkpoint(tmp / "old", OLD, files=FILES)
    new = write_checkpoint(tmp / "new", NEW, files={**FILES, "config.json": b"2"})
    diff(old, new, tmp / "delta", codec=CodecConfig(bucket_target_bytes=80))
    return tmp


def refused(error, base, deltas, out):
    """Both ways to apply are refused, and neither leaves anything behind."""
    before = content(base)
    with pytest.raises(error) as refusal:
        apply(base, deltas, out)
    assert "\n" not in str(refusal.value)
    assert sorted(path.name for path in out.parent.iterdir() if path.name.startswith(f".{out.name}")) == []
    assert not out.exists()
    with pytest.raises(error):
        apply_in_place(base, deltas)
    assert content(base) == before
    return str(refusal.value)


def test_every_flipped_byte_of_a_delta_is_refused(places, tmp_path):
    base, delta = places / "old", tmp_path / "delta"
    shutil.copytree(places / "delta", delta)
    names = sorted(content(delta))
    assert names == ["files/config.json", MANIFEST, payload_file(0), payload_file(1)]

    @given(st.data())
    def flip(data):
        path = delta / data.draw(st.sampled_from(names))
        good = path.read_bytes()
        bad = bytearray(good)
        bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(bad)
        try:
            with pytest.raises(DeltaInvalid):
                apply(base, [delta], tmp_path / "out")
        finally:
            path.write_bytes(good)

    flip()
    assert not (tmp_path / "out").exists()
    apply(base, [delta], tmp_path / "out")


@pytest.mark.parametrize("name", [MANIFEST, payload_file(0), payload_file(1), "files/config.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "directory"])
def test_missing_or_cut_file_of_a_delta_is_refused(name, damage, places, tmp_path):
    delta = tmp_path / "delta"
    shutil.copytree(places / "delta", delta)
    path = delta / name
    data = path.read_bytes()
    path.unlink()
    if damage == "directory":
        path.mkdir()
    elif damage != "missing":
        path.write_bytes({"empty": b"", "cut": data[:-1], "longer": data + b"x"}[damage])
    assert name in refused(DeltaInvalid, places / "old", [delta], tmp_path / "out")


def test_payload_of_another_delta_is_refused(places, tmp_path):
    delta, other = tmp_path / "delta", tmp_path / "other"
    shutil.copytree(places / "delta", delta)
    new = write_checkpoint(tmp_path / "new", {**NEW, "a": flipped(OLD["a"], 5)}, files=FILES)
    diff(places / "old", new, other)
    shutil.copy(other / payload_file(0), delta / payload_file(0))
    assert "another delta" in refused(DeltaInvalid, places / "old", [delta], tmp_path / "out")
    shutil.copy(places / "delta" / payload_file(0), delta)
    shutil.copy(other / payload_file(0), delta / payload_file(2))
    assert "does not name it" in refused(DeltaInvalid, places / "old", [delta], tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"a": flipped(OLD["a"], 0)},
        {"same": flipped(OLD["same"], 3)},
        {"gone": flipped(OLD["gone"], 0)},
        {"more": tensor("U8", (1,))},
        {"b": ("I32", *OLD["b"][1:])},
        {"b": ("F32", (2, 5), OLD["b"][2])},
    ],
)
def test_base_with_any_other_bit_dtype_shape_or_name_is_refused(change, places, tmp_path):
    base = write_checkpoint(tmp_path / "base", {**OLD, **change}, files=FILES)
    assert next(iter(change)) in refused(BaseMismatch, base, [places / "delta"], tmp_path / "out")


def test_base_that_lacks_a_tensor_or_a_kept_file_is_refused(places, tmp_path):
    lacking = {name: value for name, value in OLD.items() if name != "same"}
    refused(
        BaseMismatch, write_checkpoint(tmp_path / "one", lacking, files=FILES), [places / "delta"], tmp_path / "out"
    )
    base = write_checkpoint(tmp_path / "two", OLD, files={"keep": b"other"})
    assert "keep" in refused(BaseMismatch, base, [places / "delta"], tmp_path / "out")
    (base / "keep").unlink()
    refused(BaseMismatch, base, [places / "delta"], tmp_path / "out")


def test_base_with_a_damaged_file_is_refused(places, tmp_path):
    base = write_checkpoint(tmp_path / "base", OLD, files=FILES)
    (base / "model.safetensors").write_bytes(safetensors_bytes(OLD)[:-1])
    refused(CheckpointInvalid, base, [places / "delta"], tmp_path / "out")


def test_base_in_another_layout_is_accepted_because_tensors_are_bound_and_files_are_not(places, tmp_path):
    base = write_checkpoint(tmp_path / "base", dict(reversed(OLD.items())), shards=2, files=FILES)
    apply(base, [places / "delta"], tmp_path / "out")
    assert content(tmp_path / "out") == content(places / "new")


def test_links_of_a_chain_have_to_follow_each_other(places, tmp_path):
    diff(places / "new", places / "old", tmp_path / "back")
    chain = [places / "delta", tmp_path / "back"]
    refused(BaseMismatch, places / "old", [places / "delta", places / "delta"], tmp_path / "out")
    refused(BaseMismatch, places / "old", chain[::-1], tmp_path / "out")
    apply(places / "old", chain, tmp_path / "out")
    assert content(tmp_path / "out") == content(places / "old")


def test_link_that_keeps_a_file_which_the_one_before_does_not_give_is_refused(places, tmp_path):
    one = write_checkpoint(tmp_path / "one", NEW, files={**FILES, "config.json": b"another"})
    two = write_checkpoint(tmp_path / "two", OLD, files={**FILES, "config.json": b"another"})
    diff(one, two, tmp_path / "back")
    message = refused(BaseMismatch, places / "old", [places / "delta", tmp_path / "back"], tmp_path / "out")
    assert "config.json" in message


def test_output_that_holds_something_or_lies_inside_an_input_is_refused(places, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_bytes(b"")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    old, delta = places / "old", places / "delta"
    for out in (tmp_path / "full", tmp_path / "file", tmp_path / "link", old / "out", delta / "out"):
        with pytest.raises(InvalidConfig, match="--out"):
            apply(old, [delta], out)
        with pytest.raises(InvalidConfig, match="--out"):
            diff(old, delta, out)
    (tmp_path / "empty").mkdir()
    apply(old, [delta], tmp_path / "empty")
    assert content(tmp_path / "empty") == content(places / "new")


def test_space_is_checked_before_the_first_byte(places, tmp_path):
    with pytest.raises(OperatorNeeded, match="space"):
        require_space(tmp_path / "not" / "yet", 1 << 60)
    require_space(tmp_path, 0)
    # A file of a new checkpoint that claims an exabyte: the delta is consistent, the disk is too small for it.
    delta = tmp_path / "delta"
    shutil.copytree(places / "delta", delta)
    manifest = read_manifest(delta / MANIFEST)
    huge = FileRow("huge", 1 << 60, bytes(16), False)
    claim = msgspec.structs.replace(manifest, files=tuple(sorted((*manifest.files, huge), key=lambda row: row.path)))
    (delta / MANIFEST).write_bytes(encode_manifest(claim))
    with pytest.raises(OperatorNeeded, match="are needed"):
        apply(places / "old", [delta], tmp_path / "out")


def test_output_that_another_process_writes_is_left_to_it(places, tmp_path):
    with claimed(tmp_path / ".out.nemo-dcr-partial"), pytest.raises(OperatorNeeded, match="another process"):
        apply(places / "old", [places / "delta"], tmp_path / "out")
    apply(places / "old", [places / "delta"], tmp_path / "out")


def test_leftovers_of_a_killed_run_do_not_hinder_the_next(places, tmp_path):
    stale = tmp_path / ".out.nemo-dcr-partial" / "new"
    stale.mkdir(parents=True)
    (stale / "model.safetensors").write_bytes(b"half")
    apply(places / "old", [places / "delta"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def row(manifest, name, **fields):
    """The tensor rows with some fields of one of them replaced."""
    return tuple(
        TensorRow(*(fields.get(field, getattr(each, field)) for field in TensorRow.__struct_fields__))
        if each.name == name
        else each
        for each in manifest.tensors
    )


CONTRADICTIONS = {
    "base_digest": lambda m: {"base": bytes(16)},
    "target_digest": lambda m: {"target": bytes(16)},
    "row_digest": lambda m: {"tensors": row(m, "a", target=bytes(16))},
    "row_missing": lambda m: {"tensors": m.tensors[1:]},
    "row_twice": lambda m: {"tensors": (m.tensors[0], *m.tensors)},
    "rows_out_of_order": lambda m: {"tensors": (m.tensors[1], m.tensors[0], *m.tensors[2:])},
    "change_without_payload": lambda m: {"tensors": row(m, "a", payload=None)},
    "payload_without_change": lambda m: {"tensors": row(m, "same", payload=0)},
    "dense_without_payload": lambda m: {"tensors": row(m, "new", payload=None)},
    "new_as_xor": lambda m: {"tensors": row(m, "new", dense=False)},
    "too_many_changes": lambda m: {"tensors": row(m, "a", changed=41)},
    "no_changes": lambda m: {"tensors": row(m, "a", changed=0)},
    "removed_with_content": lambda m: {"tensors": row(m, "gone", dense=True)},
    "payload_unused": lambda m: {"payloads": (*m.payloads, m.payloads[0])},
    "payload_missing": lambda m: {"payloads": m.payloads[:1]},
    "payload_out_of_order": lambda m: {"tensors": row(m, "a", payload=1)},
    "no_shards": lambda m: {"shards": ()},
    "shard_header": lambda m: {"shards": (ShardRow(m.shards[0].file, m.shards[0].header[:-1] + b"x"),)},
    "shard_elsewhere": lambda m: {"shards": (ShardRow("../x.safetensors", m.shards[0].header),)},
    "shard_in_a_folder": lambda m: {"shards": (ShardRow("x/m.safetensors", m.shards[0].header),)},
    "file_elsewhere": lambda m: {"files": (FileRow("../evil", 0, bytes(16), True),)},
    "file_absolute": lambda m: {"files": (FileRow("/tmp/evil", 0, bytes(16), True),)},
    "file_over_shard": lambda m: {"files": (FileRow("model.safetensors", 0, bytes(16), True),)},
    "file_as_folder": lambda m: {
        "files": (FileRow("x", 0, bytes(16), True), FileRow("x/y", 0, bytes(16), True)),
    },
    "files_out_of_order": lambda m: {"files": m.files[::-1]},
    "removed_elsewhere": lambda m: {"removed_files": ("../../precious",)},
    "removed_and_kept": lambda m: {"removed_files": ("keep",)},
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_manifest_that_contradicts_itself_is_refused_although_its_digest_is_right(case, places, tmp_path):
    delta = tmp_path / "delta"
    shutil.copytree(places / "delta", delta)
    manifest = read_manifest(delta / MANIFEST)
    assert encode_manifest(manifest) == (delta / MANIFEST).read_bytes()
    (delta / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, **CONTRADICTIONS[case](manifest))))
    assert MANIFEST in refused(DeltaInvalid, places / "old", [delta], tmp_path / "out")


def test_manifest_of_a_later_version_says_upgrade(places, tmp_path):
    delta = tmp_path / "delta"
    shutil.copytree(places / "delta", delta)
    data = bytearray((delta / MANIFEST).read_bytes())
    data[4] = 2
    (delta / MANIFEST).write_bytes(data)
    assert "upgrade" in refused(DeltaInvalid, places / "old", [delta], tmp_path / "out")


WORDS = np.array([1, 2], dtype="<u8")
META = TensorMeta("new", (2,), "I64")
LIES = {
    "another_tensor": [Item.run(TensorMeta("x", (2,), "I64"), Encoding.OVERWRITE, 0, WORDS)],
    "another_shape": [Item.run(TensorMeta("new", (1, 2), "I64"), Encoding.OVERWRITE, 0, WORDS)],
    "xor_for_dense": [Item.run(META, Encoding.XOR, 0, WORDS)],
    "part_of_dense": [Item.run(META, Encoding.OVERWRITE, 0, WORDS[:1])],
    "other_words": [Item.run(META, Encoding.OVERWRITE, 0, WORDS)],
    "nothing": [],
}


@pytest.mark.parametrize("case", LIES)
def test_payload_that_is_whole_but_not_what_the_manifest_promises_leaves_nothing(case, places, tmp_path):
    delta = tmp_path / "delta"
    shutil.copytree(places / "delta", delta)
    manifest = read_manifest(delta / MANIFEST)
    number = manifest.rows["new"].payload
    honest = verify_payload((delta / payload_file(number)).read_bytes(), limits=CodecConfig()).decode(skip={"new"})
    lie = encode_payload(payload_key(number), [*honest, *LIES[case]])
    (delta / payload_file(number)).write_bytes(lie.data)
    payloads = list(manifest.payloads)
    payloads[number] = PayloadRow(lie.digest, len(lie.data))
    (delta / MANIFEST).write_bytes(encode_manifest(msgspec.structs.replace(manifest, payloads=tuple(payloads))))
    # Words that are only wrong show when the result is read back; everything else when the item is decoded.
    refused(CheckpointInvalid if case == "other_words" else DeltaInvalid, places / "old", [delta], tmp_path / "out")


def test_diff_of_a_damaged_checkpoint_leaves_no_delta(places, tmp_path):
    bad = write_checkpoint(tmp_path / "bad", OLD)
    (bad / "model.safetensors").write_bytes(b"\0" * 12)
    for pair in ((bad, places / "new"), (places / "old", bad)):
        with pytest.raises(NemoDcrError):
            diff(*pair, tmp_path / "delta")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]
