"""What a long command tells its caller while it works: stages, and bytes done in each."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives stages and bytes; called from one thread only."""

    def stage(self, name: str, nbytes: int) -> None:
        """A stage of `nbytes` bytes of work begins; the one before has ended."""

    def advance(self, nbytes: int) -> None:
        """So many more bytes of the stage are done."""


class Silent:
    """Tells nobody."""

    def stage(self, name: str, nbytes: int) -> None:
        """See `Progress.stage`."""

    def advance(self, nbytes: int) -> None:
        """See `Progress.advance`."""


SILENT = Silent()
