"""The SQLite control plane passes the suites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nemo_dcr.control.sqlite import SqliteControl
from nemo_dcr.testing.control_process_suite import ControlProcessSuite


class TestSqliteControl(ControlProcessSuite):
    def open(self, place: Path, now: Callable[[], float]) -> SqliteControl:
        return SqliteControl(place, now=now)

    def url(self, place: Path) -> str:
        return f"sqlite:///{place}"
