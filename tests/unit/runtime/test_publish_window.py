"""Several payloads under way at once: as many as the window allows, told in order, and none left behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import pytest

from nemo_dcr.codec.payload import EncodedPayload
from nemo_dcr.config import QueueConfig
from nemo_dcr.errors import AttemptStopped, InvalidConfig, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.runtime.payload_stream import FormedPayload
from nemo_dcr.runtime.publish_window import PublishWindow

ONE, OWNER = AttemptId(1), OwnerId(0)
PATIENCE_S = 20.0


def formed(number: int, nbytes: int = 10) -> FormedPayload:
    encoded = EncodedPayload(PayloadKey(ONE, OWNER, number), bytes(nbytes), number.to_bytes(16, "big"))
    return FormedPayload(encoded, (f"t{number}",), 0)


class Link:
    """Acknowledges a payload when it is told to; afterwards it knows what was under way at once."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.under_way: set[int] = set()
        self.most = 0
        self.log: list[str] = []
        self.told: list[tuple[int, bytes]] = []
        self.acknowledged: set[int] = set()
        self.broken: dict[int, Exception] = {}
        self.stopped = False

    def window(self, queue: QueueConfig) -> PublishWindow:
        return PublishWindow(
            self,  # type: ignore[arg-type]
            queue,
            name="publish",
            going=lambda payload: self.log.append(f"going {payload.number}"),
            publish=self.publish,
            published=lambda number, digest: self.told.append((number, digest)),
        )

    def publish(self, payload: FormedPayload) -> None:
        number = payload.number
        with self.changed:
            self.log.append(f"out {number}")
            self.under_way.add(number)
            self.most = max(self.most, len(self.under_way))
            self.changed.notify_all()
            try:
                assert self.changed.wait_for(
                    lambda: self.stopped or number in self.acknowledged or number in self.broken, PATIENCE_S
                )
            finally:
                self.under_way.discard(number)
                self.changed.notify_all()
            if number in self.broken:
                raise self.broken[number]
            if number not in self.acknowledged:
                raise AttemptStopped(ONE, "the link was stopped")

    def acknowledge(self, *numbers: int) -> None:
        with self.changed:
            self.acknowledged.update(numbers)
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def until(self, what: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(what, PATIENCE_S)


def sending(window: PublishWindow, payloads: list[FormedPayload]) -> tuple[threading.Thread, list[BaseException]]:
    """Sends all of them inside the window's block, on a thread of its own."""
    found: list[BaseException] = []

    def run() -> None:
        try:
            with window:
                for payload in payloads:
                    window.send(payload)
                window.finish()
        except BaseException as problem:
            found.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def ended(thread: threading.Thread) -> bool:
    thread.join(PATIENCE_S)
    return not thread.is_alive()


@pytest.mark.parametrize("slots", [1, 3])
def test_as_many_payloads_are_under_way_as_the_window_has_slots(slots: int) -> None:
    link = Link()
    thread, found = sending(link.window(QueueConfig(payloads_in_flight=slots)), [formed(n) for n in range(7)])
    for first in range(7):
        under_way = set(range(first, min(first + slots, 7)))
        link.until(lambda wanted=under_way: link.under_way == wanted)  # type: ignore[misc]
        link.acknowledge(first)
    assert ended(thread)
    assert (found, link.most) == ([], slots)


def test_bytes_bound_the_window_and_a_larger_payload_goes_alone() -> None:
    link = Link()
    sizes = [60, 40, 1, 500, 30]
    queue = QueueConfig(payloads_in_flight=4, in_flight_bytes=100)
    thread, found = sending(link.window(queue), [formed(n, nbytes) for n, nbytes in enumerate(sizes)])
    for under_way, acknowledged in (({0, 1}, 0), ({1, 2}, 1), ({2}, 2), ({3}, 3), ({4}, 4)):
        link.until(lambda wanted=under_way: link.under_way == wanted)  # type: ignore[misc]
        link.acknowledge(acknowledged)
    assert ended(thread)
    assert found == []
    assert link.most == 2


def test_payloads_go_out_and_are_told_in_order_whichever_is_acknowledged_first() -> None:
    link = Link()
    thread, found = sending(link.window(QueueConfig(payloads_in_flight=3)), [formed(n) for n in range(4)])
    link.until(lambda: len(link.under_way) == 3)
    link.acknowledge(2, 1)
    link.until(lambda: 3 in link.under_way)
    assert link.told == []
    link.acknowledge(3, 0)
    assert ended(thread)
    assert found == []
    assert link.told == [(n, n.to_bytes(16, "big")) for n in range(4)]
    assert [line for line in link.log if "going" in line] == [f"going {n}" for n in range(4)]
    assert all(link.log.index(f"going {n}") < link.log.index(f"out {n}") for n in range(4))


def test_a_payload_that_fails_ends_those_beside_it_and_is_what_is_raised() -> None:
    link = Link()
    thread, found = sending(link.window(QueueConfig(payloads_in_flight=3)), [formed(n) for n in range(9)])
    link.until(lambda: len(link.under_way) == 3)
    with link.changed:
        link.broken[1] = TransportFailed("link", "it broke")
        link.changed.notify_all()
    assert ended(thread)
    assert [str(problem) for problem in found] == [str(link.broken[1])]
    assert (link.under_way, link.told) == (set(), [])
    assert "going 3" not in link.log


def test_a_stop_of_the_link_ends_a_window_that_waits_for_room() -> None:
    link = Link()
    thread, found = sending(link.window(QueueConfig(payloads_in_flight=2)), [formed(n) for n in range(9)])
    link.until(lambda: len(link.under_way) == 2)
    link.stop()
    assert ended(thread)
    assert [type(problem) for problem in found] == [AttemptStopped]
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("publish")] == []


def test_a_block_that_is_left_early_leaves_nothing_under_way() -> None:
    link = Link()
    with contextlib.suppress(KeyError), link.window(QueueConfig()) as window:
        window.send(formed(0))
        link.until(lambda: link.under_way == {0})
        raise KeyError
    assert (link.stopped, link.under_way, link.told) == (True, set(), [])


@pytest.mark.parametrize("field", ["payloads_in_flight", "in_flight_bytes"])
def test_a_window_without_room_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        QueueConfig(**{field: 0})
