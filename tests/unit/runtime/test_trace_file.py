"""Trace files: every event that took effect is there, a lost line shows, and a torn last line is no fault."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nemo_dcr.control import MemoryControl
from nemo_dcr.errors import InternalError
from nemo_dcr.ids import AttemptId, CandidateId, Incarnation
from nemo_dcr.runtime.trace_file import (
    FileTracer,
    Killed,
    declare_killed,
    read_killed,
    read_log,
    read_trace,
    write_journal,
)
from nemo_dcr.trace import Action, Emit, Event, LamportClock


def tracer_of(path: Path, clock: LamportClock | None = None) -> FileTracer:
    return FileTracer(path, "e0/0", Incarnation(9), clock or LamportClock())


def written(path: Path, count: int) -> list[bytes]:
    """A file of so many events; its lines without the end."""
    tracer = tracer_of(path)
    for number in range(count):
        tracer.emit(Emit(Action.ACCEPT, AttemptId(2), {"payload": number}, {"gate": False}))
    tracer.close()
    return path.read_bytes().splitlines(keepends=True)[:-1]


def test_events_carry_node_incarnation_gapless_numbers_and_growing_clocks(tmp_path: Path) -> None:
    path, clock, seen = tmp_path / "t.ndjson", LamportClock(), list[Event]()
    tracer = FileTracer(path, "e0/0", Incarnation(9), clock, watch=seen.append)
    tracer.emit(Emit(Action.START_RECEIVER, args={"ranks": 2}))
    clock.merge(40)
    tracer.emit(Emit(Action.OPEN_APPLY, AttemptId(3), {}, {"tag": "clean(0)", "gate": False}))
    tracer.close()
    first, second = events = read_trace(path)
    assert events == seen
    assert [(event.node, event.incarnation, event.seq) for event in events] == [("e0/0", 9, 0), ("e0/0", 9, 1)]
    assert first.clock < 40 < second.clock
    assert (second.action, second.attempt, second.post) == ("OpenApply", 3, {"tag": "clean(0)", "gate": False})


def test_an_event_is_in_the_file_before_the_caller_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    tracer = tracer_of(path)
    tracer.emit(Emit(Action.FLUSH))
    assert [event.action for event in read_trace(path)] == ["Flush"]
    tracer.close()


@pytest.mark.parametrize("torn", [1, 20, -1])
def test_a_torn_last_line_is_dropped(tmp_path: Path, torn: int) -> None:
    path = tmp_path / "t.ndjson"
    lines = written(path, 3)
    path.write_bytes(b"".join(lines[:2]) + lines[2].rstrip(b"\n")[:torn])
    assert [event.args["payload"] for event in read_trace(path)] == [0, 1]


def test_a_missing_line_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    lines = written(path, 3)
    path.write_bytes(lines[0] + lines[2])
    with pytest.raises(InternalError, match="event 1 is missing"):
        read_trace(path)


def test_an_unreadable_line_before_the_last_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    lines = written(path, 3)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(InternalError, match="line 2 is not a trace event"):
        read_trace(path)


def test_threads_share_a_tracer_without_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    tracer = tracer_of(path)
    threads = [
        threading.Thread(target=lambda: [tracer.emit(Emit(Action.APPLY_ITEM)) for _ in range(50)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tracer.close()
    events = read_trace(path)
    assert len(events) == 200
    assert [event.clock for event in events] == sorted(event.clock for event in events)


def test_the_control_planes_journal_is_a_trace_like_any_other(tmp_path: Path) -> None:
    control = MemoryControl()
    epoch = control.acquire_epoch(clock=5).epoch
    control.kill(epoch, CandidateId("c"))
    write_journal(tmp_path / "control.ndjson", control.journal())
    events = read_trace(tmp_path / "control.ndjson")
    assert [(event.node, event.action) for event in events] == [
        ("control", "AcquireEpoch"),
        ("control", "KillCandidate"),
    ]
    assert events[0].clock > 5


def test_a_closed_trace_ends_with_the_count_of_its_events(tmp_path: Path) -> None:
    path = tmp_path / "t.ndjson"
    events = written(path, 3)
    end = path.read_bytes().splitlines(keepends=True)[-1]
    assert read_log(path).ended
    path.write_bytes(b"".join(events))
    assert not read_log(path).ended
    path.write_bytes(b"".join(events[:2]) + end)
    with pytest.raises(InternalError, match="3 events were written, 2 are there"):
        read_trace(path)
    path.write_bytes(b"".join(events) + end + events[0])
    with pytest.raises(InternalError, match="line 5 follows the end"):
        read_trace(path)


def test_a_trace_is_closed_once_however_often_it_is_asked(tmp_path: Path) -> None:
    tracer = tracer_of(tmp_path / "t.ndjson")
    tracer.emit(Emit(Action.APPLY_ITEM))
    tracer.close()
    tracer.close()
    log = read_log(tmp_path / "t.ndjson")
    assert (len(log.events), log.ended) == (1, True)


def test_who_was_killed_is_told_next_to_the_traces(tmp_path: Path) -> None:
    assert read_killed(tmp_path) == frozenset()
    declare_killed(tmp_path, "e0/0", Incarnation(3))
    declare_killed(tmp_path, "e1/0", Incarnation(4))
    assert read_killed(tmp_path) == {Killed("e0/0", Incarnation(3)), Killed("e1/0", Incarnation(4))}
