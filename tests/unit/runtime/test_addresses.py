"""Address files: complete or absent, replaced by the next life, waited for with a limit."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from nemo_dcr.errors import EndpointLost
from nemo_dcr.ids import Incarnation
from nemo_dcr.runtime.addresses import Address, new_incarnation, publish_address, wait_for_address


def entry(incarnation: int, name: str = "e0/0") -> Address:
    return Address(name, "tcp://127.0.0.1:5555", Incarnation(incarnation), 77)


def test_a_published_address_is_found_under_its_name(tmp_path: Path) -> None:
    publish_address(tmp_path / "made", entry(4))
    assert wait_for_address(tmp_path / "made", "e0/0", 0.0) == entry(4)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["e0-0.json"]


def test_a_wait_ends_with_the_name_of_what_did_not_come(tmp_path: Path) -> None:
    with pytest.raises(EndpointLost, match=r"e1/0 is lost: no address within 0\.05 s"):
        wait_for_address(tmp_path, "e1/0", 0.05)


def test_the_address_of_an_earlier_life_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    publish_address(tmp_path, entry(4))
    with pytest.raises(EndpointLost):
        wait_for_address(tmp_path, "e0/0", 0.05, other_than=Incarnation(4))
    later = threading.Timer(0.05, publish_address, (tmp_path, entry(5)))
    later.start()
    assert wait_for_address(tmp_path, "e0/0", 10.0, other_than=Incarnation(4)) == entry(5)
    later.join()


def test_a_wait_for_a_process_that_ended_ends_at_once(tmp_path: Path) -> None:
    def ended() -> None:
        raise EndpointLost("e0/0", "ended with 1")

    with pytest.raises(EndpointLost, match="ended with 1"):
        wait_for_address(tmp_path, "e0/0", 60.0, require_alive=ended)


def test_incarnations_grow_also_when_the_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_incarnation(tmp_path, "e0/0")
    publish_address(tmp_path, entry(first))
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    assert new_incarnation(tmp_path, "e0/0") == first + 1
    assert new_incarnation(tmp_path, "e1/0") == 1
