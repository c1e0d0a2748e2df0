"""Whether two checkpoints hold the same tensors, bit for bit.

Equal means: the same names, and for each the same dtype, shape and stored bits. How tensors are spread over files, the
metadata of those files and the files beside them are compared on request only.

Paper: Section 8 (bit-exactness), Section 5 (stored bit pattern)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nemo_dcr.checkpoint.compare import count_changes
from nemo_dcr.checkpoint.digests import file_digest
from nemo_dcr.checkpoint.directory import Checkpoint, open_checkpoint
from nemo_dcr.checkpoint.progress import SILENT, Progress


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first tensor, in name order, that differs."""

    tensor: str
    index: int | None
    """Flat row-major index of its first differing element (byte, for a packed dtype); None when there is none."""
    left: str | None
    """Its stored word in hexadecimal, or dtype and shape; None where the tensor is missing."""
    right: str | None


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify` found."""

    equal: bool
    tensors: int
    """Names in either checkpoint."""
    differing_tensors: int
    """Same name, dtype and shape, other bits."""
    unlike_tensors: int
    """Same name, other dtype or shape."""
    missing_tensors: int
    """In only one of the two."""
    differing_elements: int
    total_elements: int
    """Compared element by element."""
    first: FirstDifference | None
    differing_files: tuple[str, ...] | None
    """Files with other bytes or in only one of the two, layout and metadata included; None when not asked for."""


def verify(left: Path, right: Path, *, files: bool = False, progress: Progress = SILENT) -> VerifyReport:
    """Compare every stored bit of two checkpoints; with `files` also layout, metadata and other files.

    Raises: InvalidConfig for unusable directories; CheckpointInvalid for damaged ones.
    """
    one, two = open_checkpoint(left), open_checkpoint(right)
    names = sorted(one.tensors.keys() | two.tensors.keys())
    differing = unlike = missing = elements = total = 0
    first = None
    progress.stage("compare", one.nbytes)
    for name in names:
        a, b = one.tensors.get(name), two.tensors.get(name)
        difference = None
        if a is None or b is None:
            missing += 1
            difference = FirstDifference(name, None, _shape(one, name), _shape(two, name))
        elif a.meta != b.meta:
            unlike += 1
            difference = FirstDifference(name, None, _shape(one, name), _shape(two, name))
        else:
            x, y = one.words(name), two.words(name)
            count, index = count_changes(x, y)
            total += len(x)
            if index is not None:
                differing += 1
                elements += count
                digits = 2 * x.itemsize
                difference = FirstDifference(name, index, f"{x[index]:#0{digits + 2}x}", f"{y[index]:#0{digits + 2}x}")
        first = first or difference
        if a is not None:
            progress.advance(a.nbytes)
    other = _differing_files(one, two) if files else None
    return VerifyReport(
        equal=first is None and not other,
        tensors=len(names),
        differing_tensors=differing,
        unlike_tensors=unlike,
        missing_tensors=missing,
        differing_elements=elements,
        total_elements=total,
        first=first,
        differing_files=other,
    )


def _shape(checkpoint: Checkpoint, name: str) -> str | None:
    tensor = checkpoint.tensors.get(name)
    return None if tensor is None else f"{tensor.meta.dtype} {list(tensor.meta.shape)}"


def _differing_files(one: Checkpoint, two: Checkpoint) -> tuple[str, ...]:
    """Safetensors files are compared by header: their tensors are compared on their own."""
    found = {
        file
        for file in one.shards.keys() | two.shards.keys()
        if file not in one.shards or file not in two.shards or one.shards[file].raw != two.shards[file].raw
    }
    for path in {*one.files, *two.files} - found:
        both = path in one.files and path in two.files
        if not both or file_digest(one.directory / path) != file_digest(two.directory / path):
            found.add(path)
    return tuple(sorted(found))
