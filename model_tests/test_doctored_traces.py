"""Doctored traces and those of broken code are rejected at the faulty line.

Each field of a run without faults is altered in turn, lines are dropped and reordered, files cut and swapped. Digest
classes are altered in runs with tensors and faults too. Broken code differs from the sound one in one weakened guard.

Spec: Next, TraceDeltaRefit
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model_tests import digest_classes
from model_tests.digest_classes import read
from model_tests.follower import Follower, Rejected
from model_tests.model_state import RAW
from model_tests.mutants import BY_NAME
from model_tests.patching import yes
from model_tests.proved_runs import weakened
from model_tests.trace_export import LineRejected, constants, coordinator_name, main, validate
from model_tests.trace_files import Line
from model_tests.trace_runs import Run, local, simulated, steady
from nemo_dcr import control_rules
from nemo_dcr.ids import ReceiverId
from nemo_dcr.protocol import alignment, membership
from nemo_dcr.protocol.tags import Tag
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime.trace_file import FileTracer
from nemo_dcr.trace import Emit, LamportClock
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
            if key == "stored":  # see digest classes
                continue
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


# ------------------------------------------------------------------------------------------------------- digest classes


@pytest.mark.parametrize(
    ("record", "kinds"),
    [(lambda: steady(1, owners=2), {"mixed", "some", "every"}), (lambda: local(2), {"some", "every"})],
    ids=["simulated", "tensors"],
)
def test_another_digest_class_is_rejected_at_its_line(record: Callable[[], Run], kinds: set[str]) -> None:
    """Storage that the model does not know may be anything: a process started, and nobody proved what it loaded."""
    classes, missed = Counter[str](), []
    for number, line, follower, node in places(record()):
        told = read(str(line.emitted.post.get("stored", "")))
        known = sorted(key for key in told if follower.names.item(*key) in follower.config.items)
        if not known:
            continue
        key = known[number % len(known)]
        names = frozenset(follower.names.candidates)
        classes["mixed" if not told[key] else "every" if told[key] == names else "some"] += 1
        others = {"mixed": frozenset[str](), "another": names - told[key]} if told[key] else {}
        for what, other in others.items():
            post = {**line.emitted.post, "stored": _told({**told, key: other})}
            if not is_rejected(follower, number, (node, replace(line.emitted, post=post), line.incarnation)):
                after = follower.fork()
                after.line(node, line.emitted, line.incarnation)
                if not after.state.store[after.names.node(line.node)][after.names.item(*key)] >= RAW:
                    missed.append((number, line.action, key, what))
    assert missed == []
    assert set(classes) == kinds


def _told(classes: Mapping[tuple[str, str], Iterable[str]]) -> str:
    return digest_classes.told({(int(o.removeprefix("owner ")), t): list(of) for (o, t), of in classes.items()})


def test_a_write_that_never_landed_shows_in_the_digest_class_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = Cluster._do_write

    def lost(self: Cluster, name: ReceiverId) -> None:
        key, item, _, _ = self.receivers[name].issued[0]
        self.receivers[name].issued[0] = key, item, True, 0  # XOR with nothing
        sound(self, name)

    monkeypatch.setattr(Cluster, "_do_write", lost)
    run = steady(1)
    first = next(line for line in run.lines if line.action == "ApplyItem")
    with pytest.raises(LineRejected, match="is the word of") as rejected:
        validate(run.lines, run.changes)
    assert rejected.value.line == first
    validate([_without(line, "stored") for line in run.lines], run.changes)


def _without(line: Line, key: str) -> Line:
    post = {name: value for name, value in line.emitted.post.items() if name != key}
    return replace(line, emitted=replace(line.emitted, post=post))


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


BROKEN = {
    "retry_xor": "EmitPayload",
    "no_endpoint_fence": "Accept",
    "ack_before_flush": "Flush",
    "commit_partial_acks": "CompleteAttempt",
    "base_before_commit": "UpdateBaseline",
}


def rejections(runs: Iterable[Run]) -> list[LineRejected]:
    """The first line of each run that is no step, where there is one."""
    found = []
    for run in runs:
        try:
            validate(run.lines, run.changes, every=False)
        except LineRejected as rejected:
            found.append(rejected)
    return found


@pytest.mark.parametrize(("name", "action"), BROKEN.items())
def test_the_trace_of_broken_code_is_rejected_at_the_faulty_line(name: str, action: str) -> None:
    assert {each.line.action for each in rejections(weakened(BY_NAME[name]))} == {action}


_ELIGIBLE = alignment.is_eligible


def _xor_like_overwrite(tag: Tag, *, mode: AttemptMode, **rest: Any) -> bool:
    return _ELIGIBLE(tag, mode=AttemptMode.OVERWRITE if mode is AttemptMode.XOR else mode, **rest)


def test_a_retry_that_asks_for_xor_again_is_rejected_at_its_prepare() -> None:
    """The same fault one step earlier: everybody lets the second attempt be one by XOR."""
    everywhere = (
        (control_rules, "may_xor", yes),
        (membership, "is_first_attempt", yes),
        (alignment, "is_eligible", _xor_like_overwrite),
    )
    runs = weakened(replace(BY_NAME["retry_xor"], patches=everywhere), walks=0)
    assert [each.line.action for each in rejections(runs)] == ["Prepare"]
