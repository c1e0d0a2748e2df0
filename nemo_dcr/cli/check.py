"""Hands dumped storage to the independent oracle, a process of its own, and reads its verdict.

Dumps came over control sockets; they are written as safetensors files of raw words, so nothing converts a bit. The
oracle (`nemo_dcr.testing.dense_check`, or `nemo_dcr.cli.vllm_check`) loads the same weights densely with the engine's
plain loader and compares.

Paper: Section 8.1 (bit-exactness: every parameter and buffer element, unchanged ones included)
"""

from __future__ import annotations

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


def check_storage(
    job: DemoJob, receivers: Sequence[DumpedReceiver], trackers: Sequence[DumpedTrackers], checkpoint: Path
) -> dict[str, int]:
    """Bits by which each receiver and each owner's trackers differ from `checkpoint`, by name; all ranks are listed."""
    directory = job.directory / "dumps"
    directory.mkdir(exist_ok=True)
    work: dict[str, Any] = {"checkpoint": str(checkpoint), "receivers": [], "trackers": []}
    for dump in receivers:
        file = _write(directory, dump.receiver, dump.storage, dump.frames, _names(dump.storage))
        rank = int(dump.receiver.rsplit("/", 1)[1])
        ranks = job.instances[instance_of(dump.receiver)]
        work["receivers"].append({"name": dump.receiver, "rank": rank, "tp": ranks, "storage": str(file)})
    for held in trackers:
        keys = [f"{number}" for number in range(len(held.storage.tensors))]
        name = f"owner-{held.owner}"
        file = _write(directory, name, held.storage, held.frames, keys)
        entries = [
            {"key": key, "tensor": row.name, "box": [[s, s + n] for s, n in zip(box.start, box.extent, strict=True)]}
            for key, row, box in zip(keys, held.storage.tensors, held.storage.boxes, strict=True)
        ]
        work["trackers"].append({"name": name, "storage": str(file), "entries": entries})
    module = "nemo_dcr.cli.vllm_check" if job.engine == VLLM else "nemo_dcr.testing.dense_check"
    return ask_oracle(directory, work, module)


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


def ask_oracle(directory: Path, work: dict[str, Any], module: str) -> dict[str, int]:
    """Run the oracle over `work` (see `dense_check.run_job`); mismatched bits by name.

    Raises: InternalError when it fails or does not add up.
    """
    path = directory / "check.json"
    path.write_text(json.dumps(work))
    done = subprocess.run([sys.executable, "-m", module, str(path)], capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise InternalError(f"the independent check ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    report = json.loads(done.stdout.splitlines()[-1])  # an engine's own lines may come before
    found = {check["name"]: int(check["mismatched_bits"]) for check in report["checks"]}
    if len(found) != len(work["receivers"]) + len(work["trackers"]) or report["ok"] != (sum(found.values()) == 0):
        raise InternalError(f"the independent check does not add up: {report}")
    return found
