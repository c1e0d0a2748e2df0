"""Durable commit records behind one interface (level 3): `nemo_dcr.record.ControlPlane`.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
"""

from __future__ import annotations

import time
from collections.abc import Callable

from nemo_dcr.control.memory import MemoryControl
from nemo_dcr.control.sqlite import SqliteControl
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.record import ControlPlane

__all__ = ["MemoryControl", "SqliteControl", "open_control"]

_SQLITE = "sqlite:///"


def open_control(url: str, *, now: Callable[[], float] = time.time) -> ControlPlane:
    """Open the commit record at `sqlite:///PATH`; an absolute path makes four slashes.

    Raises: InvalidConfig for another URL; otherwise as `SqliteControl`.
    """
    if not url.startswith(_SQLITE) or url == _SQLITE:
        raise InvalidConfig("control.url", f"must be sqlite:///PATH, got {url!r}")
    return SqliteControl(url.removeprefix(_SQLITE), now=now)
