"""The stepper takes events whole and in order, whoever feeds them."""

from __future__ import annotations

import threading

import pytest

from nemo_dcr.runtime.stepper import Stepper


def counting(state: int, event: str) -> tuple[int, tuple[str, ...]]:
    """Every event counts and has two effects."""
    return state + 1, ("begin " + event, "end " + event)


def test_an_event_of_an_effect_is_taken_after_the_whole_step() -> None:
    performed: list[str] = []
    machine: Stepper[int, str, str]

    def perform(effect: str) -> None:
        performed.append(effect)
        if effect == "begin first":
            machine.feed("second")

    machine = Stepper((0, ("hello",)), counting, perform, threading.Condition(threading.RLock()))
    assert performed == []
    machine.begin()
    machine.begin()
    machine.feed("first")
    assert performed == ["hello", "begin first", "end first", "begin second", "end second"]
    assert machine.state == 2


def test_a_fault_of_the_performer_does_not_leave_the_machine_stuck() -> None:
    def perform(effect: str) -> None:
        if effect == "end bad":
            raise ValueError(effect)

    machine: Stepper[int, str, str] = Stepper((0, ()), counting, perform, threading.Condition(threading.RLock()))
    with pytest.raises(ValueError, match="end bad"):
        machine.feed("bad")
    machine.feed("good")
    assert machine.state == 2


def test_threads_lose_no_event_and_waiters_are_woken() -> None:
    changed = threading.Condition(threading.RLock())
    machine: Stepper[int, str, str] = Stepper((0, ()), counting, lambda effect: None, changed)
    threads = [threading.Thread(target=lambda: [machine.feed("x") for _ in range(200)]) for _ in range(4)]
    with changed:
        for thread in threads:
            thread.start()
        assert changed.wait_for(lambda: machine.state == 800, timeout=30)
    for thread in threads:
        thread.join()
