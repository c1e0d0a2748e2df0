"""The stages of an owner: the same payloads in turns and apart, ahead of a slow link, and gone with the attempt."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import verify_payload
from nemo_dcr.config import CodecConfig, QueueConfig
from nemo_dcr.errors import AttemptFailed, ConditionViolated
from nemo_dcr.ids import AttemptId, CandidateId, OwnerId, Version
from nemo_dcr.protocol.owner_state import StartStream
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.payload_stream import FormedPayload, PayloadStream
from nemo_dcr.runtime.timings import StageClock, TimingsOf
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.tasks import AffineTask

OWNER, ATTEMPT = OwnerId(0), AttemptId(1)
TENSORS = tuple(TensorMeta(f"t{number:02}", (64,), "BF16") for number in range(12))
CODEC = CodecConfig(chunk_target_bytes=128, bucket_target_bytes=128)


class Trainer:
    """Twelve tensors, a payload each; `reading` is called before a tensor is read."""

    def __init__(self, tensors: Sequence[TensorMeta] = TENSORS) -> None:
        self.tensors = tensors
        self.reads = 0
        self.reading: Callable[[int], None] = lambda number: None
        rng = np.random.default_rng(5)
        self.words = {meta.name: rng.integers(0, 1 << 16, meta.numel).astype("<u2") for meta in tensors}
        tasks = [AffineTask.identity(BoxMap.whole(meta), self._reader(meta.name)) for meta in tensors]
        self.delta = DeltaOwner(OWNER, tasks, config=CODEC)
        self.delta.capture(Version(0))
        for words in self.words.values():
            words[::3] ^= 1
        self.reads = 0

    def _reader(self, name: str) -> Callable[[], Words]:
        def read() -> Words:
            self.reads += 1
            self.reading(self.reads)
            return self.words[name]

        return read

    def stream(
        self,
        *,
        apart: bool,
        timings: StageClock | None = None,
        queue: QueueConfig | None = None,
        stopped: Callable[[], bool] = lambda: False,
        mode: AttemptMode = AttemptMode.XOR,
        version: int = 0,
    ) -> PayloadStream:
        classes = {meta.name: "xor" for meta in self.tensors}
        return PayloadStream(
            self.delta,
            StartStream(ATTEMPT, mode, Version(version), CandidateId("c"), classes),
            codec=CODEC,
            queue=queue or QueueConfig(),
            timings=timings or StageClock("owner-0"),
            stopped=stopped,
            apart=apart,
        )


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    before = threading.active_count()
    yield Trainer()
    assert threading.active_count() == before


def told(payload: FormedPayload) -> tuple[int, tuple[str, ...], int, bytes]:
    return payload.number, payload.names, payload.masks, payload.encoded.data


@pytest.mark.parametrize("mode", [AttemptMode.XOR, AttemptMode.OVERWRITE, AttemptMode.DENSE, AttemptMode.RESTORE])
def test_stages_apart_give_the_same_payloads_as_stages_that_take_turns(trainer: Trainer, mode: AttemptMode) -> None:
    found = []
    for apart in (False, True):
        with trainer.stream(apart=apart, mode=mode) as payloads:
            found.append([told(payload) for payload in payloads])
    assert found[0] == found[1]
    assert [number for number, _, _, _ in found[0]] == list(range(len(TENSORS)))


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_later_buckets_are_built_while_a_payload_travels_and_no_more_than_the_queues_hold(trainer: Trainer) -> None:
    """One payload travels, two wait encoded, one in the making; one bucket waits and one has no room yet."""
    reached = threading.Event()
    trainer.reading = lambda number: reached.set() if number == 6 else None
    with trainer.stream(apart=True) as payloads:
        stages = iter(payloads)
        assert next(stages).number == 0
        assert reached.wait(20.0)
        pause(0.05)
        assert trainer.reads == 6
        assert [payload.number for payload in stages] == list(range(1, len(TENSORS)))


def test_stages_that_take_turns_build_a_payload_only_when_it_is_asked_for(trainer: Trainer) -> None:
    with trainer.stream(apart=False) as payloads:
        stages = iter(payloads)
        for asked in range(1, 4):
            next(stages)
            assert trainer.reads == asked


def test_waits_for_room_are_counted_by_stage(trainer: Trainer) -> None:
    timings = StageClock("owner-0")
    with trainer.stream(apart=True, timings=timings) as payloads:
        for payload in payloads:
            pause(0.02)
            assert payload.encoded.data
    found = timings.of(TimingsOf(ATTEMPT))
    assert found.waits["construct"] > 0
    assert found.waits["encode"] > 0
    assert found.wait_seconds["encode"] > 0.02
    assert [span.detail for span in found.spans if span.stage == "encode"] == [str(n) for n in range(len(TENSORS))]


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_failure_of_construction_comes_after_the_payloads_before_it(trainer: Trainer, apart: bool) -> None:
    def drift(number: int) -> None:
        if number == 4:
            raise ConditionViolated("SC4", "t03", "the shard drifted")

    trainer.reading = drift
    found: list[int] = []
    with pytest.raises(ConditionViolated, match="SC4"), trainer.stream(apart=apart) as payloads:
        found.extend(payload.number for payload in payloads)
    assert found == [0, 1, 2]


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_baseline_of_another_version_is_refused_before_anything_is_read(trainer: Trainer, apart: bool) -> None:
    with pytest.raises(ConditionViolated, match="SC3"):
        trainer.stream(apart=apart, version=4)
    assert trainer.reads == 0


class GivenUp(Exception):
    """What the taker raises."""


def take_and_give_up(stream: PayloadStream, count: int) -> None:
    with stream as payloads:
        assert len(list(itertools.islice(payloads, count))) == count
        raise GivenUp


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_stream_that_is_given_up_reads_no_weight_afterwards(trainer: Trainer, apart: bool, taken: int) -> None:
    with contextlib.suppress(GivenUp):
        take_and_give_up(trainer.stream(apart=apart), taken)
    reads = trainer.reads
    trainer.reading = lambda number: pytest.fail("a weight was read after the stream was over")
    pause(0.05)
    assert trainer.reads == reads < len(TENSORS)


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
def test_a_stop_ends_construction_between_two_chunks(trainer: Trainer, apart: bool) -> None:
    stop = threading.Event()
    trainer.reading = lambda number: stop.set() if number == 3 else None
    with pytest.raises(AttemptFailed, match="stopped"), trainer.stream(apart=apart, stopped=stop.is_set) as payloads:
        for _ in payloads:
            pass
    assert trainer.reads == 3


@pytest.mark.parametrize("apart", [False, True], ids=["in turns", "apart"])
@pytest.mark.parametrize(
    ("elements", "unchanged", "payloads"),
    [
        ((192,), (), [["t0"]]),
        ((16, 192, 16), (), [["t0", "t1"], ["t2"]]),
        ((192, 192, 192), (), [["t0"], ["t1"], ["t2"]]),
        ((64, 64), (), [["t0"], ["t1"]]),
        ((32, 32, 64), (2,), [["t0", "t1"]]),
        ((192, 64), (0, 1), []),
    ],
    ids=["three buckets large", "between small ones", "large in a row", "exact fit", "empty at the end", "empty"],
)
def test_a_tensor_larger_than_a_bucket_is_one_payload_whole(
    elements: tuple[int, ...], unchanged: tuple[int, ...], payloads: list[list[str]], apart: bool
) -> None:
    """Failure D9 of the catalogue; the bucket target is 64 elements, and every change is sent exactly once."""
    tensors = [TensorMeta(f"t{number}", (count,), "BF16") for number, count in enumerate(elements)]
    trainer = Trainer(tensors)
    for number in unchanged:
        trainer.words[f"t{number}"][::3] ^= 1
    with trainer.stream(apart=apart) as stream:
        found = list(stream)
    assert [list(payload.names) for payload in found] == payloads
    for payload in found:
        for item in verify_payload(payload.encoded.data, limits=CODEC).decode():
            assert item.indices.tolist() == list(range(0, item.tensor.numel, 3))
            assert set(item.values.tolist()) == {1}
