"""One file for each finished step of a run: what was sampled, what it earned, and which bits followed.

A run is deterministic given its samples, so these files are all that a resumed run needs: it trains on the recorded
samples of every finished step, compares each step's digest with the recorded one, sends one refit, and goes on. A file
appears under its name when it is complete, so a killed run leaves no half step.
Not handled: two runs of one method in one directory at once.

Paper: Section 8.3 (resumed runs are the same runs)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nemo_dcr.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    prompt: tuple[int, ...]
    """Token ids."""
    tokens: tuple[int, ...]
    """Sampled token ids; the last one may end the text."""
    logprobs: tuple[float, ...]
    """Of the sampled tokens, by the server that sampled them."""
    text: str
    instance: str
    version: int
    """Committed version that every token was computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One finished step."""

    step: int
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    divergences: tuple[float, ...]
    """Mean over the tokens of each sample."""
    lags: tuple[int, ...]
    """Versions that each sample was behind the policy that learned from it."""
    loss: float
    change_rate: float
    """Of the BF16 elements, in this step."""
    trainer_digest: str
    """Of every stored bit of every trainer rank after the step."""
    server_digests: dict[str, str]
    """Of every stored bit of every live server after the refit."""
    version: int
    """Committed by this step's refit, in this life of the run."""
    modes: tuple[str, ...]
    """Of the attempts of the refit, in order."""
    refit_s: float
    """The committed attempt, from its first comparison to the last baseline update."""
    transition_s: float
    """From the frozen weights until every live server serves them, failed attempts included."""
    killed: str = ""
    restarted: str = ""
    resumed: bool = False
    """The first step after a resumption: its processes are new."""

    @property
    def mean_reward(self) -> float:
        """Over the samples."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def divergence(self) -> float:
        """Per token, over all tokens of the step."""
        counts = [len(sample.tokens) for sample in self.samples]
        return sum(d * n for d, n in zip(self.divergences, counts, strict=True)) / sum(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What makes two runs comparable; written once into the directory of a run."""

    seed: int
    learning_rate: float
    max_tokens: int
    samples: int
    group: int
    kills: tuple[tuple[int, int, str], ...]
    asynchronous: bool = False


class RunDirectory:
    """The records of one method."""

    def __init__(self, path: Path, settings: Settings) -> None:
        """Open or make it. Raises: InvalidConfig when it belongs to a run with other settings."""
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "settings.json"
        if not file.is_file():
            _write(file, msgspec.json.encode(settings))
        elif (held := msgspec.json.decode(file.read_bytes(), type=Settings)) != settings:
            raise InvalidConfig("grpo.directory", f"{self.path} belongs to {held}; name another one, or the same run")

    def finish(self, record: StepRecord) -> None:
        """Write the record of the next step."""
        _write(self._file(record.step), msgspec.json.encode(record))

    def records(self) -> tuple[StepRecord, ...]:
        """All finished steps, from 1 on without a gap."""
        found: list[StepRecord] = []
        while (file := self._file(len(found) + 1)).is_file():
            found.append(msgspec.json.decode(file.read_bytes(), type=StepRecord))
        return tuple(found)

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step:04d}.json"


def digest_of(parts: Sequence[str]) -> str:
    """One digest of several, in order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(data)
    scratch.replace(path)
