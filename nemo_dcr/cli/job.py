"""What the processes of one demo run have in common, as a file in the run directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec


@dataclass(frozen=True, kw_only=True)
class DemoJob:
    """Settings of a run; written once by the driver, read by every child."""

    run: str
    """Run directory: addresses, logs, traces, payload store, commit record."""
    model: str
    """Hugging Face directory that trainer and engines start from."""
    owners: int = 2
    """Trainer ranks."""
    instances: dict[str, int] = field(default_factory=lambda: {"solo": 1, "tp3": 3})
    """Engine instances and their tensor-parallel degrees."""
    chunk_target_bytes: int = 4 << 20
    bucket_target_bytes: int = 4 << 20
    learning_rate: float = 1e-6
    seed: int = 0

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run)

    @property
    def addresses(self) -> Path:
        """Where processes publish their addresses."""
        return self.directory / "addresses"

    @property
    def traces(self) -> Path:
        """One trace file for each process life."""
        return self.directory / "traces"

    @property
    def store(self) -> Path:
        """The payload object store."""
        return self.directory / "store"

    @property
    def record(self) -> str:
        """URL of the commit record."""
        return f"sqlite:///{self.directory / 'record.sqlite'}"

    @property
    def file(self) -> Path:
        """Where this job is written."""
        return self.directory / "job.json"

    def save(self) -> Path:
        """Write the job and make its directories; returns its path."""
        for directory in (self.directory, self.addresses, self.traces, self.store, self.directory / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        return self.file


def load_job(path: Path) -> DemoJob:
    """Read a job file."""
    return msgspec.json.decode(path.read_bytes(), type=DemoJob)
