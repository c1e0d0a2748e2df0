"""The parts of chaos that decide whether a run was good: points, plans and checks, each with one that fails it."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from nemo_dcr.cli.chaos import PayloadWay, Records
from nemo_dcr.control import MemoryControl
from nemo_dcr.errors import ControlPlaneUnavailable
from nemo_dcr.ids import AttemptId, Incarnation
from nemo_dcr.testing.chaos_checks import fence_faults, nameless_failures
from nemo_dcr.testing.chaos_patience import Patience
from nemo_dcr.testing.chaos_plans import (
    ACTIVE,
    GROUPS,
    RECORD,
    RECORD_GROUPS,
    RELAY_GROUPS,
    STANDBY,
    Case,
    all_cases,
    faults,
    members,
    relays_of,
)
from nemo_dcr.testing.chaos_points import Edge, Kind, Strike, Striker, StrikingControl, StrikingTracer, read_struck
from nemo_dcr.testing.chaos_run import TRANSITIONS, RunResult, cases_of, numbered, run
from nemo_dcr.testing.chaos_source import RecordPlace
from nemo_dcr.testing.chaos_system import fork_server
from nemo_dcr.trace import Action, Emit, Event


class Lines:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def emit(self, emitted: Emit) -> None:
        self.seen.append(emitted.action.value)


def reach(tmp_path: Path, strike: Strike, *actions: Action) -> tuple[int, list[str]]:
    """A child that emits these actions under a strike: how it ended, and the lines that it wrote before."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:

        class Told(Lines):
            def emit(self, emitted: Emit) -> None:
                os.write(write, f"{emitted.action.value} ".encode())

        tracer = StrikingTracer(Told(), Striker("victim", tmp_path / "strikes", (strike,)))
        for action in actions:
            tracer.emit(Emit(action))
        os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with os.fdopen(read) as lines:
        return status, lines.read().split()


def test_a_process_is_killed_before_its_line_or_after_it_and_says_so_first(tmp_path: Path) -> None:
    both = (Action.ACCEPT, Action.FLUSH)
    status, lines = reach(tmp_path, Strike("Flush", Edge.BEFORE, Kind.KILL), *both)
    assert (os.WTERMSIG(status), lines) == (signal.SIGKILL, ["Accept"])
    status, lines = reach(tmp_path, Strike("Accept", Edge.AFTER, Kind.KILL), *both)
    assert (os.WTERMSIG(status), lines) == (signal.SIGKILL, ["Accept"])
    assert [each.strike.point for each in read_struck(tmp_path / "strikes")] == ["Flush", "Accept"]


def test_a_process_is_stopped_at_the_nth_time_only(tmp_path: Path) -> None:
    strike = Strike("Accept", Edge.AFTER, Kind.STOP, nth=2, hold_s=1.0)
    status, lines = reach(tmp_path, strike, Action.ACCEPT, Action.ACCEPT, Action.ACCEPT)
    assert os.WIFSTOPPED(status)
    assert lines == ["Accept", "Accept"]
    status, lines = reach(tmp_path, strike, Action.ACCEPT, Action.FLUSH)
    assert (status, lines) == (0, ["Accept", "Flush"])


@pytest.mark.parametrize(("edge", "epoch"), [(Edge.BEFORE, 0), (Edge.AFTER, 1)])
def test_a_lost_request_changes_nothing_and_a_lost_reply_hides_a_change(tmp_path: Path, edge: Edge, epoch: int) -> None:
    inner = MemoryControl()
    striker = Striker("c", tmp_path / "strikes", (Strike("record acquire", edge, Kind.LOST),))
    control = StrikingControl(inner, striker)
    with pytest.raises(ControlPlaneUnavailable):
        control.acquire_epoch()
    assert inner.read().epoch == epoch
    assert control.acquire_epoch().epoch == epoch + 1


def test_every_point_is_a_trace_action_or_a_call_to_the_record() -> None:
    actions = {action.value for action in Action} | {"any time"}
    calls = {"record read", "record prepare", "record commit", "record acquire", "record kill"}
    assert {case.point for case in all_cases()} - actions == calls


def test_runs_of_one_seed_take_every_case_once_before_any_comes_again() -> None:
    cases = all_cases()
    drawn = [case for number in range(len(cases) // TRANSITIONS) for case in cases_of(3, number)]
    assert len(set(drawn)) == len(drawn) == len(cases) - len(cases) % TRANSITIONS
    assert cases_of(3, 1) == cases_of(3, 1)
    assert cases_of(3, 1) != cases_of(4, 1)
    assert numbered([7, 8], 5 * TRANSITIONS) == [(7, 0), (8, 0), (7, 1), (8, 1), (7, 2)]


def test_a_split_keeps_two_groups_apart_that_share_nobody() -> None:
    receivers, owners = ["e0/0", "e1/0", "e1/1"], ["owner-0", "owner-1"]
    splits = [case for case in all_cases(world=True, server=True, relays=True) if case.kind == Kind.SPLIT]
    assert len(splits) == len((*GROUPS, *RELAY_GROUPS, *RECORD_GROUPS))
    for case in splits:
        drawn = faults(case, random.Random(2), receivers, owners).split
        assert drawn is not None
        _, some, others, hold = drawn
        assert some, case
        assert others, case
        assert set(some).isdisjoint(others)
        assert {*some, *others} <= {*receivers, *owners, ACTIVE, STANDBY, RECORD, *relays_of(receivers)}
        assert hold > 0.4  # longer than an endpoint may be silent
    assert members("one instance", random.Random(0), ["e1/0", "e1/1"], owners) == ("e1/0", "e1/1")


def test_a_run_is_run_again_with_the_record_and_the_payloads_that_it_had() -> None:
    file, etcd, s3 = RecordPlace
    assert Records.MIXED.places([0, 1, 2, 3] * 3, [etcd, s3]) == [*[file] * 3, etcd, *[file] * 3, s3, *[file] * 3, etcd]
    assert Records.MIXED.places([3, 3], []) == [file, file]
    assert Records.S3.places([0, 3], []) == [s3, s3]
    assert [PayloadWay.MIXED.has_relays(number) for number in range(8)] == [False, True, False, False] * 2
    assert not PayloadWay.FILES.has_relays(1)
    assert PayloadWay.RELAYS.has_relays(0)
    assert RunResult(7, 3, Path(), record=etcd).name == "--seed 7 --only 3 --record etcd --payloads files"
    assert RunResult(7, 1, Path(), relays=True).name == "--seed 7 --only 1 --record sqlite --payloads relays"


@pytest.mark.parametrize("struck", ["record", "relay"])
def test_a_server_is_killed_stopped_cut_off_and_split_where_there_is_one(struck: str) -> None:
    def kinds(*, server: bool, relays: bool) -> set[str]:
        cases = all_cases(world=True, server=server, relays=relays)
        return {case.kind for case in cases if case.role == struck or (case.role == "network" and struck in case.point)}

    everything = {Kind.KILL, Kind.STOP, Kind.CUT, Kind.SPLIT}
    assert kinds(server=struck == "record", relays=struck == "relay") == everything
    assert kinds(server=struck != "record", relays=struck != "relay") == set()
    outside = faults(Case(struck, "any time", "at", "kill"), random.Random(3), ["e0/0", "e1/0"], ["owner-0"]).outside
    assert outside[0][1] in {"record", "relay-e0", "relay-e1"}


def test_every_case_strikes_its_point_in_its_own_role() -> None:
    for case in all_cases():
        drawn = faults(case, random.Random(1), ["e0/0", "e1/0"], ["owner-0", "owner-1"])
        if case.edge == "at":
            assert drawn.outside[0][2] == case.kind
            continue
        hits = [
            (name, strike)
            for table in (drawn.strikes, drawn.next_life)
            for name, strikes in table.items()
            for strike in strikes
            if (strike.point, strike.edge, strike.kind) == (case.point, case.edge, case.kind)
        ]
        assert hits, case
        wanted = {"receiver": "e", "owner": "owner-", "coordinator": ("active", "standby")}[case.role]
        assert any(name.startswith(wanted) for name, _ in hits), case
        assert case.role == "coordinator" or ACTIVE not in {name for name, _ in hits}


def test_a_system_is_stuck_by_time_in_which_everybody_answered() -> None:
    patience = Patience(0.0)
    assert [patience.look(now, ()) for now in (0.5, 1.0)] == ["", ""]
    assert patience.look(100.0, ()) == ""  # one long look is a machine that gave nobody time
    assert patience.look(200.0, ["e0/0"]) == ""
    assert patience.look(299.0, ["e0/0"]) == ""
    assert "silent: e0/0" in patience.look(300.0, ["e0/0"])
    patience.begin_anew(1000.0)
    looks = [patience.look(1000.0 + 0.5 * (each + 1), ()) for each in range(120)]
    assert looks[:-1] == [""] * 119
    assert "every process answered for 60 s" in looks[-1]


def line(seq: int, action: str, attempt: int, installed: int) -> Event:
    return Event(1, "e0/0", Incarnation(1), seq, seq, action, AttemptId(attempt), {}, {"att": installed})


def test_a_write_behind_a_fence_and_an_attempt_that_goes_backwards_are_found() -> None:
    good = [line(0, "EndpointPrepare", 2, 2), line(1, "ApplyItem", 2, 2), line(2, "StopAndWait", 2, 2)]
    assert fence_faults(good) == []
    assert fence_faults([*good, line(3, "ApplyItem", 2, 2)]) == ["line 4: wrote under attempt 2, installed 2"]
    assert fence_faults([*good[:1], line(1, "ApplyItem", 1, 2)]) == ["line 2: wrote under attempt 1, installed 2"]
    assert fence_faults([*good, line(3, "EndpointPrepare", 1, 1)]) == ["line 4: attempt 1 after attempt 2"]


def test_a_failed_attempt_that_names_no_process_or_no_phase_is_found() -> None:
    def failed(seq: int, reason: str) -> Event:
        return Event(
            1, "coordinator", Incarnation(1), seq, seq, Action.FAIL_ATTEMPT.value, AttemptId(2), {"reason": reason}, {}
        )

    good = [
        failed(0, "receiver e0/0 is lost: no reply, in phase applying"),
        failed(1, "owner 3: the transport\nfailed, in phase staging"),
        failed(2, "deadline passed without e0/0, owner 1, in phase preparing"),
        failed(3, "abort was requested, in phase closing"),
    ]
    assert nameless_failures(good) == []
    told = [
        "receiver e0/0 is lost: no reply",
        "somebody is lost, in phase applying",
        "receiver is lost, in phase applying",
    ]
    found = nameless_failures([failed(seq, reason) for seq, reason in enumerate(told)])
    assert found == [f"line {seq + 1}: {reason!r}" for seq, reason in enumerate(told)]


def test_a_system_that_cannot_start_is_a_breach_of_its_run_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other runs go on; nothing but the server of the record was started before it failed."""
    program = tmp_path / "bin" / "etcd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho no room >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    result = run(1, 0, tmp_path / "run", fork_server(), record=RecordPlace.ETCD)
    (breach,) = result.breaches
    assert breach.startswith("it did not start: EndpointLost: endpoint etcd is lost: ended with 3: no room")
    assert result.outcomes == []
