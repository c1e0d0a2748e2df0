"""The staging area: declared order, a budget of memory, spilled payloads that come back whole or not at all."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import VerifiedPayload, encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import AttemptFailed, PayloadCorrupt
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.receiver.spill_file import Place, SpillFile
from nemo_dcr.receiver.staging import StagingArea

CODEC = CodecConfig()


def payload(number: int, owner: int = 0, *, elements: int = 400) -> VerifiedPayload:
    values = np.random.default_rng([number, owner]).integers(0, 1 << 16, elements).astype("<u2")
    item = Item.run(TensorMeta("w", (elements,), "BF16"), Encoding.XOR, 0, values)
    encoded = encode_payload(PayloadKey(AttemptId(3), OwnerId(owner), number), [item])
    return verify_payload(encoded.data, limits=CODEC)


def area(directory: Path, *, budget_bytes: int = 1 << 30) -> StagingArea:
    return StagingArea(CODEC, budget_bytes=budget_bytes, directory=str(directory))


def taken(staging: StagingArea) -> list[tuple[int, int]]:
    found = []
    while (each := staging.take()) is not None:
        found.append((each.key.owner, each.key.payload))
    return found


def open_files(directory: Path) -> list[str]:
    """What this process has open below a directory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [file for file in found if file.startswith(str(directory))]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1000], ids=["memory", "spilled"])
def test_each_owner_is_in_declared_order_and_owners_take_turns_as_they_came(tmp_path: Path, budget_bytes: int) -> None:
    staging = area(tmp_path, budget_bytes=budget_bytes)
    for number, owner in [(2, 0), (0, 1), (0, 0), (3, 0), (1, 1), (1, 0)]:
        staging.add(payload(number, owner))
        staging.spill()
    assert taken(staging) == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1), (0, 3)]
    assert len(staging) == 0


def test_memory_stays_within_the_budget_and_every_byte_comes_back(tmp_path: Path) -> None:
    before = open_descriptors()
    payloads = [payload(number) for number in range(8)]
    staging = area(tmp_path, budget_bytes=3 * payloads[0].nbytes + 100)
    for each in payloads:
        staging.add(each)
        staging.spill()
        assert staging.memory_bytes <= 3 * payloads[0].nbytes + 100
    assert staging.spilled == 5
    assert open_descriptors() == before + 1
    for each in payloads:
        found = staging.take()
        assert found is not None
        assert bytes(found.data) == bytes(each.data)
    assert (staging.spilled, staging.memory_bytes, open_descriptors()) == (0, 0, before)


def test_a_spill_file_has_no_name_so_that_no_death_leaves_it_behind(tmp_path: Path) -> None:
    staging = area(tmp_path, budget_bytes=1)
    staging.add(payload(0))
    assert staging.spill() == 1
    assert list(tmp_path.iterdir()) == []
    assert [file.endswith("(deleted)") for file in open_files(tmp_path)] == [True]
    staging.close()
    assert open_files(tmp_path) == []


def test_a_payload_that_reads_back_altered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SpillFile.read

    def altered(self: SpillFile, place: Place) -> bytearray:
        data = whole(self, place)
        data[len(data) // 2] ^= 1
        return data

    staging = area(tmp_path, budget_bytes=1)
    staging.add(payload(0))
    staging.spill()
    monkeypatch.setattr(SpillFile, "read", altered)
    with pytest.raises(PayloadCorrupt):
        staging.take()


def test_a_valid_payload_in_another_ones_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging, other = area(tmp_path, budget_bytes=1), payload(5)
    staging.add(payload(0))
    staging.spill()
    monkeypatch.setattr(SpillFile, "read", lambda self, place: bytearray(other.data))
    with pytest.raises(PayloadCorrupt, match="another payload"):
        staging.take()


def test_a_directory_that_takes_nothing_fails_the_attempt_and_says_what_to_do(tmp_path: Path) -> None:
    before = open_descriptors()
    staging = area(tmp_path / "absent", budget_bytes=1)
    staging.add(payload(0))
    with pytest.raises(AttemptFailed, match=r"free space in .*absent, or raise queue.staging_bytes"):
        staging.spill()
    assert taken(staging) == [(0, 0)]
    assert open_descriptors() == before


def test_a_full_disk_fails_the_attempt_and_frees_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, "No space left on device")

    before = open_descriptors()
    staging = area(tmp_path, budget_bytes=1)
    staging.add(payload(0))
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(AttemptFailed, match="No space left"):
        staging.spill()
    assert open_descriptors() == before


def test_a_closed_area_keeps_nothing_and_takes_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    staging = area(tmp_path, budget_bytes=1)
    for number in range(3):
        staging.add(payload(number))
    staging.spill()
    staging.close()
    assert (len(staging), staging.memory_bytes, staging.spilled, open_descriptors()) == (0, 0, 0, before)
    staging.add(payload(9))
    assert (len(staging), staging.take(), staging.spill()) == (0, None, 0)


@pytest.mark.parametrize("meanwhile", ["take", "close"])
def test_a_payload_may_be_given_out_or_dropped_while_it_is_being_spilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    before = open_descriptors()
    staging = area(tmp_path, budget_bytes=1)
    staging.add(payload(0))
    act: dict[str, Callable[[], object]] = {"take": staging.take, "close": staging.close}
    whole, found = SpillFile.write, list[object]()

    def interrupted(self: SpillFile, data: memoryview) -> Place:
        place = whole(self, data)
        found.append(act[meanwhile]())
        return place

    monkeypatch.setattr(SpillFile, "write", interrupted)
    assert staging.spill() == 0
    assert (found[0] is None) == (meanwhile == "close")
    assert (len(staging), staging.memory_bytes, staging.spilled, open_descriptors()) == (0, 0, 0, before)


def test_a_close_while_another_thread_reads_waits_for_nothing_and_leaks_nothing(tmp_path: Path) -> None:
    before = open_descriptors()
    file = SpillFile(str(tmp_path))
    place = file.write(memoryview(b"abc"))
    with file._using():
        file.close()
        assert open_descriptors() == before + 1
    assert open_descriptors() == before
    with pytest.raises(AttemptFailed, match="was closed"):
        file.read(place)


def test_one_thread_adds_and_spills_while_another_takes(tmp_path: Path) -> None:
    payloads = [payload(number, elements=64) for number in range(200)]
    staging = area(tmp_path, budget_bytes=5 * payloads[0].nbytes)
    before, found = open_descriptors(), list[int]()
    done = threading.Event()

    def take() -> None:
        while len(found) < len(payloads) and not done.is_set():
            each = staging.take()
            if each is not None:
                found.append(each.key.payload)

    taker = threading.Thread(target=take)
    taker.start()
    for each in payloads:
        staging.add(each)
        staging.spill()
    taker.join(30.0)
    done.set()
    assert sorted(found) == list(range(200))
    assert (staging.memory_bytes, staging.spilled, open_descriptors()) == (0, 0, before)
