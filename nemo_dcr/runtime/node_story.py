"""What an owner or a receiver tells of itself: the timings of an attempt, and when a gate moved.

A node tells an attempt when its part of it ended, also when it failed or was stopped, and again when more came: an
owner after the baseline update, a receiver after the drain. Telling comes after what it tells of, so that nobody waits
for it, and costs a copy of the sums.
Not handled: a node that is killed in an attempt; what it measured is lost with it.

Paper: Appendix C (timed window)
"""

from __future__ import annotations

from nemo_dcr.ids import AttemptId
from nemo_dcr.protocol.tags import Tag
from nemo_dcr.runtime.chronicle import GateMoved, Measured, Told
from nemo_dcr.runtime.timings import StageClock, now


class NodeStory:
    """Tells `told` of one node. Any thread."""

    def __init__(self, timings: StageClock, told: Told) -> None:
        """`timings` are the node's."""
        self._timings = timings
        self._told = told

    def measured(self, attempt: AttemptId) -> None:
        """Tell what was measured in an attempt so far."""
        self._told(Measured(at=now(), attempt=attempt, timings=self._timings.news(attempt)))

    def gate(self, attempt: AttemptId, tag: Tag, is_open: bool) -> None:
        """Tell that the gate moved while storage holds what `tag` says."""
        version = tag.version if is_open else None
        self._told(GateMoved(at=now(), attempt=attempt, is_open=is_open, tag=str(tag), version=version))
