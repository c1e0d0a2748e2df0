"""A stage that runs ahead: order, bounds, errors after results, prompt stops, nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Generator

import pytest

from nemo_dcr.errors import AttemptFailed, AttemptStopped
from nemo_dcr.ids import AttemptId
from nemo_dcr.runtime.ahead import Ahead

ATTEMPT = AttemptId(7)


class Source:
    """Makes numbers, tells how far it is, and says on which thread it was closed."""

    def __init__(self, count: int, problem: BaseException | None = None) -> None:
        self.made = 0
        self.closed_on: threading.Thread | None = None
        self.arrived = threading.Condition()
        self._count = count
        self._problem = problem

    def numbers(self) -> Generator[int, None, None]:
        try:
            for number in range(self._count):
                with self.arrived:
                    self.made += 1
                    self.arrived.notify_all()
                yield number
            if self._problem is not None:
                raise self._problem
        finally:
            self.closed_on = threading.current_thread()

    def wait_until_made(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: self.made >= count, 20.0)


def started(source: Source, slots: int, waits: list[str] | None = None) -> Ahead[int]:
    told = [] if waits is None else waits
    ahead = Ahead(
        "numbers",
        source.numbers(),
        attempt=ATTEMPT,
        slots=slots,
        on_full=lambda seconds: told.append("full"),
        on_empty=lambda seconds: told.append("empty"),
    )
    ahead.start()
    return ahead


def test_results_come_in_order_and_the_end_after_them() -> None:
    ahead = started(Source(50), slots=3)
    assert list(ahead) == list(range(50))
    ahead.join()
    assert list(ahead) == []


def test_no_more_results_are_made_than_fit_and_one_in_the_making() -> None:
    source, waits = Source(50), list[str]()
    ahead = started(source, slots=3, waits=waits)
    source.wait_until_made(4)
    assert source.made == 4
    assert next(ahead) == 0
    source.wait_until_made(5)
    assert source.made == 5
    assert waits.count("full") >= 1
    ahead.stop()
    ahead.join()
    assert source.made == 5


def test_an_error_of_the_source_comes_after_its_results_and_is_the_same_object() -> None:
    problem = AttemptFailed("a shard drifted")
    ahead = started(Source(2, problem), slots=8)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(AttemptFailed) as caught:
        next(ahead)
    assert caught.value is problem
    ahead.join()


def test_a_fault_that_is_no_error_of_the_package_reaches_the_taker_too() -> None:
    ahead = started(Source(0, KeyboardInterrupt()), slots=1)
    with pytest.raises(KeyboardInterrupt):
        next(ahead)
    ahead.join()


def test_a_stop_frees_a_full_stage_and_closes_the_source_on_its_own_thread() -> None:
    source = Source(50)
    ahead = started(source, slots=1)
    source.wait_until_made(2)
    ahead.stop()
    ahead.join()
    assert source.made == 2
    assert source.closed_on is not None
    assert (source.closed_on.name, source.closed_on.is_alive()) == ("numbers", False)


def test_a_stop_wakes_a_taker_that_waits_and_never_ends_its_loop_quietly() -> None:
    """A loop that ended quietly would close an incomplete set."""
    begun, go_on = threading.Event(), threading.Event()

    def stuck() -> Generator[int, None, None]:
        begun.set()
        assert go_on.wait(20.0)
        yield 0

    ahead = Ahead("stuck", stuck(), attempt=ATTEMPT, slots=1)
    ahead.start()
    found: list[object] = []

    def take() -> None:
        try:
            found.extend(ahead)
        except AttemptStopped as problem:
            found.append(problem.attempt)

    taker = threading.Thread(target=take)
    taker.start()
    assert begun.wait(20.0)
    ahead.stop()
    taker.join(20.0)
    assert found == [ATTEMPT]
    go_on.set()
    ahead.join()
    with pytest.raises(AttemptStopped):
        next(ahead)


def test_a_stage_that_never_began_can_be_ended() -> None:
    source = Source(1)
    ahead = Ahead("idle", source.numbers(), attempt=ATTEMPT, slots=1)
    ahead.stop()
    ahead.join()
    assert source.made == 0
    with pytest.raises(AttemptStopped):
        next(ahead)


def test_a_taker_that_is_faster_counts_its_waits() -> None:
    gate = threading.Semaphore(0)

    def slow() -> Generator[int, None, None]:
        for number in range(3):
            assert gate.acquire(timeout=20.0)
            yield number

    waits: list[float] = []

    def on_empty(seconds: float) -> None:
        waits.append(seconds)

    ahead = Ahead("slow", slow(), attempt=ATTEMPT, slots=1, on_empty=on_empty)
    ahead.start()
    timer = threading.Timer(0.05, lambda: gate.release(3))
    timer.start()
    assert list(ahead) == [0, 1, 2]
    timer.join()
    ahead.join()
    assert waits
    assert sum(waits) > 0.0
