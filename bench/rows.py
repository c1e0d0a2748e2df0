"""What every measurement of a run gives: a row, and the settings that all of them share.

A module of measurements has `rows(settings)`, which yields its rows as they are done. A row with a demand is held when
its value is at least (or at most) that demand; a row without one is told and demands nothing.
Not handled: the order of the modules, and what is written where (bench/__main__.py).

Paper: Section 8
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a run measures."""

    repeats: int = 5
    """Timed calls of each method; the best one counts."""
    seconds: float = 1.0
    """No further repeat of a method begins after this much of its own processor time."""
    shape: tuple[int, int] = (768, 2048)
    """Of one tensor: an expert of a mixture of experts."""
    tensors: int = 32
    """In one measured set."""
    rates: tuple[float, ...] = (0.006, 0.012, 0.03, 0.05)
    """Changed elements of all, for the rows with a demand."""
    checkpoint: Path | None = None
    """A directory with a real checkpoint in safetensors files; rows that need one are left out without it."""
    progress: Callable[[str], None] = field(default=lambda line: None)
    """Told what is measured next."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure and what is demanded of it."""

    name: str
    value: float
    unit: str
    """`x` for a ratio within the run, else a unit such as GB/s, B/chg, us."""
    demand: float | None
    """None: told only."""
    at_least: bool
    """True: the value has to be at least the demand; False: at most."""
    group: str
    """The heading that the row stands under."""

    @property
    def held(self) -> bool:
        """Whether the demand is met; True without a demand."""
        if self.demand is None:
            return True
        return self.value >= self.demand if self.at_least else self.value <= self.demand


Rows = Iterable[Row]
