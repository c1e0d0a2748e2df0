"""Checkpoint directories for tests, written byte by byte here: the package's own writer is not its own oracle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
Tensor = tuple[str, tuple[int, ...], bytes]
"""dtype, shape, bytes."""


def tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """A tensor of random stored bits: NaN payloads, -0.0, subnormals and infinities occur."""
    size = int(np.prod(shape, dtype=np.int64)) * BITS[dtype] // 8
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return dtype, shape, (data & 1 if dtype == "BOOL" else data).tobytes()


def flipped(given: Tensor, *positions: int) -> Tensor:
    """The same tensor with the lowest bit flipped in the bytes at `positions`."""
    data = bytearray(given[2])
    for position in positions:
        data[position] ^= 1
    return (*given[:2], bytes(data))


def safetensors_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file with the tensors in the given order."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"".join(data for _, _, data in tensors.values())


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    *,
    shards: int = 1,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """A Hugging Face directory: one file, or several with an index; `files` lie beside them."""
    directory.mkdir(parents=True)
    names = list(tensors)
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors, metadata))
    else:
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = {name: tensors[name] for name in names[number::shards]}
            (directory / file).write_bytes(safetensors_bytes(part, metadata))
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for path, data in (files or {}).items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path, hidden ones included."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if not path.is_dir()
    }
