"""verify finds the first differing bit; inspect shows what travels."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from nemo_dcr.checkpoint.compare import count_changes
from nemo_dcr.checkpoint.diff import diff
from nemo_dcr.checkpoint.inspection import inspect
from nemo_dcr.checkpoint.manifest import payload_file
from nemo_dcr.checkpoint.verify import FirstDifference, verify
from nemo_dcr.errors import DeltaInvalid, InvalidConfig
from nemo_dcr.kernels.plain import BLOCK_BYTES
from tests.unit.checkpoint.checkpoints import content, flipped, tensor, write_checkpoint

OLD = {
    "b": ("BF16", (4,), bytes.fromhex("0000 0080 c17f 0100")),
    "a": tensor("U8", (5,), 2),
    "d": tensor("F32", (0,)),
    "e": tensor("F4", (3, 2), 1),
}


def differing(tmp_path, new, **options):
    old = write_checkpoint(tmp_path / "old", OLD, files={"config.json": b"1"})
    return verify(old, write_checkpoint(tmp_path / "new", new, **options), files=True)


def test_equal_tensors_in_another_layout_are_equal_and_only_files_differ(tmp_path):
    report = differing(tmp_path, dict(reversed(OLD.items())), shards=2, files={"config.json": b"1"})
    assert (report.first, report.differing_elements, report.total_elements) == (None, 0, 12)
    assert not report.equal
    assert report.differing_files == (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors",
        "model.safetensors.index.json",
    )
    assert verify(tmp_path / "old", tmp_path / "new").equal


def test_first_difference_is_the_first_in_name_order_with_index_and_both_words(tmp_path):
    report = differing(tmp_path, {**OLD, "b": flipped(OLD["b"], 2, 4), "e": flipped(OLD["e"], 2)}, files={})
    assert report.first == FirstDifference("b", 1, "0x8000", "0x8001")
    assert (report.differing_tensors, report.differing_elements) == (2, 3)
    assert (report.equal, report.differing_files) == (False, ("config.json",))


def test_minus_zero_differs_from_zero_and_a_nan_equals_itself(tmp_path):
    zero = ("BF16", (4,), bytes.fromhex("0080 0080 c17f 0100"))
    report = differing(tmp_path, {**OLD, "b": zero}, files={"config.json": b"1"})
    assert (report.first, report.differing_elements) == (FirstDifference("b", 0, "0x0000", "0x8000"), 1)


def test_missing_and_unlike_tensors_are_counted_apart(tmp_path):
    new = {"b": ("F16", *OLD["b"][1:]), "d": ("F32", (0, 1), b""), "e": OLD["e"], "f": OLD["d"]}
    report = differing(tmp_path, new, files={"config.json": b"1"})
    assert (report.missing_tensors, report.unlike_tensors, report.differing_tensors) == (2, 2, 0)
    assert report.first == FirstDifference("a", None, "U8 [5]", None)


def test_first_change_is_found_in_any_block():
    words = np.zeros(3 * BLOCK_BYTES + 7, dtype="<u1")
    for index in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES + 6):
        other = words.copy()
        other[index:] ^= 1
        assert count_changes(other, words) == (len(words) - index, index)
    assert count_changes(words, words) == (0, None)
    with pytest.raises(ValueError, match="cannot compare"):
        count_changes(words, words[1:])


def test_inspect_lists_items_counts_sizes_and_rates(tmp_path):
    big = tensor("BF16", (1000,), 1)
    old = write_checkpoint(tmp_path / "old", {**OLD, "big": big}, files={"gone": b"", "keep": b""})
    changed = flipped(big, *range(0, 2000, 200))
    new = write_checkpoint(tmp_path / "new", {**OLD, "big": changed, "n": tensor("F32", (2,))}, files={"keep": b""})
    report = diff(old, new, tmp_path / "delta")
    view = inspect(tmp_path / "delta")
    assert view.nbytes == report.delta_bytes == sum(len(data) for data in content(tmp_path / "delta").values())
    assert (view.delta.base, view.delta.target) == (report.base, report.target)
    assert (view.delta.changed_elements, view.delta.total_elements) == (10, 4 + 5 + 3 + 1000 + 2)
    assert (view.delta.removed_files, view.delta.kept_files, view.delta.carried_files) == (("gone",), ("keep",), ())
    (payload,) = view.payloads
    assert inspect(tmp_path / "delta" / payload_file(0)).payloads == (payload,)
    big_item, new_item = payload.items
    assert (big_item.encoding, big_item.location, big_item.entries, big_item.rate) == ("xor", "chain_u8", 10, 0.01)
    assert (big_item.location_bytes, big_item.value_bytes) == (9, 20)
    assert (new_item.encoding, new_item.location, new_item.shape) == ("overwrite", "run", (2,))
    assert view.encodings == {"overwrite": 1, "xor": 1}
    assert view.locations == {"chain_u8": 1, "run": 1}


def test_inspect_refuses_what_is_damaged_or_not_there(tmp_path):
    old = write_checkpoint(tmp_path / "old", {"a": tensor("U8", (50,), 1)})
    diff(old, write_checkpoint(tmp_path / "new", {"a": tensor("U8", (50,), 2)}), tmp_path / "delta")
    path = tmp_path / "delta" / payload_file(0)
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    for place in (tmp_path / "delta", path, old):
        with pytest.raises(DeltaInvalid):
            inspect(place)
    shutil.rmtree(tmp_path / "delta")
    with pytest.raises(InvalidConfig):
        inspect(tmp_path / "delta")
