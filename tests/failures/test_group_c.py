"""Group C of the known failures, as far as the walks of tests/e2e/test_walks.py do not tell them already."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_dcr.config import GateMode
from nemo_dcr.ids import InstanceId, OwnerId, ReceiverId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.testing.local_checks import differences
from nemo_dcr.testing.local_cluster import LocalCluster
from nemo_dcr.trace import Action
from tests.e2e.test_walks import RULES, FailsOnce, cluster_of, finish, prepares

TESTS = Path(__file__).parents[1]
EVERY_MODE = frozenset(AttemptMode)


# -- C8: a part of the fleet


@pytest.mark.parametrize("gate", list(GateMode))
@pytest.mark.parametrize("victim", ["e0/0", "e2/1"])
def test_c8_nobody_serves_a_new_version_before_every_receiver_has_it(victim: str, gate: GateMode) -> None:
    broken = FailsOnce()
    cluster = cluster_of(rules={**RULES, "d.w": broken}, gate=gate)
    cluster.train(rate=0.5)
    broken.arm(cluster, victim)
    written: list[str] = []
    cluster.at("ApplyItem", lambda: written.append("first write"))

    def each_round() -> None:
        if written and cluster.record.version == 0:
            assert not any(receiver.node.report.gate_open for receiver in cluster.receivers.values())

    cluster.run(lambda: cluster.record.version == 1, each=each_round)
    assert (written, prepares(cluster)) == (["first write"], ["xor", "overwrite"])
    for receiver in cluster.receivers.values():
        receiver.bits = None
        assert differences(cluster, receiver, Version(1)) == []
    finish(cluster, 1)


# -- C10: deltas on a wrong base


@pytest.mark.parametrize(("behind", "gate"), [(1, GateMode.SYNC), (3, GateMode.ASYNC)])
def test_c10_a_cold_receiver_is_never_given_deltas_of_later_versions(behind: int, gate: GateMode) -> None:
    """It starts from the checkpoint of version 0 while the others hold a later one: dense restore, or nothing."""
    cluster = cluster_of(gate=gate)
    for _ in range(behind):
        cluster.transition()
    cluster.start_instance(InstanceId("e1"))
    reborn = cluster.receivers[ReceiverId("e1/0")]
    cluster.train(rate=0.5)
    finish(cluster, behind + 1)
    modes = [entry.args["mode"] for entry in _prepares_of(cluster, f"e1/0@{reborn.life.incarnation}")]
    assert modes[0] == "restore"
    assert not {"xor", "overwrite"} & set(modes)


def _prepares_of(cluster: LocalCluster, member: str) -> list[object]:
    journal = [entry for entry in cluster.control.journal() if entry.action == Action.PREPARE]
    return [entry for entry in journal if member in str(entry.args["required"]).split(",")]


# -- C12: recovery paths that no test ever ran


def _retry(cluster: LocalCluster) -> None:
    cluster.at("ApplyItem", lambda: cluster.crash_instance(InstanceId("e1")), node="e0/0")


def _lost_baseline(cluster: LocalCluster) -> None:
    def strike() -> None:
        cluster.crash_owner(OwnerId(0))
        cluster.later(lambda: cluster.restart_owner(OwnerId(0)))

    cluster.at("EmitPayload", strike, node="owner 0")


def _restore(cluster: LocalCluster) -> None:
    def strike() -> None:
        cluster.crash_instance(InstanceId("e1"))
        cluster.later(lambda: cluster.start_instance(InstanceId("e1")))

    cluster.at("Accept", strike, node="e1/0")


def _takeover(cluster: LocalCluster) -> None:
    def strike() -> None:
        cluster.coordinators[0].life.alive = False

    cluster.at("after commit", strike)


RECOVERIES: dict[str, tuple[Callable[[LocalCluster], None], str]] = {
    "overwrite retry": (_retry, "overwrite"),
    "dense attempt": (_lost_baseline, "dense"),
    "dense restore": (_restore, "restore"),
    "roll forward": (_takeover, "finish"),
}


@pytest.mark.parametrize("recovery", RECOVERIES)
def test_c12_every_recovery_runs_on_the_real_nodes(recovery: str) -> None:
    """No stand-ins: coordinator, owners, receivers, codec and loaders are those of a run with processes."""
    strike, mode = RECOVERIES[recovery]
    cluster = cluster_of()
    before = len(prepares(cluster, EVERY_MODE))
    cluster.train(rate=0.5)
    strike(cluster)
    cluster.run(lambda: cluster.idle and cluster.record.version == 1)
    if recovery == "overwrite retry":
        cluster.start_instance(InstanceId("e1"))
    finish(cluster, 1)
    assert mode in prepares(cluster, EVERY_MODE)[before:]


STAND_INS = {"mock", "unittest", "pytest_mock", "MagicMock", "Mock", "create_autospec", "mocker"}
ESCAPES = {"skip", "skipif", "xfail", "importorskip"}


def _escapes_in(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            found |= {part for name in names for part in name.split(".")} & STAND_INS
        elif isinstance(node, ast.arg):
            found |= {node.arg} & STAND_INS
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("pytest", "pytest.mark"):
            found |= {node.attr} & ESCAPES
    return found


def test_c12_no_test_uses_a_stand_in_or_skips_itself() -> None:
    found = {path.relative_to(TESTS).as_posix(): _escapes_in(path.read_text("utf-8")) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "text",
    [
        "from unittest.mock import Mock",
        "import pytest_mock",
        "pytest.skip('no device')",
        "@pytest.mark.xfail\ndef f(): ...",
    ],
)
def test_c12_the_look_for_stand_ins_can_fail(text: str) -> None:
    assert _escapes_in(text)
