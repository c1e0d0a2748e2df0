"""Meetings are entered by all ranks or by none. Over gloo: see test_trainer_geometries."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from nemo_dcr.errors import AttemptFailed, EndpointLost
from nemo_dcr.source.exchange import GroupExchange, LoneExchange, OwnGroupExchange
from nemo_dcr.testing.ranks import Hall, ThreadExchange, run_in_threads


def test_threads_gather_and_scatter_by_rank() -> None:
    def work(exchange: ThreadExchange) -> tuple[list[bytes], list[bytes]]:
        gathered = exchange.gather(b"%d" % exchange.rank)
        scattered = exchange.scatter([b"%d>%d" % (exchange.rank, other) for other in range(exchange.world)])
        return gathered, scattered

    for rank, (gathered, scattered) in enumerate(run_in_threads(3, work)):
        assert gathered == [b"0", b"1", b"2"]
        assert scattered == [b"%d>%d" % (other, rank) for other in range(3)]


def test_the_first_decision_holds_for_all() -> None:
    hall = Hall(2)
    hall.ready["k"] = 1
    exchange = ThreadExchange(hall, 1)
    exchange.meet("k")
    exchange.give_up("k")
    assert hall.outcomes == {"k": "go"}
    exchange.give_up("m")
    hall.ready["m"] = 1
    with pytest.raises(AttemptFailed, match="stopped at m"):
        exchange.meet("m")


def test_a_lone_trainer_meets_itself_unless_stopped() -> None:
    exchange = LoneExchange()
    exchange.meet("k")
    exchange.give_up("k")
    assert exchange.gather(b"x") == exchange.scatter([b"x"]) == [b"x"]
    with pytest.raises(AttemptFailed):
        exchange.meet("k", lambda: True)


class _FixedWorld(GroupExchange):
    """Meetings of a store without a process group, to walk through their outcomes in one process."""

    @property
    def world(self) -> int:
        return 2


def test_a_store_decides_a_meeting_once() -> None:
    store = dist.HashStore()
    exchange = _FixedWorld(store)
    polls = iter([False, False, True])
    with pytest.raises(AttemptFailed, match="stopped at early"):
        exchange.meet("early", lambda: next(polls, True))
    with pytest.raises(AttemptFailed, match="stopped at early"):
        exchange.meet("early")
    other = threading.Thread(target=_FixedWorld(store).meet, args=("both",))
    other.start()
    exchange.meet("both")
    other.join()
    exchange.give_up("both")
    assert store.get("nemo-dcr/both/outcome") == b"go"


def test_a_store_that_fails_is_a_lost_endpoint() -> None:
    class Broken:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection reset")

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            raise RuntimeError("connection reset")

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

        def get(self, key: str) -> bytes:
            raise RuntimeError("connection reset")

    for call in ("meet", "give_up"):
        with pytest.raises(EndpointLost, match="connection reset"):
            getattr(_FixedWorld(Broken()), call)("k")


def test_own_groups_exchange_without_torch_knowing_them_and_end_with_their_objects(tmp_path: Path) -> None:
    """Also again under a name of its own, over the same store, and beside each other."""

    def work(rank: int) -> list[list[bytes]]:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        found = []
        for number in range(2):
            pair = [OwnGroupExchange(store, rank, 2, f"{number}/{use}", timedelta(seconds=30)) for use in "ab"]
            assert [(each.rank, each.world) for each in pair] == [(rank, 2)] * 2
            found += [each.gather(b"%d" % (rank + number)) for each in pair]
            pair[0].meet("m")
            found.append(pair[1].scatter([b"", b"%d" % rank]))
            del pair
        return found

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(work, range(2)))
    assert not dist.is_initialized()
    for rank, found in enumerate(results):
        mail = [b"", b""] if rank == 0 else [b"0", b"1"]
        assert found == [[b"0", b"1"], [b"0", b"1"], mail, [b"1", b"2"], [b"1", b"2"], mail]


def test_a_rank_that_does_not_come_or_not_answer_is_lost(tmp_path: Path) -> None:
    def store() -> dist.FileStore:
        return dist.FileStore(str(tmp_path / "store"), 2)

    with pytest.raises(EndpointLost, match="trainer ranks"):
        OwnGroupExchange(store(), 0, 2, "alone", timedelta(seconds=1))

    def join(rank: int) -> OwnGroupExchange:
        return OwnGroupExchange(store(), rank, 2, "pair", timedelta(seconds=2))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
    with pytest.raises(EndpointLost, match="trainer ranks"):
        first.gather(b"x")
    del second
