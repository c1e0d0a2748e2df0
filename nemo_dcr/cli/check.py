"""Hands dumped storage to the independent oracle, a process of its own, and reads its verdict.

Dumps came over control sockets; they are written as safetensors files of raw words, so nothing converts a bit. The
oracle (`nemo_dcr.testing.dense_check`, or `nemo_dcr.cli.vllm_check`) loads the same weights densely with the engine's
plain loader and compares.

Paper: Section 8.1 (bit-exactness: every parameter and buffer element, unchanged ones included)
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_dcr.bits import words
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.cli.job import VLLM, DemoJob
from nemo_dcr.cli.processes import environment
from nemo_dcr.errors import InternalError
from nemo_dcr.ids import OwnerId, ReceiverId, instance_of
from nemo_dcr.runtime.methods import Storage
from nemo_dcr.testing.dense_check import dump_tensors


@dataclass(frozen=True, slots=True)
class DumpedReceiver:
    """Every parameter and buffer of one rank."""

    receiver: ReceiverId
    storage: Storage
    frames: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class DumpedTrackers:
    """Every tracker of one owner."""

    owner: OwnerId
    storage: Storage
    frames: tuple[bytes, ...]


class Oracle:
    """The oracle's process, asked once for each comparison; use one for a run, since importing an engine takes long."""

    def __init__(self, job: DemoJob) -> None:
        self._job = job
        self._directory = job.directory / "dumps"
        self._log = job.directory / "logs" / "oracle.log"
        self._process: subprocess.Popen[str] | None = None

    def check(
        self, receivers: Sequence[DumpedReceiver], trackers: Sequence[DumpedTrackers], checkpoint: Path
    ) -> dict[str, int]:
        """Bits by which receivers and trackers of owners differ from `checkpoint`, by name; all ranks are listed.

        Raises: InternalError when the oracle ended, or does not answer for what it was asked.
        """
        self._directory.mkdir(exist_ok=True)
        work: dict[str, Any] = {"checkpoint": str(checkpoint), "receivers": [], "trackers": []}
        for dump in receivers:
            file = _write(self._directory, dump.receiver, dump.storage, dump.frames, _names(dump.storage))
            rank = int(dump.receiver.rsplit("/", 1)[1])
            ranks = self._job.instances[instance_of(dump.receiver)]
            work["receivers"].append({"name": dump.receiver, "rank": rank, "tp": ranks, "storage": str(file)})
        for held in trackers:
            keys = [f"{number}" for number in range(len(held.storage.tensors))]
            name = f"owner-{held.owner}"
            file = _write(self._directory, name, held.storage, held.frames, keys)
            entries = [
                {
                    "key": key,
                    "tensor": row.name,
                    "box": [[s, s + n] for s, n in zip(box.start, box.extent, strict=True)],
                }
                for key, row, box in zip(keys, held.storage.tensors, held.storage.boxes, strict=True)
            ]
            work["trackers"].append({"name": name, "storage": str(file), "entries": entries})
        return self.ask(work)

    def ask(self, work: dict[str, Any]) -> dict[str, int]:
        """Mismatched bits by name of everything that `work` lists (see `dense_check.run_job`).

        Raises: InternalError as `check`.
        """
        self._directory.mkdir(exist_ok=True)
        report = self._ask(work)
        found = {check["name"]: int(check["mismatched_bits"]) for check in report["checks"]}
        if len(found) != len(work["receivers"]) + len(work["trackers"]) or report["ok"] != (sum(found.values()) == 0):
            raise InternalError(f"the independent check does not add up: {report}")
        return found

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, work: dict[str, Any]) -> dict[str, Any]:
        path = self._directory / "check.json"
        path.write_text(json.dumps(work))
        process = self._started()
        if process.stdin is None or process.stdout is None:
            raise InternalError("the independent check has no pipes")
        with contextlib.suppress(BrokenPipeError):  # it ended; its log says why
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
        for line in process.stdout:
            report = _report(line)
            if report is not None:
                return report
        end = self._log.read_text(errors="replace").strip()[-500:]
        raise InternalError(f"the independent check ended with {process.wait()}: {end}")

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            module = "nemo_dcr.cli.vllm_check" if self._job.engine == VLLM else "nemo_dcr.testing.dense_check"
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, "-"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=environment(),
                )
        return self._process


def _report(line: str) -> dict[str, Any] | None:
    """The oracle's answer; None for a line that the engine's own code printed."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "checks" in found else None


def _names(storage: Storage) -> list[str]:
    return [row.name for row in storage.tensors]


def _write(directory: Path, name: str, storage: Storage, frames: Sequence[bytes], keys: Sequence[str]) -> Path:
    file = directory / f"{name.replace('/', '-')}.safetensors"
    shapes = [box.extent for box in storage.boxes] or [row.shape for row in storage.tensors]
    rows = zip(keys, storage.tensors, shapes, frames, strict=True)
    dump_tensors(
        {key: tensor_from_words(words(frame, row.dtype), row.dtype, shape) for key, row, shape, frame in rows}, file
    )
    return file
