"""docs/trace.md, the Action enum and the events of real runs say the same."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from pkgutil import iter_modules

import pytest

from nemo_dcr import control_rules, protocol, record
from nemo_dcr.ids import CandidateId, Epoch, OwnerId, ReceiverId
from nemo_dcr.protocol import coordinator_events as ce
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol import owner_state as os_
from nemo_dcr.trace import Action
from tests.unit.protocol.chaos import walk
from tests.unit.protocol.cluster import Cluster

PAGE = Path(__file__).parents[3] / "docs" / "trace.md"
POST = {
    "receiver": {"att", "tag", "gate"},
    "owner": {"att", "tracker", "frozen"},
    "attempt": {"phase"},
    "coordinator": {"phase", "epoch", "version"},
}


def table(section: str) -> list[tuple[str, str, str, str]]:
    """The rows of the table in a section of the page; the action comes first, without its quotes."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = []
    for line in re.findall(r"^\| `.*$", text, re.MULTILINE):
        action, second, third, last = (cell.strip() for cell in line.strip("|").split("|"))
        found.append((action.strip("`"), second, third, last))
    return found


def quoted(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", cell))


def rows() -> dict[str, tuple[set[str], set[str], str]]:
    """Action -> actors, argument names, last column."""
    return {name: (set(actors.split(", ")), quoted(args), effect) for name, actors, args, effect in table("Actions")}


@pytest.fixture(scope="module")
def events() -> list:
    """Everything that a few disturbed runs and a failing stream emit, and the control planes' journals."""
    emitted = []
    for seed in range(8):
        cluster = walk(seed, budget=4, settle=False)
        emitted += [*cluster.emits, *cluster.control.journal()]
    cluster = Cluster()
    cluster.become(0)
    cluster.run()
    cluster.train(5)
    cluster.run_until(lambda: cluster.owners[OwnerId(0)].stream is not None)
    attempt = cluster.owners[OwnerId(0)].state.attempt
    cluster.run_until(lambda: cluster.receivers[ReceiverId("e0/0")].state.attempt == attempt)
    cluster._receive(ReceiverId("e0/0"), es.PayloadRejected(attempt, "a digest is wrong"))
    cluster._own(OwnerId(0), os_.StreamFailed(attempt, "the store is full"))
    cluster.crash_owner(OwnerId(0))
    cluster.run()
    cluster.become(1)
    cluster._execute(ce.AskKill(Epoch(1), CandidateId("c1")))
    cluster.train(5)
    cluster.run_until(lambda: cluster.coordinators[1].state.phase == "running")
    cluster.abort(1)
    cluster.run()
    cluster.crash_owner(OwnerId(0))
    cluster.run()
    cluster.train(6)
    cluster.run_until(lambda: cluster.coordinators[1].state.phase == "preparing")
    cluster._receive(ReceiverId("e0/0"), es.EngineSlept(keeps_storage=True))
    cluster.run_until(lambda: cluster.emits[-1].action is Action.REFUSE_PREPARE)
    return [*emitted, *cluster.emits, *cluster.control.journal()]


def test_page_lists_exactly_the_actions_of_the_enum():
    every = [action.value for action in Action]
    assert sorted(name for name, *_ in table("Actions")) == sorted(every)
    assert sorted(name for name, *_ in table("Steps")) == sorted(every)


def test_triggers_and_guards_of_the_page_are_names_in_the_code():
    modules = [importlib.import_module(f"nemo_dcr.protocol.{found.name}") for found in iter_modules(protocol.__path__)]
    modules += [control_rules, record]
    names = {name: value for module in modules for name, value in vars(module).items()}
    triggers = set[str]().union(*(quoted(trigger) for _, trigger, _, _ in table("Steps"))) - {a.value for a in Action}
    guards = set[str]().union(*(quoted(guard) for _, _, guard, _ in table("Steps"))) - {a.value for a in Action}
    assert {name for name in triggers if not inspect.isclass(names.get(name))} == set()
    assert {name for name in guards if not inspect.isfunction(names.get(name))} == set()
    assert len(guards) > 30


def test_runs_emit_every_action(events):
    assert {event.action for event in events} == set(Action)


def test_events_carry_the_arguments_that_the_page_lists(events):
    documented = rows()
    wrong = {
        (event.action.value, tuple(event.args))
        for event in events
        if not (set(event.args) == documented[event.action][1] or event.action is Action.IGNORE_STALE)
    }
    assert wrong == set()
    assert all(set(e.args) <= documented["IgnoreStale"][1] for e in events if e.action is Action.IGNORE_STALE)


def test_events_carry_the_post_state_of_their_actor(events):
    documented = rows()
    wrong = set()
    for event in events:
        actors, _, effect = documented[event.action]
        allowed = [POST[actor] for actor in actors if actor in POST]
        if actors == {"control plane"}:
            allowed = [set(re.findall(r"`(\w+)`", effect.split("post:")[1]))]
        if set(event.post) not in allowed:
            wrong.add((event.action.value, tuple(event.post)))
    assert wrong == set()


def test_values_are_scalars(events):
    values = [value for event in events for value in (*event.args.values(), *event.post.values())]
    assert all(value is None or isinstance(value, str | int | bool) for value in values)
