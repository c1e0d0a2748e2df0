"""The control plane in memory passes the suite; one object for each place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from nemo_dcr.control.memory import MemoryControl
from nemo_dcr.testing.control_suite import ControlSuite


class TestMemoryControl(ControlSuite):
    def open(self, place: Path, now: Callable[[], float]) -> MemoryControl:
        self.opened: dict[Path, MemoryControl] = getattr(self, "opened", {})
        return self.opened.setdefault(place, MemoryControl(now=now))
