"""Doctored traces and those of broken code are rejected at the faulty line.

Each field of a run without faults is altered in turn, lines are dropped and reordered, files cut and swapped. Broken
code differs from the sound one in one weakened guard.

Spec: Next, TraceDeltaRefit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from model_tests.follower import Follower, Rejected
from model_tests.trace_export import LineRejected, constants, coordinator_name, main, validate
from model_tests.trace_files import Line
from model_tests.trace_runs import Run, simulated, steady
from nemo_dcr import control_rules
from nemo_dcr.protocol import alignment, attempt, endpoint_guards, membership, transition
from nemo_dcr.protocol.coordinator_events import CallOwner
from nemo_dcr.protocol.messages import UpdateBaseline
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.trace import Emit, LamportClock
from tests.unit.protocol.chaos import ALL_FAULTS
from tests.unit.protocol.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def still() -> Run:
    """One run without faults."""
    return steady(1, owners=2)


# ------------------------------------------------------------------------------------------------------- doctored lines


def places(run: Run) -> Iterator[tuple[int, Line, Follower, str]]:
    """Each line with a follower that stands right before it, and the node's name."""
    config, names = constants(run.lines, run.changes)
    follower = Follower(config, names)
    for number, line in enumerate(run.lines):
        node = coordinator_name(line) if coordinator_name(line) in config.coordinators else line.node
        yield number, line, follower, node
        follower.line(node, line.emitted, line.incarnation)


def is_rejected(follower: Follower, number: int | None, *lines: tuple[str, Emit, int]) -> bool:
    """Whether some line is no step, the first of them if it is known which."""
    other = follower.fork()
    try:
        for line in lines:
            other.line(*line)
    except Rejected as rejected:
        return number in (None, rejected.number)
    return False


def altered(value: Any) -> Any:
    """Another value of the same kind that is well formed."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str() if value.startswith(("clean(", "at(", "updating(")):
            return value.replace("0)", "7)").replace("1)", "8)").replace("2)", "9)")
        case str() if value in ("none", "lost"):
            return "clean(0)" if value == "none" else "at(0)"
        case str() if value.startswith(("dirty(", "done(")):
            return "none"
        case _:
            return f"{value}x"


def test_an_altered_state_is_rejected_at_its_line(still: Run) -> None:
    kinds, missed = Counter[str](), []
    for number, line, follower, node in places(still):
        for key, value in line.emitted.post.items():
            kinds[key] += 1
            doctored = replace(line.emitted, post={**line.emitted.post, key: altered(value)})
            if not is_rejected(follower, number, (node, doctored, line.incarnation)):
                missed.append((number, line.action, key, value))
    assert missed == []
    assert set(kinds) >= {"att", "tag", "gate", "tracker", "frozen", "phase", "epoch", "version", "last", "baseline"}


IDLE_ARGUMENTS = {"digest", "reason", "ranks", "loaded", "deadline", "gate"}
"""Arguments that the model does not have: digests (it compares items), texts, and how many ranks there are."""


LATER = {("Accept", "payload"), ("Accept", "owner"), ("EmitPayload", "xor")}
"""Another payload that is out could have been accepted here; the one that is told twice or never is missed later. An
attempt by XOR may send any of its items as masks (DV18); the others none, see below."""


def test_an_altered_argument_is_rejected_at_its_line(still: Run) -> None:
    missed = []
    for number, line, follower, node in places(still):
        for key, value in line.emitted.args.items():
            if key in IDLE_ARGUMENTS or value is None or (line.action, key) in LATER:
                continue
            doctored = replace(line.emitted, args={**line.emitted.args, key: altered(value)})
            if not is_rejected(follower, number, (node, doctored, line.incarnation)):
                missed.append((number, line.action, key, value))
    assert missed == []


def test_masks_outside_an_attempt_by_xor_are_rejected_at_their_line() -> None:
    walks = (simulated(seed) for seed in range(60))
    run = next(run for run in walks if any(_is_payload_of(run, each, "overwrite") for each in run.lines))
    number, line = next((n, each) for n, each in enumerate(run.lines) if _is_payload_of(run, each, "overwrite"))
    masked = replace(line, emitted=replace(line.emitted, args={**line.emitted.args, "xor": 1}))
    with pytest.raises(LineRejected, match="XOR masks in mode overwrite") as rejected:
        validate([*run.lines[:number], masked, *run.lines[number + 1 :]], run.changes)
    assert rejected.value.line == masked


def _is_payload_of(run: Run, line: Line, mode: str) -> bool:
    started = {each.emitted.attempt: each.emitted.args["mode"] for each in run.lines if each.action == "StartAttempt"}
    return line.action == "EmitPayload" and started.get(line.emitted.attempt) == mode


def test_a_dropped_line_is_rejected_by_what_follows(still: Run) -> None:
    """Without its numbers too: only a change that nothing needs afterwards could be missed."""
    missed = []
    for number, line, follower, _ in places(still):
        if number % 3 != 1:
            continue
        names = follower.config.coordinators
        rest = [
            (
                coordinator_name(later) if coordinator_name(later) in names else later.node,
                later.emitted,
                later.incarnation,
            )
            for later in still.lines[number + 1 :]
        ]
        if not is_rejected(follower, None, *rest):
            missed.append((number, line.action))
    assert {action for _, action in missed} <= {"OpenGate", "CopyItem"}
    assert len(missed) < len(still.lines) / 40


def test_lines_of_a_process_in_another_order_are_rejected_there(still: Run) -> None:
    swapped, missed = 0, []
    for number, line, follower, node in places(still):
        after = next((later for later in still.lines[number + 1 :] if later.node == line.node), None)
        if after is None or (line.action, after.action) in COMMUTE:
            continue
        swapped += 1
        other = (node, after.emitted, after.incarnation), (node, line.emitted, line.incarnation)
        if not is_rejected(follower, None, *other):
            missed.append((number, line.action, after.action))
    assert missed == []
    assert swapped > len(still.lines) / 2


COMMUTE = {
    (a, b)
    for group in (("Accept", "SeeManifest", "OpenApply", "ApplyItem", "StartApply"), ("CopyItem",), ("EmitPayload",))
    for a in group
    for b in group
}
"""Lines of one process that may stand in either order, as far as the specification is concerned."""


# ---------------------------------------------------------------------------------------------------------------- files


def written(directory: Path) -> Path:
    """A run as files, one for each process life."""
    run = steady(3)
    clock, tracers = LamportClock(), dict[tuple[str, int], FileTracer]()
    for line in run.lines:
        life = (line.node, line.incarnation)
        if life not in tracers:
            path = directory / f"{line.node.replace('/', '-')}-{line.incarnation}.ndjson"
            tracers[life] = FileTracer(path, line.node, line.incarnation, clock)  # type: ignore[arg-type]
        tracers[life].emit(line.emitted)
    for tracer in tracers.values():
        tracer.close()
    return directory


def test_a_directory_is_validated_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = written(tmp_path)
    assert main(["validate", str(directory)]) == 0
    assert "accepted" in capsys.readouterr().out
    assert main(["validate"]) == 2


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("doctor", "says"),
    [
        (lambda lines: lines[:10] + lines[11:], "event 10 is missing"),
        (lambda lines: [*lines[:10], lines[11], lines[10], *lines[12:]], "event 10 is missing"),
        (lambda lines: lines[:-3], "there is no end, and nobody killed e0/0"),
        (lambda lines: lines[:-1], "there is no end, and nobody killed e0/0"),
        (lambda lines: [*lines, lines[-2]], "follows the end"),
        (
            lambda lines: [*lines[:10], lines[10].replace(b'"gate":false', b'"gate":true'), *lines[11:]],
            "e0-0-1.ndjson:11",
        ),
    ],
    ids=["dropped", "swapped", "cut", "unended", "appended", "altered"],
)
def test_a_doctored_file_is_rejected_at_the_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], doctor: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    path = written(tmp_path) / "e0-0-1.ndjson"
    path.write_bytes(b"".join(doctor(_lines(path))))
    assert main(["validate", str(tmp_path)]) == 1
    assert says in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------- broken implementations


def yes(*_: Any, **__: Any) -> bool:
    return True


_ELIGIBLE, _COMMIT = alignment.is_eligible, transition._commit


def _xor_like_overwrite(tag: Any, *, mode: AttemptMode, **rest: Any) -> bool:
    return _ELIGIBLE(tag, mode=AttemptMode.OVERWRITE if mode is AttemptMode.XOR else mode, **rest)


def _some_acks(state: Any) -> bool:
    reports = [(m, state.receivers.get(m.receiver)) for m in state.plan.required]
    return any(report is not None and attempt.is_acked(state.plan, m, report) for m, report in reports)


def _commit_and_update(state: Any, plan: Any, record: Any) -> Any:
    state, effects = _COMMIT(state, plan, record)
    early = [CallOwner(UpdateBaseline(o, plan.candidate, record.version + 1)) for o in state.config.owners]
    return state, (*effects, *early)


def _fails_after_first_write(cluster: Cluster) -> None:
    cluster.train(0b111)
    cluster.run_until(
        lambda: any(r.state.tag.kind is TagKind.DIRTY and len(r.issued) == 1 for r in cluster.receivers.values())
    )
    cluster.expire(0)
    cluster.run()


def _update_overtakes_commit(cluster: Cluster) -> None:
    cluster.train(5)
    cluster.run_until(lambda: cluster.coordinators[0].state.phase is Phase.COMMITTING)
    for call in [call for call in cluster.coordinators[0].calls if hasattr(call, "owner")]:
        cluster._do_call((0, call), keep=True)


BROKEN: Mapping[str, tuple[tuple[tuple[ModuleType, str, Callable[..., Any]], ...], Any, str]] = {
    "retry_xor": (
        (
            (control_rules, "may_xor", yes),
            (membership, "is_first_attempt", yes),
            (alignment, "is_eligible", _xor_like_overwrite),
        ),
        _fails_after_first_write,
        "Prepare",
    ),
    "no_endpoint_fence": (((endpoint_guards, "is_current", yes),), ("expire",), "Accept"),
    "ack_before_flush": (((endpoint_guards, "nothing_pending", yes),), ALL_FAULTS, "Flush"),
    "commit_partial_acks": (
        ((attempt, "has_all_acks", _some_acks), (attempt, "digest_agrees", yes)),
        ALL_FAULTS,
        "CompleteAttempt",
    ),
    "base_before_commit": (((transition, "_commit", _commit_and_update),), _update_overtakes_commit, "UpdateBaseline"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_trace_of_broken_code_is_rejected_at_the_faulty_line(name: str) -> None:
    patches, driven, action = BROKEN[name]
    with ExitStack() as stack:
        for module, function, replacement in patches:
            stack.enter_context(patch.object(module, function, replacement))
        if callable(driven):
            from model_tests.recorded import record_simulated
            from model_tests.trace_runs import changes_of

            cluster = Cluster()
            lines = record_simulated(cluster)
            cluster.become(0)
            cluster.run()
            driven(cluster)
            runs = [Run(name, lines, changes_of(cluster))]
        else:
            runs = [simulated(seed, broken=True, faults=driven, settle=False) for seed in range(8)]
    rejected = []
    for run in runs:
        try:
            validate(run.lines, run.changes, every=False)
        except LineRejected as found:
            rejected.append(found)
    assert rejected
    assert rejected[0].line.action == action
