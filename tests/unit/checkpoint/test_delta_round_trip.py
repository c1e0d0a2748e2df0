"""What diff writes, apply turns into the new checkpoint: every file, byte for byte."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_dcr.checkpoint.apply import apply
from nemo_dcr.checkpoint.delta import Delta
from nemo_dcr.checkpoint.diff import DIFF_CODEC, diff
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.checkpoint.inspection import inspect
from nemo_dcr.checkpoint.manifest import MANIFEST, payload_file
from nemo_dcr.codec.payload import verify_payload
from nemo_dcr.codec.records import Encoding
from nemo_dcr.config import CodecConfig
from tests.unit.checkpoint.checkpoints import BITS, content, flipped, tensor, write_checkpoint

SMALL = CodecConfig(bucket_target_bytes=64)


def run(tmp: Path, old: Path, new: Path, codec: CodecConfig = DIFF_CODEC) -> Path:
    """Write the delta, apply it both ways, and compare every file with `new`; returns the delta."""
    delta = tmp / "delta"
    report = diff(old, new, delta, codec=codec, sync=False)
    assert report.delta_bytes == sum(len(data) for data in content(delta).values())
    apply(old, [delta], tmp / "out", sync=False)
    assert content(tmp / "out") == content(new)
    shutil.copytree(old, tmp / "place")
    apply_in_place(tmp / "place", [delta])
    assert content(tmp / "place") == content(new)
    return delta


def test_added_removed_reshaped_retyped_and_changed_tensors_come_out_as_in_new(tmp_path):
    same = tensor("BF16", (4, 8), 1)
    old = {
        "same": same,
        "changed": tensor("BF16", (16, 16), 2),
        "reshaped": ("F32", (2, 6), tensor("F32", (12,), 3)[2]),
        "retyped": tensor("F16", (5,), 4),
        "removed": tensor("I64", (3,), 5),
    }
    new = {
        "added": tensor("F64", (3,), 6),
        "changed": flipped(old["changed"], 0, 77, 511),
        "same": same,
        "reshaped": ("F32", (12,), old["reshaped"][2]),
        "retyped": ("BF16", (5,), old["retyped"][2]),
    }
    delta = run(tmp_path, write_checkpoint(tmp_path / "a", old), write_checkpoint(tmp_path / "b", new, shards=2))
    manifest = Delta(delta).manifest
    assert {name: (row.dense, row.changed) for name, row in manifest.rows.items()} == {
        "added": (True, 3),
        "changed": (False, 3),
        "same": (False, 0),
        "reshaped": (True, 12),
        "retyped": (True, 5),
        "removed": (False, 0),
    }
    assert manifest.rows["removed"].target is None
    encodings = {item.tensor: (item.encoding, item.entries) for item in inspect(delta).payloads[0].items}
    assert encodings["changed"] == ("xor", 3)
    assert encodings["reshaped"] == ("overwrite", 12)


@pytest.mark.parametrize("dtype", sorted(BITS))
def test_every_dtype_travels_by_xor_also_as_scalar_and_empty(dtype, tmp_path):
    scalar = (8,) if BITS[dtype] < 8 else ()  # one element of a packed dtype is not a whole byte
    old = {"x": tensor(dtype, (4, 16), 1), "scalar": tensor(dtype, scalar, 2), "empty": tensor(dtype, (0, 3))}
    new = {"x": flipped(old["x"], 0, 9), "scalar": flipped(old["scalar"], 0), "empty": old["empty"]}
    delta = run(tmp_path, write_checkpoint(tmp_path / "a", old), write_checkpoint(tmp_path / "b", new))
    assert {(row.dense, bool(row.changed)) for row in Delta(delta).manifest.tensors} == {(False, True), (False, False)}


def test_signed_zero_subnormal_and_nan_payload_changes_travel(tmp_path):
    words = np.array([0x0000, 0x8000, 0x0001, 0x7FC0, 0x7FC1, 0xFFA5, 0x7F80, 0x3F80], dtype="<u2")
    rolled = np.roll(words, 1)
    old, new = ({"w": ("BF16", (8,), data.tobytes())} for data in (words, rolled))
    delta = run(tmp_path, write_checkpoint(tmp_path / "a", old), write_checkpoint(tmp_path / "b", new))
    assert Delta(delta).manifest.rows["w"].changed == 8


def test_equal_checkpoints_give_a_delta_without_payloads(tmp_path):
    tensors = {"w": tensor("BF16", (9,))}
    old, new = (write_checkpoint(tmp_path / name, tensors, files={"config.json": b"{}"}) for name in "ab")
    delta = run(tmp_path, old, new)
    assert sorted(content(delta)) == [MANIFEST]


def test_changed_layout_and_metadata_alone_travel_in_the_manifest(tmp_path):
    tensors = {name: tensor("F32", (6,), seed) for seed, name in enumerate("abc")}
    old = write_checkpoint(tmp_path / "a", tensors, metadata={"format": "pt"}, files={"x/y.txt": b"1", "keep": b"k"})
    backwards = dict(reversed(tensors.items()))
    new = write_checkpoint(tmp_path / "b", backwards, shards=3, metadata={"step": "2"}, files={"keep": b"k"})
    delta = run(tmp_path, old, new)
    assert sorted(content(delta)) == ["files/model.safetensors.index.json", MANIFEST]
    assert not (tmp_path / "place" / "x").exists()


def test_other_files_are_carried_kept_or_removed(tmp_path):
    tensors = {"w": tensor("BF16", (9,))}
    old = write_checkpoint(tmp_path / "a", tensors, files={"config.json": b"1", "tokenizer.json": b"same", "gone": b""})
    files = {"config.json": b"2", "tokenizer.json": b"same", "sub/deep/added.bin": bytes(5), "empty": b""}
    delta = run(tmp_path, old, write_checkpoint(tmp_path / "b", tensors, files=files))
    manifest = Delta(delta).manifest
    assert {row.path: row.carried for row in manifest.files} == {
        "config.json": True,
        "empty": True,
        "sub/deep/added.bin": True,
        "tokenizer.json": False,
    }
    assert manifest.removed_files == ("gone",)
    assert set(content(delta / "files")) == {"config.json", "empty", "sub/deep/added.bin"}


def test_in_place_leaves_files_that_no_delta_knows(tmp_path):
    old = write_checkpoint(tmp_path / "a", {"w": tensor("U8", (9,), 1)}, files={"gone": b"1"})
    new = write_checkpoint(tmp_path / "b", {"w": tensor("U8", (9,), 2)})
    diff(old, new, tmp_path / "delta")
    (old / "notes.txt").write_bytes(b"mine")
    assert apply_in_place(old, [tmp_path / "delta"]).removed_files == 1
    assert content(old) == {**content(new), "notes.txt": b"mine"}


def test_payloads_are_wire_format_1_and_split_at_the_bucket_target(tmp_path):
    old = {f"w{number}": tensor("BF16", (32,), number) for number in range(5)}
    new = {name: flipped(value, 3) for name, value in old.items()}
    delta = run(tmp_path, write_checkpoint(tmp_path / "a", old), write_checkpoint(tmp_path / "b", new), SMALL)
    rows = Delta(delta).manifest.payloads
    assert len(rows) == 5
    for number, row in enumerate(rows):
        payload = verify_payload((delta / payload_file(number)).read_bytes(), limits=CodecConfig())
        (item,) = payload.decode()
        assert (str(payload.key), payload.digest, item.encoding) == (f"1/0/{number}", row.digest, Encoding.XOR)


def test_tensor_that_changed_nearly_everywhere_travels_as_one_xor_run(tmp_path):
    old = {"w": tensor("BF16", (100,), 1), "v": tensor("BF16", (100,), 2)}
    new = {"w": flipped(old["w"], *range(0, 102, 2)), "v": flipped(old["v"], *range(0, 100, 2))}
    delta = run(tmp_path, write_checkpoint(tmp_path / "a", old), write_checkpoint(tmp_path / "b", new))
    items = {item.tensor: item for item in inspect(delta).payloads[0].items}
    assert (items["w"].entries, items["w"].changed, items["w"].location) == (100, 51, "run")
    assert (items["v"].entries, items["v"].changed) == (50, 50)


def test_chain_in_one_go_equals_its_steps_also_when_the_layout_turns_round(tmp_path):
    a = {name: tensor("BF16", (20,), seed) for seed, name in enumerate("pqrs")}
    b = {name: flipped(value, seed) for seed, (name, value) in enumerate(reversed(a.items()))} | {
        "new": tensor("U8", (7,))
    }
    c = {name: flipped(value, 6) for name, value in sorted(b.items()) if name != "q"} | {"p": tensor("F32", (2, 2))}
    d = {name: flipped(value, 2) for name, value in reversed(c.items())} | {"q": tensor("BF16", (20,), 9)}
    files = [{"f": b"1", "g": b"1"}, {"f": b"2", "g": b"1"}, {"f": b"2", "h": b"3"}, {"f": b"2", "g": b"1"}]
    places = [
        write_checkpoint(tmp_path / name, tensors, shards=shards, files=beside)
        for name, tensors, shards, beside in zip("abcd", (a, b, c, d), (1, 3, 1, 2), files, strict=True)
    ]
    deltas = [tmp_path / f"delta{number}" for number in range(3)]
    for old, new, delta in zip(places, places[1:], deltas, strict=False):
        diff(old, new, delta, codec=SMALL)
    report = apply(places[0], deltas, tmp_path / "out")
    assert report.deltas == 3
    assert content(tmp_path / "out") == content(places[3])
    apply_in_place(places[0], deltas[:2])
    assert content(places[0]) == content(places[2])
    apply_in_place(places[0], deltas[2:])
    assert content(places[0]) == content(places[3])


NAMES = st.sampled_from(["a", "layer.0.weight", "ünï cødé", "x" * 200])
TENSORS = st.dictionaries(
    NAMES,
    st.builds(
        tensor,
        st.sampled_from(sorted(BITS)),
        st.sampled_from([(8,), (2, 4), (0,), (4, 0, 8), (8, 40), (1, 1, 8)]),
        st.integers(0, 3),
    ),
    max_size=4,
)


@settings(max_examples=40)
@given(st.data(), TENSORS)
def test_any_two_checkpoints(data, old):
    new = {name: value for name, value in old.items() if data.draw(st.booleans())}
    for name, value in new.items():
        if value[2] and data.draw(st.booleans()):
            positions = data.draw(st.sets(st.integers(0, len(value[2]) - 1), max_size=len(value[2])))
            new[name] = flipped(value, *positions)
    new |= data.draw(TENSORS)
    shards = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    with tempfile.TemporaryDirectory() as directory:
        tmp = Path(directory)
        places = [
            write_checkpoint(tmp / name, tensors, shards=count if len(tensors) > 1 else 1)
            for name, tensors, count in (("a", old, shards[0]), ("b", new, shards[1]))
        ]
        run(tmp, *places, data.draw(st.sampled_from([DIFF_CODEC, SMALL])))
