"""A Hugging Face directory: its safetensors files, its tensors, and the files beside them.

The checkpoint is `model.safetensors.index.json` with its shards, else `model.safetensors`, else the only index or the
only safetensors file there. Every other regular file below the directory belongs to it and is carried as it is;
folders whose name begins with a dot are not looked into, and a symbolic link to a file is read through.
A tensor is mapped when it is asked for and unmapped when its words are dropped, so a reader holds what it looks at.
Not handled: files that another process changes meanwhile; pickled checkpoints, which are files like any other here.

Paper: Section 3 (canonical tensors), Section 8 (checkpoints)
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from nemo_dcr import bits
from nemo_dcr.bits import Words
from nemo_dcr.checkpoint.header import ShardHeader, StoredTensor, read_header
from nemo_dcr.errors import CheckpointInvalid, InvalidConfig

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
WORK_DIRECTORY = ".nemo-dcr-apply"
"""Where an in-place application keeps its files, inside the checkpoint."""
JOURNAL = "journal"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory holds; headers are read, tensor data is not."""

    directory: Path
    shards: Mapping[str, ShardHeader]
    """By file name, sorted."""
    tensors: Mapping[str, StoredTensor]
    """By tensor name, in layout order: file by file, in the order of the bytes."""
    files: tuple[str, ...]
    """Every other file, as a relative path with forward slashes, sorted."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def words(self, name: str) -> Words:
        """The stored words of one tensor; read-only, flat, an alias of the file, perhaps not aligned.

        Raises: CheckpointInvalid when the file became shorter or cannot be read.
        """
        tensor = self.tensors[name]
        dtype = bits.unsigned(tensor.stored.dtype)
        if not tensor.nbytes:
            return np.empty(0, dtype=dtype)
        path = self.directory / tensor.file
        start = tensor.offset - tensor.offset % mmap.ALLOCATIONGRANULARITY
        try:
            with path.open("rb") as stream:
                view = mmap.mmap(
                    stream.fileno(), tensor.offset + tensor.nbytes - start, access=mmap.ACCESS_READ, offset=start
                )
        except (OSError, ValueError) as error:
            raise CheckpointInvalid(str(path), f"tensor {name!r} cannot be mapped ({error})") from None
        count = tensor.nbytes // dtype.itemsize
        return np.frombuffer(view, dtype=dtype, count=count, offset=tensor.offset - start)


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of a checkpoint directory.

    Raises: InvalidConfig when it is no directory with a safetensors checkpoint; CheckpointInvalid when a file is
    damaged, missing or foreign, or an in-place application was interrupted there.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidConfig("checkpoint", f"{directory} is not a directory; name a Hugging Face model directory")
    if (directory / WORK_DIRECTORY / JOURNAL).exists():
        detail = "an apply --in-place was interrupted there; run that command again to finish it"
        raise CheckpointInvalid(str(directory), detail)
    names = _shard_names(directory)
    shards = {name: read_header(directory / name) for name in sorted(set(names.values()))}
    checkpoint = Checkpoint(
        directory, shards, tensors_of(shards, where=str(directory)), _other_files(directory, shards)
    )
    for tensor, file in names.items():
        if tensor and (tensor not in checkpoint.tensors or checkpoint.tensors[tensor].file != file):
            detail = f"it does not hold {tensor!r}, which the index places there"
            raise CheckpointInvalid(str(directory / file), detail)
    return checkpoint


def tensors_of(shards: Mapping[str, ShardHeader], *, where: str) -> dict[str, StoredTensor]:
    """All tensors by name, in layout order. Raises: CheckpointInvalid when a name comes twice."""
    tensors: dict[str, StoredTensor] = {}
    for header in shards.values():
        for tensor in header.tensors:
            if tensor.meta.name in tensors:
                raise CheckpointInvalid(where, f"tensor {tensor.meta.name!r} is in two files")
            tensors[tensor.meta.name] = tensor
    return tensors


def safe_path(path: str) -> bool:
    """True iff `path` is a plain relative path that stays inside its directory and outside the work directory."""
    parts = PurePosixPath(path).parts
    plain = bool(parts) and "\0" not in path and "/".join(parts) == path and ".." not in parts
    return plain and not path.startswith("/") and parts[0] != WORK_DIRECTORY


def _shard_names(directory: Path) -> dict[str, str]:
    """Tensor name to file name of an index; of a single file, the empty name to it."""
    present = sorted(os.listdir(directory))
    indexes = [name for name in present if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in present if name.endswith(SUFFIX)]
    for found, preferred in ((indexes, f"model{INDEX_SUFFIX}"), (singles, f"model{SUFFIX}")):
        if preferred in found or len(found) == 1:
            name = preferred if preferred in found else found[0]
            return _read_index(directory / name) if found is indexes else {"": name}
        if found:
            raise InvalidConfig("checkpoint", f"{directory} holds {len(found)} checkpoints ({found[0]}, ...); keep one")
    raise InvalidConfig("checkpoint", f"{directory} holds no safetensors file; name a Hugging Face model directory")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise CheckpointInvalid(str(path), f"it cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointInvalid(str(path), "it is not a JSON object with a weight_map") from None
    foreign = [file for file in files.values() if Path(file).name != file or not safe_path(file)]
    if foreign or not files:
        detail = f"it names {foreign[0]!r}, which lies elsewhere" if foreign else "its weight_map is empty"
        raise CheckpointInvalid(str(path), detail)
    return files


def _other_files(directory: Path, shards: Mapping[str, ShardHeader]) -> tuple[str, ...]:
    found = []
    for folder, folders, names in os.walk(directory):
        for name in [name for name in folders if (Path(folder) / name).is_symlink()]:
            raise CheckpointInvalid(str(Path(folder) / name), "it is a link to a directory; copy what it points to")
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(directory).as_posix()
            if relative in shards:
                continue
            if not path.is_file() or not safe_path(relative):
                raise CheckpointInvalid(str(path), "it is not a regular file; move it out of the checkpoint")
            try:
                relative.encode("utf-8")
            except UnicodeEncodeError:
                raise CheckpointInvalid(repr(str(path)), "its name is not UTF-8; rename it") from None
            found.append(relative)
    return tuple(sorted(found))
