"""The staging queue: validation and deduplication before decoding, bounds, order and stop."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import QueueConfig
from nemo_dcr.errors import PayloadCorrupt
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.receiver.ingest import Ingest, Verdict

WEIGHT = TensorMeta("w", (8,), "BF16")
BIAS = TensorMeta("b", (2,), "F32")
TABLE = {"w": WEIGHT, "b": BIAS}


def payload(number: int, *, attempt: int = 3, word: int = 5, meta: TensorMeta = WEIGHT) -> bytes:
    values = np.array([word], dtype="<u2" if meta.dtype == "BF16" else "<u4")
    item = Item.run(meta, Encoding.XOR, 0, values)
    return encode_payload(PayloadKey(AttemptId(attempt), OwnerId(0), number), [item]).data


def ingest(**options: object) -> Ingest:
    return Ingest(AttemptId(3), TABLE, **options)  # type: ignore[arg-type]


def test_a_payload_that_comes_twice_is_applied_once() -> None:
    queue = ingest()
    assert queue.offer(payload(0)) is Verdict.ACCEPTED
    assert queue.offer(payload(0)) is Verdict.DUPLICATE
    assert [entry.key.payload for entry in queue.take_group(0)] == [0]
    assert queue.offer(payload(0)) is Verdict.DUPLICATE
    assert queue.take_group(0) == ()


def test_a_key_with_other_bytes_fails_the_attempt() -> None:
    queue = ingest()
    queue.offer(payload(0, word=5))
    with pytest.raises(PayloadCorrupt, match="same identifier"):
        queue.offer(payload(0, word=6))


def test_a_payload_of_another_attempt_is_ignored() -> None:
    queue = ingest()
    assert queue.offer(payload(0, attempt=2)) is Verdict.STALE
    assert queue.offer(payload(0, attempt=4)) is Verdict.STALE
    assert queue.accepted == {}


def test_an_altered_payload_is_refused_before_it_is_staged() -> None:
    data = bytearray(payload(0))
    data[-20] ^= 1
    queue = ingest()
    with pytest.raises(PayloadCorrupt):
        queue.offer(data)
    assert queue.accepted == {}


def test_an_item_that_is_not_in_the_tensor_table_is_refused() -> None:
    queue = ingest()
    queue.offer(payload(0, meta=TensorMeta("w", (2, 4), "BF16")))
    with pytest.raises(PayloadCorrupt):
        queue.take_group(0)


def test_groups_are_in_declared_order_as_far_as_it_is_there_and_keep_their_bound() -> None:
    queue = ingest()
    for number in (4, 2, 9, 0, 1, 3, 5, 6, 7):
        queue.offer(payload(number))
    assert [entry.key.payload for entry in queue.take_group(0)] == [0, 1, 2, 3, 4, 5, 6, 7]
    queue.offer(payload(8))
    assert [entry.key.payload for entry in queue.take_group(0)] == [8, 9]


def test_a_payload_that_is_late_holds_nobody_up() -> None:
    queue = ingest()
    queue.offer(payload(1))
    assert [entry.key.payload for entry in queue.take_group(0)] == [1]
    queue.offer(payload(0))
    assert [entry.key.payload for entry in queue.take_group(0)] == [0]


def test_decoded_payloads_are_bounded_with_the_group_that_is_being_applied_and_staged_ones_wait() -> None:
    queue = ingest(queue=QueueConfig(resident_groups=1, group_payloads=2), apart=True)
    for number in range(8):
        queue.offer(payload(number))
    assert not queue.has_room
    assert [queue.advance() for _ in range(5)] == [True, True, True, True, False]
    assert queue.is_backed_up
    assert len(queue.take_group(0)) == 2
    assert not queue.advance()
    assert len(queue.take_group(0)) == 2
    assert [queue.advance() for _ in range(3)] == [True, True, False]


def test_the_default_slots_are_32_groups_of_8_and_one_more() -> None:
    queue = ingest(apart=True)
    for number in range(270):
        queue.offer(payload(number))
    assert sum(queue.advance() for _ in range(270)) == 264


def test_apart_the_applying_thread_decodes_nothing() -> None:
    queue = ingest(apart=True)
    queue.offer(payload(0))
    assert (queue.is_ready, queue.can_advance, queue.take_group(0)) == (False, True, ())
    assert queue.advance()
    assert (queue.is_ready, queue.can_advance) == (True, False)
    assert len(queue.take_group(0)) == 1


def test_a_running_queue_stops_taking_more_when_its_memory_is_used_up_and_spills_nothing() -> None:
    queue = ingest(queue=QueueConfig(staging_bytes=1))
    assert queue.has_room
    queue.offer(payload(0))
    assert (queue.has_room, queue.spill()) == (False, 0)
    assert len(queue.take_group(0)) == 1
    assert queue.has_room


def test_a_held_queue_spills_what_exceeds_its_memory_and_gives_it_back_in_declared_order(tmp_path: Path) -> None:
    queue = ingest(held=True, queue=QueueConfig(staging_bytes=200, spill_directory=str(tmp_path)))
    spilled = 0
    for number in (3, 1, 0, 2, 4):
        assert queue.has_room
        queue.offer(payload(number))
        spilled += queue.spill()
    assert spilled >= 3
    queue.release()
    assert [entry.key.payload for entry in queue.take_group(0)] == [0, 1, 2, 3, 4]


def test_a_held_queue_stages_everything_and_gives_nothing_until_released() -> None:
    queue = ingest(held=True, queue=QueueConfig(resident_groups=1, group_payloads=1))
    for number in range(5):
        queue.offer(payload(number))
    assert queue.has_room
    assert queue.take_group(0) == ()
    queue.release()
    assert not queue.has_room
    assert len(queue.take_group(0)) == 1


def test_a_stopped_queue_is_empty_for_good_and_wakes_the_applying_thread() -> None:
    queue = ingest()
    groups: list[int] = []
    waiting = threading.Thread(target=lambda: groups.append(len(queue.take_group(60))))
    waiting.start()
    queue.stop()
    waiting.join(30)
    assert groups == [0]
    assert queue.offer(payload(0)) is Verdict.STOPPED
    assert not queue.advance()
    assert queue.take_group(0) == ()


def test_skipped_names_are_not_decoded() -> None:
    queue = ingest(skipped=frozenset({"w"}))
    queue.offer(payload(0))
    queue.offer(payload(1, meta=BIAS))
    assert [[item.tensor.name for item in entry.items] for entry in queue.take_group(0)] == [[], ["b"]]


def test_a_waiting_thread_gets_a_payload_that_arrives_later() -> None:
    queue = ingest()
    groups: list[int] = []
    waiting = threading.Thread(target=lambda: groups.append(len(queue.take_group(60))))
    waiting.start()
    queue.offer(payload(0))
    waiting.join(30)
    assert groups == [1]
