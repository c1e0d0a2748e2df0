"""Durable commit records behind one interface (level 3): `nemo_dcr.record.ControlPlane`.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
"""

from __future__ import annotations

from nemo_dcr.control.memory import MemoryControl
from nemo_dcr.control.sqlite import SqliteControl
from nemo_dcr.control.urls import open_control

__all__ = ["MemoryControl", "SqliteControl", "open_control"]
