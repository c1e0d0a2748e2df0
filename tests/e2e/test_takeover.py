"""A standby takes over from a coordinator that died in any phase: retry, roll forward or nothing, by the record."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from nemo_dcr.config import GateMode
from nemo_dcr.ids import CandidateId
from nemo_dcr.record import Record
from nemo_dcr.runtime.coordinator_node import Role
from nemo_dcr.testing import chaos_checks, chaos_roles
from nemo_dcr.testing.chaos_points import Edge, Kind, Strike
from nemo_dcr.testing.chaos_roles import REPLACED, TRAIN, Train
from nemo_dcr.testing.chaos_run import describe, settled
from nemo_dcr.testing.chaos_source import Lineage, SystemPlan
from nemo_dcr.testing.chaos_system import ChaosSystem, fork_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT_S = 90.0


@dataclass
class Stage:
    """A running system and the oracle of its weights."""

    system: ChaosSystem
    lineage: Lineage
    steps: int = 0

    def until(self, candidate: CandidateId | None) -> Record:
        """Train, and let the deployment work until everybody serves that candidate."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self.system.tick()
            state = self.system.state()
            record = settled(self.system, state, candidate)
            if record is not None:
                return record
            for owner, report in state.owners.items():
                if candidate and report is not None and not report.candidate:
                    self.system.ask(f"owner-{owner}", TRAIN, Train(candidate))
            time.sleep(0.03)
        raise AssertionError(describe(self.system))

    def transition(self, *strikes: Strike) -> tuple[str, Record, list[str]]:
        """The active coordinator is struck; its name, the next record and the modes of the candidate's attempts."""
        self.steps += 1
        candidate = CandidateId(f"step{self.steps}")
        self.lineage.name(candidate, self.system.control.history()[-1].candidate)
        struck = self.system.active()
        assert self.system.arm({struck: strikes})
        record = self.until(candidate)
        assert chaos_checks.wrong_bits(self.system, self.lineage, record) == []
        assert chaos_checks.wrong_records(self.system.control, self.system.plan.traces) == []
        modes = [
            str(entry.args["mode"])
            for entry in self.system.control.journal()
            if entry.action.value == "Prepare" and entry.args["candidate"] == candidate
        ]
        return struck, record, modes


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    directory: Path = tmp_path_factory.mktemp("takeover") / "system"
    directory.mkdir()
    plan = SystemPlan(
        directory=directory,
        seed=3,
        owners=2,
        instances={"e0": 1},
        gate=GateMode.SYNC,
        lost_after_s=4.0,  # a busy machine is no fault here
        takeover_after_s=3.0,
    )
    system = ChaosSystem(plan, fork_server(), random.Random(1))
    try:
        stage = Stage(system, Lineage(plan))
        stage.until(None)
        yield stage
    finally:
        system.close()
    assert system.faults == []
    assert chaos_checks.wrong_traces(plan.traces) == []


@pytest.mark.parametrize(
    ("point", "edge", "modes"),
    [
        ("record prepare", Edge.BEFORE, ["xor"]),
        ("StartAttempt", Edge.AFTER, ["xor", "overwrite"]),
        ("record commit", Edge.AFTER, ["xor", "finish"]),
        ("RollForward", Edge.AFTER, ["xor", "finish"]),
    ],
)
def test_a_standby_decides_by_the_record_what_a_dead_coordinator_left(
    stage: Stage, point: str, edge: Edge, modes: list[str]
) -> None:
    """B.2: nothing began: XOR. An attempt exists: overwrite. It is committed: roll forward. Never a second commit."""
    before = stage.system.control.history()[-1].version
    dead, record, found = stage.transition(Strike(point, edge, Kind.KILL))
    assert found == modes
    assert record.version == before + 1
    assert stage.system.active() != dead


def test_a_lost_commit_reply_is_settled_by_one_read_and_nobody_takes_over(stage: Stage) -> None:
    epochs = {record.epoch for record in stage.system.control.history()[-1:]}
    struck, record, modes = stage.transition(Strike("record commit", Edge.AFTER, Kind.LOST))
    assert modes == ["xor"]
    assert stage.system.active() == struck
    assert record.epoch >= max(epochs)


def test_a_zombie_coordinator_steps_down_and_ends_with_its_own_code(stage: Stage) -> None:
    """It sleeps over its replacement in front of the commit; what it then asks for is refused."""
    codes: list[int | None] = []
    bury = stage.system.bury

    def note(process: object) -> None:
        codes.append(process.child.exitcode)  # type: ignore[attr-defined]
        bury(process)  # type: ignore[arg-type]

    stage.system.bury = note  # type: ignore[method-assign]
    strike = Strike("record commit", Edge.BEFORE, Kind.STOP, hold_s=6.0)
    zombie, record, modes = stage.transition(strike)
    assert modes[0] == "xor"
    assert stage.system.active() != zombie
    assert codes == [REPLACED]
    refused = [entry for entry in stage.system.control.journal() if entry.action.value == "Conflict"]
    assert [entry.args["operation"] for entry in refused][-1] == "commit"
    assert record.epoch == stage.system.control.read().epoch
    view = stage.system.coordinator()
    assert view is not None
    assert view.role is Role.ACTIVE


def test_the_checks_of_a_live_system_see_other_bits_and_missing_acknowledgements(stage: Stage, tmp_path: Path) -> None:
    _, record, _ = stage.transition()
    stage.lineage.name(CandidateId("other"), record.candidate)
    wrong = chaos_checks.wrong_bits(stage.system, stage.lineage, replace(record, candidate=CandidateId("other")))
    assert {fault.split(":")[0] for fault in wrong} == {"e0/0", "owner 0", "owner 1"}
    lost = chaos_checks.wrong_records(stage.system.control, tmp_path)
    assert f"version {record.version} was committed without e0/0" in lost
    count, served = chaos_checks.wrong_served(stage.system, stage.lineage)
    assert (count > 0, served) == (True, [])
    file = next(stage.system.plan.served.glob("e0-0-*.ndjson"))
    seen = chaos_roles.read_served(file)[-1]
    doctored = [
        replace(seen, last="00"),
        replace(seen, first="00", last="00"),
        replace(seen, clock=0),
    ]
    with file.with_name("e0-0-1.ndjson").open("wb") as forged:
        forged.writelines(msgspec.json.encode(each) + b"\n" for each in doctored)
    _, served = chaos_checks.wrong_served(stage.system, stage.lineage)
    assert [fault.split(" ", 2)[2] for fault in served] == [
        "saw storage change",
        "saw a mixture",
        "saw a version before its commit",
    ]
