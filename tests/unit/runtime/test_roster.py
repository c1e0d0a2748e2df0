"""The roster: who is known when, who is left out and why, and connections that are made again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_dcr.ids import Incarnation, OwnerId
from nemo_dcr.runtime.addresses import Address, publish_address
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import PREWARM, TABLE, Nothing, Prewarm, Prewarmed, Table, TensorRow
from nemo_dcr.runtime.roster import Roster
from nemo_dcr.runtime.rpc import Server
from nemo_dcr.trace import LamportClock

ROWS = (TensorRow("a", (2,), "BF16"), TensorRow("b", (3,), "F32"))


class Place:
    """A directory of addresses, and servers that answer as owners and receivers do."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.servers: dict[str, Server] = {}
        self.asked: list[tuple[str, Prewarm]] = []
        self.endpoints = SocketEndpoints(LamportClock())
        self.roster = Roster(directory, self.endpoints, LamportClock(), owners=1, prewarm_s=20.0)

    def add(self, name: str, answer: Prewarmed | None = None, life: int = 1) -> None:
        server = Server(name, LamportClock())
        server.answer(TABLE, lambda call: Table(ROWS, 5, 10))

        def prewarm(call: Prewarm) -> Prewarmed | None:
            self.asked.append((name, call))
            return answer

        server.answer(PREWARM, prewarm)
        server.start()
        self.servers[name] = server
        publish_address(self.directory, Address(name, server.address, Incarnation(life), 1))

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 30.0
        while not holds():
            assert time.monotonic() < deadline, (self.endpoints.receivers(), self.roster.left_out)
            self.roster.refresh()
            time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    try:
        yield found
    finally:
        found.endpoints.close()
        for server in found.servers.values():
            server.close()


BOTH = Prewarmed({"a": "xor", "b": "overwrite"}, {})


def test_a_receiver_is_known_once_the_owners_told_their_tensors_and_it_was_prewarmed(place: Place) -> None:
    place.add("e0/0", BOTH)
    for _ in range(20):
        place.roster.refresh()
    assert place.asked == []
    place.add("owner-0")
    place.until(place.endpoints.receivers)
    assert place.asked == [("e0/0", Prewarm(ROWS))]
    assert place.endpoints.receivers() == {"e0/0": 1}
    assert place.endpoints.owners() == (OwnerId(0),)
    assert place.roster.classes == {"a": "xor", "b": "overwrite"}


def test_ranks_that_skip_what_others_take_are_known_together(place: Place) -> None:
    place.add("owner-0")
    place.add("e0/0", Prewarmed({"a": "xor", "b": "skipped"}, {}))
    place.until(lambda: "e0/0" in place.roster.left_out)
    assert "until another rank takes what it skips" in place.roster.left_out["e0/0"]
    assert place.endpoints.receivers() == {}
    place.add("e0/1", Prewarmed({"a": "skipped", "b": "xor"}, {}))
    place.until(lambda: len(place.endpoints.receivers()) == 2)
    assert place.roster.left_out == {}
    assert place.roster.classes == {"a": "xor", "b": "xor"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Prewarmed({"a": "unsupported", "b": "xor"}, {"a": ("LC4", "it adds rows")}), "(LC4): it adds rows"),
        (Prewarmed({}, {}, "OperatorNeeded: a thread writes"), "was not prewarmed: OperatorNeeded: a thread writes"),
    ],
)
def test_a_receiver_that_does_not_fit_is_left_out_with_the_reason(place: Place, answer: Prewarmed, reason: str) -> None:
    place.add("owner-0")
    place.add("bad/0", answer)
    place.add("good/0", BOTH)
    place.until(lambda: place.endpoints.receivers() and place.roster.left_out)
    assert list(place.endpoints.receivers()) == ["good/0"]
    assert reason in place.roster.left_out["bad/0"]


def test_a_new_life_takes_the_place_of_the_old_one(place: Place) -> None:
    place.add("owner-0")
    place.add("e0/0", BOTH, life=1)
    place.until(place.endpoints.receivers)
    place.servers["e0/0"].close()
    place.add("e0/0", replace(BOTH, classes={"a": "overwrite", "b": "overwrite"}), life=2)
    place.until(lambda: place.endpoints.receivers() == {"e0/0": 2})
    assert place.roster.classes == {"a": "overwrite", "b": "overwrite"}


def test_a_broken_connection_is_made_again_while_the_process_lives(place: Place) -> None:
    """As after a partition: the address is the same life, so only the connection is new."""
    place.add("owner-0")
    place.add("e0/0", BOTH)
    place.until(place.endpoints.receivers)
    for peer in (place.endpoints._receivers["e0/0"][0], place.endpoints._owners[OwnerId(0)]):  # type: ignore[index]
        peer.disconnected = True
    assert sorted(place.endpoints.broken()) == ["e0/0", "owner-0"]
    place.until(lambda: not place.endpoints.broken())
    assert place.endpoints.receivers() == {"e0/0": 1}
    ((table, _),) = place.endpoints.call_owners(TABLE, Nothing(), 5.0).values()
    assert table.tensors == ROWS
