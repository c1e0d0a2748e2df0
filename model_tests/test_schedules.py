"""Schedules of the specification, performed on the real machines: every edge of its state graph, and back again.

Each edge of a configuration is performed by a cluster with equal states after it, or is of a named kind that only the
specification has. In the other direction every behaviour of the smallest cluster is one of the specification.

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import pytest

from model_tests import explore, lockstep, replay
from model_tests.conftest import Tally
from model_tests.freedoms import FREEDOMS
from model_tests.schedule_report import covered
from nemo_dcr.protocol import endpoint_guards, owner_state
from nemo_dcr.protocol.tags import Tag

COVERED = (
    "MCDeltaRefit",
    "MCDeltaRefit_Cold",
    "MCDeltaRefit_Async",
    "MCDeltaRefit_Owners",
    "MCDeltaRefit_Lost",
    "MCDeltaRefit_LiveRetry",
    "MCDeltaRefit_LiveRestart",
    "MCDeltaRefit_LiveOwnerRestart",
)
DEEP = (
    "MCDeltaRefit_LiveTakeover",
    "MCDeltaRefit_Failures",
    "MCDeltaRefit_OwnerRestart",
    "MCDeltaRefit_Abort",
    "MCDeltaRefit_Two",
    "MCDeltaRefit_Restart",
    "MCDeltaRefit_AsyncRestart",
    "MCDeltaRefit_AsyncFaults",
    "MCDeltaRefit_Retry",
)
OF_COVERED = {"one_event", "answered", "copied_already", "stays_closed", "proved_sends_nothing"}
"""Kinds that occur in the configurations of CI; the others need a failure, an abort or a takeover."""
OF_DEEP = {"nothing_asked", "says_again", "only_streams_fail", "one_request"}


@pytest.fixture(scope="module")
def seen_kinds() -> dict[str, frozenset[str | None]]:
    """Kinds that occurred in the configurations so far, by configuration."""
    return {}


@pytest.mark.model
@pytest.mark.parametrize("name", COVERED)
def test_cluster_takes_every_edge_of_the_specification(
    name: str, tally: Tally, seen_kinds: dict[str, frozenset[str | None]]
) -> None:
    found = covered(name)
    print(found)
    assert found.faults() == []
    seen_kinds[name] = frozenset(found.kinds)
    tally.add("schedules", found.report.schedules)


@pytest.mark.model
def test_no_named_kind_is_empty(seen_kinds: dict[str, frozenset[str | None]]) -> None:
    """Alone, it covers the configurations of CI itself."""
    seen_kinds.update({name: frozenset(covered(name).kinds) for name in COVERED if name not in seen_kinds})
    assert frozenset().union(*seen_kinds.values()) == OF_COVERED


@pytest.mark.deep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", DEEP)
def test_cluster_takes_every_edge_of_the_specification_with_more_faults(name: str, tally: Tally) -> None:
    found = covered(name)
    print(found)
    assert found.faults() == []
    tally.add("schedules", found.report.schedules)


# -------------------------------------------------------------------------------------------------- the other direction


@pytest.mark.model
def test_every_behaviour_of_the_smallest_cluster_is_one_of_the_specification() -> None:
    config, _ = explore.read_bounds("MCDeltaRefit_Live.cfg")
    seen = lockstep.explore(replay.warm(config))
    assert (seen.rejected, seen.different, seen.complete) == ([], [], True)
    assert len(seen.modelled) > 30


@pytest.mark.deep
@pytest.mark.timeout(3600)
def test_every_behaviour_of_a_cluster_with_faults_is_one_of_the_specification() -> None:
    config, _ = explore.read_bounds("MCDeltaRefit_Live.cfg")
    seen = lockstep.explore(replay.warm(config), faults=True, limit=30_000)
    assert (seen.rejected, seen.different) == ([], [])


# ---------------------------------------------------------------------------------------------------- negative controls


def no(*_: object) -> bool:
    return False


def yes(*_: object) -> bool:
    return True


def stays(tag: Tag, call: object) -> Tag:
    return tag


@pytest.mark.model
@pytest.mark.parametrize(
    ("module", "guard", "replaced"),
    [
        (endpoint_guards, "may_apply", no),
        (endpoint_guards, "may_open_gate", no),
        (owner_state, "may_end_transition", no),
        (endpoint_guards, "closes_gate", no),
        (endpoint_guards, "dirty_tag", stays),
    ],
)
def test_edges_are_missed_when_a_guard_is_too_strong_or_an_effect_is_wrong(
    module: object, guard: str, replaced: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = covered("MCDeltaRefit_Live", lambda: monkeypatch.setattr(module, guard, replaced))
    assert found.unnamed or found.report.diverged
    assert found.faults()


@pytest.mark.model
@pytest.mark.parametrize(
    ("module", "guard", "replaced"),
    [
        (endpoint_guards, "nothing_pending", yes),
        (endpoint_guards, "not_duplicate", yes),
        (endpoint_guards, "dirty_tag", stays),
        (endpoint_guards, "may_open_gate", yes),
        (owner_state, "holds_version", no),
    ],
)
def test_behaviours_are_rejected_when_a_guard_is_wrong(
    module: object, guard: str, replaced: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = explore.read_bounds("MCDeltaRefit_Live.cfg")
    start = replay.warm(config)
    monkeypatch.setattr(module, guard, replaced)
    seen = lockstep.explore(start, patient=False)
    assert seen.rejected or seen.different


def test_kinds_have_names_of_their_own_and_occur_somewhere() -> None:
    names = [freedom.name for freedom in FREEDOMS]
    assert len(set(names)) == len(names)
    assert set(names) == OF_COVERED | OF_DEEP
    assert all(freedom.divergence.startswith("DV") and freedom.why for freedom in FREEDOMS)
