"""The independent oracle: every stored bit of a rank against a plain dense load of a checkpoint.

A fresh engine rank is filled with a poison pattern and loaded by its native loader; names, dtypes, shapes and every
bit of every parameter and buffer must equal the storage under test, changed or not. A position that the loader leaves
unwritten keeps the poison and therefore shows. Trackers are compared with boxes of the committed checkpoint.
Nothing of the source, receiver or protocol code is imported here, so the oracle shares no error with it.
Run as `python -m nemo_dcr.testing.dense_check JOB.json`; the job is described at `run_job`. With `-` for it, paths of
jobs are read from standard input, one a line, and each is answered by a line, so that imports are paid for once.
Not handled: storage on a GPU (dump it to the CPU first).

Paper: Section 6 (dense refit as the reference), Appendix C (post-apply checks)   Proofs: Proposition 1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nemo_dcr.bits import Words, width
from nemo_dcr.bits.tensors import copied_words, dtype_name, integer_view
from nemo_dcr.testing.checkpoint import read_checkpoint, read_config
from nemo_dcr.testing.reference_engine import ReferenceEngine

Stored = tuple[str, tuple[int, ...], Words]
"""(dtype by its safetensors name, shape, flat words) of one parameter, buffer or tracker."""

Box = Sequence[tuple[int, int]]
"""Half-open (start, stop) of each dimension of a canonical tensor; empty for a 0-d tensor."""

POISON = 0xA5
"""Every byte of a parameter before the dense load."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of one comparison."""

    mismatched_bits: int
    """Differing bits; a name, dtype or shape that differs counts all its bits."""
    compared_elements: int
    first: str | None
    """The first difference in words, or None."""

    @property
    def equal(self) -> bool:
        """True iff nothing differs."""
        return self.first is None


def stored_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer, persistent or not, under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def storage_of(model: nn.Module) -> dict[str, Stored]:
    """A copy of every stored bit of `model` by name."""
    return {name: _stored(tensor) for name, tensor in stored_tensors(model)}


def dump_storage(model: nn.Module, path: Path) -> None:
    """Write every parameter and buffer of `model` to a safetensors file, for a check by another process."""
    dump_tensors(dict(stored_tensors(model)), path)


def dump_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors to a safetensors file; the file appears under its name when it is complete."""
    path = Path(path)
    scratch = path.with_name(f".{path.name}")
    # Integer clones: no float operator touches the bits, and names that share storage become separate entries.
    copies = {name: integer_view(t).cpu().clone().contiguous().view(t.dtype) for name, t in tensors.items()}
    save_file(copies, scratch)
    scratch.replace(path)


def read_storage(path: Path) -> dict[str, Stored]:
    """What `dump_storage` wrote."""
    with safe_open(Path(path), framework="pt") as handle:
        return {name: _stored(handle.get_tensor(name)) for name in sorted(handle.keys())}


def expected_storage(
    engine_config: Mapping[str, Any], rank: int, tp: int, checkpoint_dir: Path, *, vocab_padding: int = 1000
) -> dict[str, Stored]:
    """The storage of rank `rank` of `tp` after a plain dense load of `checkpoint_dir` into a fresh engine.

    Raises: InvalidConfig for an unsupported model or a bad checkpoint directory.
    """
    engine = ReferenceEngine(engine_config, rank, tp, vocab_padding=vocab_padding)
    for parameter in engine.parameters():
        integer_view(parameter).fill_(_poison_word(parameter.dtype))
    engine.load_weights((meta.name, tensor) for meta, tensor in read_checkpoint(checkpoint_dir))
    return storage_of(engine)


def expected_tracker(tensors: Mapping[str, Tensor], name: str, box: Box) -> Stored:
    """What the tracker of a box of canonical tensor `name` holds at the version of `tensors`.

    Raises: ValueError when the box does not fit the tensor.
    """
    tensor = tensors[name]
    if len(box) != tensor.ndim or any(not 0 <= a <= b <= n for (a, b), n in zip(box, tensor.shape, strict=False)):
        raise ValueError(f"box {list(box)} does not fit {name} of shape {tuple(tensor.shape)}")
    return _stored(tensor[tuple(slice(start, stop) for start, stop in box)])


def compare_storage(expected: Mapping[str, Stored], actual: Mapping[str, Stored]) -> Comparison:
    """Compare names, dtypes, shapes and every stored bit."""
    total = elements = 0
    first: str | None = None
    for name in sorted(set(expected) | set(actual)):
        if name not in expected or name not in actual:
            dtype, shape, _ = expected.get(name) or actual[name]
            bits, where = _all_bits(dtype, shape), f"{name} is {'missing' if name in expected else 'unexpected'}"
        else:
            bits, where = _compare(name, expected[name], actual[name])
            elements += prod(expected[name][1])
        total += bits
        if where and first is None:
            first = where
    return Comparison(total, elements, first)


def _stored(tensor: Tensor) -> Stored:
    return dtype_name(tensor.dtype), tuple(tensor.shape), copied_words(tensor)


def _poison_word(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([POISON]) * dtype.itemsize, "little", signed=dtype.itemsize > 1)


def _all_bits(dtype: str, shape: tuple[int, ...]) -> int:
    return 8 * width(dtype) * prod(shape)


def _compare(name: str, expected: Stored, actual: Stored) -> tuple[int, str]:
    if expected[:2] != actual[:2]:
        bits = max(_all_bits(*expected[:2]), _all_bits(*actual[:2]))
        return bits, f"{name} is {actual[0]} {actual[1]}, expected {expected[0]} {expected[1]}"
    wrong = np.flatnonzero(expected[2] != actual[2])
    if not len(wrong):
        return 0, ""
    difference = np.ascontiguousarray(expected[2][wrong] ^ actual[2][wrong])
    at = int(wrong[0])
    text = f"{name}[{at}] is {int(actual[2][at]):#x}, expected {int(expected[2][at]):#x}"
    return int(np.unpackbits(difference.view(np.uint8)).sum()), text


def run_job(
    job: Mapping[str, Any], *, expected: Callable[[Path, int, int], dict[str, Stored]] | None = None
) -> dict[str, Any]:
    """Check every dump that `job` lists and return the report. `expected` loads another engine than the reference.

    The job is `{"checkpoint": DIR, "vocab_padding": 1000, "receivers": [{"name", "rank", "tp", "storage": FILE}],
    "trackers": [{"name", "storage": FILE, "entries": [{"key", "tensor", "box": [[start, stop], ...]}]}]}`, where
    `storage` is a file of `dump_storage` or `dump_tensors` and `key` a name in it. The lists may be missing or empty.
    The report is `{"ok", "mismatched_bits", "checks": [{"name", "mismatched_bits", "elements", "first"}]}`.
    """
    checkpoint = Path(job["checkpoint"])

    def reference(directory: Path, rank: int, tp: int) -> dict[str, Stored]:
        padding = int(job.get("vocab_padding", 1000))
        return expected_storage(read_config(directory), rank, tp, directory, vocab_padding=padding)

    checks = []
    for receiver in job.get("receivers", ()):
        rank, tp = int(receiver["rank"]), int(receiver["tp"])
        wanted = reference(checkpoint, rank, tp) if expected is None else expected(checkpoint, rank, tp)
        checks.append(_row(receiver["name"], compare_storage(wanted, read_storage(receiver["storage"]))))
    committed = {meta.name: tensor for meta, tensor in read_checkpoint(checkpoint)} if job.get("trackers") else {}
    for tracker in job.get("trackers", ()):
        held = {e["key"]: expected_tracker(committed, e["tensor"], e["box"]) for e in tracker["entries"]}
        checks.append(_row(tracker["name"], compare_storage(held, read_storage(tracker["storage"]))))
    bits = sum(check["mismatched_bits"] for check in checks)
    ok = bool(checks) and all(check["first"] is None for check in checks)
    return {"ok": ok, "mismatched_bits": bits, "checks": checks}


def _row(name: str, found: Comparison) -> dict[str, Any]:
    return {
        "name": name,
        "mismatched_bits": found.mismatched_bits,
        "elements": found.compared_elements,
        "first": found.first,
    }


def check_jobs(arguments: Sequence[str], run: Callable[[Mapping[str, Any]], dict[str, Any]] = run_job) -> int:
    """Run the job file named by the only argument, or those named on standard input for `-`; each report is one line.

    The exit code is 0 iff nothing differs, of the last job.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m nemo_dcr.testing.dense_check JOB.json | -\n")
        return 2
    ok = False
    for line in sys.stdin if arguments[0] == "-" else arguments:
        report = run(json.loads(Path(line.rstrip("\n")).read_text(encoding="utf-8")))
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
        ok = report["ok"]
    return 0 if ok else 1


if __name__ == "__main__":
    raise SystemExit(check_jobs(sys.argv[1:]))
