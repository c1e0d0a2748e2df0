"""The comparison of cluster and model finds every field in which they differ.

Spec: vars
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from model_tests import explore, replay
from model_tests.model_state import RAW, Manifest, PayloadMessage, State, changed, clean, dirty
from model_tests.replay import Realisation
from nemo_dcr.protocol.transition_state import Phase

NO_DIGEST = frozenset[Any]()
PAYLOAD = PayloadMessage("payload", 1, "i1", "set", frozenset({1}), frozenset({1}))

RECEIVER = {
    "inc": 2,
    "att": 2,
    "fenced": 5,
    "stopped": True,
    "drained": False,
    "tag": dirty(0, 1),
    "loaded": False,
    "gate": False,
    "requests": frozenset({"q1"}),
    "pending": frozenset({PAYLOAD}),
    "ends": frozenset({Manifest("o1", NO_DIGEST)}),
    "open": True,
    "writing": True,
    "acked": False,
}
OWNER = {
    "inc": 2,
    "att": 2,
    "fenced": 5,
    "status": "idle",
    "kind": "lost",
    "ver": 1,
    "filling": 0,
    "frozen": 1,
    "live": 1,
}
COORDINATOR = {"phase": "running", "epoch": 2, "view": 0}


@pytest.fixture(scope="module")
def start() -> Realisation:
    """Everybody serves version 0."""
    config, _ = explore.read_bounds("MCDeltaRefit.cfg")
    here = replay.warm(config)
    assert here.differences() == []
    return here


def differ(start: Realisation, **changes: Any) -> list[str]:
    """Differences when the model is somewhere else."""
    other = start.fork()
    state: State = changed(start.state, changes)
    other.follower.state = state
    return other.differences()


@pytest.mark.parametrize("field", RECEIVER)
def test_a_receiver_in_another_state_is_found(start: Realisation, field: str) -> None:
    rcv = start.state.rcv["r1"]._replace(**{field: RECEIVER[field]})
    assert differ(start, rcv=start.state.rcv.but("r1", rcv))


@pytest.mark.parametrize("field", OWNER)
def test_an_owner_in_another_state_is_found(start: Realisation, field: str) -> None:
    own = start.state.own["o1"]._replace(**{field: OWNER[field]})
    assert differ(start, own=start.state.own.but("o1", own))


@pytest.mark.parametrize("field", COORDINATOR)
def test_a_coordinator_in_another_state_is_found(start: Realisation, field: str) -> None:
    coord = start.state.coord["c1"]._replace(**{field: COORDINATOR[field]})
    assert differ(start, coord=start.state.coord.but("c1", coord))


def test_a_control_plane_in_another_state_is_found(start: Realisation) -> None:
    state = start.state
    assert differ(start, epoch=2)
    assert differ(start, dead=frozenset({1}))
    assert differ(start, chain=())
    assert differ(start, chain=(state.chain[0]._replace(epoch=2),))
    assert differ(start, table=())
    assert differ(start, table=(state.table[0]._replace(mode="finish"),))
    assert differ(start, table=(state.table[0]._replace(req=frozenset({("r1", 2)})),))


def test_other_messages_are_found(start: Realisation) -> None:
    assert differ(start, net=start.state.net | {PAYLOAD})


def test_other_words_are_found(start: Realisation) -> None:
    store, base = start.state.store, start.state.base
    assert differ(start, base=base.but("i1", frozenset({1})))
    assert differ(start, store=store.but("r1", store["r1"].but("i1", frozenset({2}))))
    other = start.fork()
    other.cluster.receivers[start.stage.receiver("r1")].storage["i1"] ^= 1
    assert other.differences()
    other = start.fork()
    other.cluster.owners[start.stage.owner("o1")].baseline["i1"] ^= 1
    assert other.differences()


def test_raw_storage_may_hold_anything_but_a_version_that_the_model_has(start: Realisation) -> None:
    store = start.state.store
    assert differ(start, store=store.but("r1", store["r1"].but("i1", RAW))) == []


def test_a_node_that_is_ahead_is_left_out(start: Realisation) -> None:
    other = start.fork()
    node = other.cluster.coordinators[0]
    node.state = replace(node.state, phase=Phase.COMMITTING)
    assert other.differences()
    other.owed = (("coordinator 0", other.cluster.lines[0][1]),)
    assert other.differences() == []


def test_a_claim_about_another_version_is_found(start: Realisation) -> None:
    rcv = start.state.rcv["r1"]._replace(tag=clean(1))
    assert differ(start, rcv=start.state.rcv.but("r1", rcv))
