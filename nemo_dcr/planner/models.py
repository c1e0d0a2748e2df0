"""How large a checkpoint is: by a name of the paper, from a checkpoint's own index or files, or from a configuration.

What counts the elements of a configuration (`config.json`) is handed over; they are taken for BF16.

Paper: Table C.1
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.planner.coding import WIDTH

GB = 10**9
Count = Callable[[Path], int]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A checkpoint that a refit keeps in step."""

    name: str
    nbytes: float
    """Of the canonical checkpoint, H."""


NAMED = {
    "30B": ModelSize("Nemotron-3-Nano-30B-A3B", 63.2 * GB),
    "120B": ModelSize("the 120B Nemotron checkpoint of the paper", 247.2 * GB),
    "550B": ModelSize("Nemotron-3-Ultra-550B-A55B", 1121 * GB),
    "1T": ModelSize("Nemotron-3-Ultra-550B-A55B with twice the layers", 2242 * GB),
}
"""Sizes that the paper's text gives."""


def read_model(text: str, count: Count) -> ModelSize:
    """The size of a model.

    Args:
        text: a name of `NAMED`; a number of bytes such as `500GB`; a checkpoint directory; a
            `model.safetensors.index.json`; or a `config.json`.
        count: the elements of a model from its configuration file.

    Raises: InvalidConfig when it is none of these; whatever `count` raises.
    """
    if text in NAMED:
        return NAMED[text]
    if text.upper().endswith("GB"):
        try:
            nbytes = float(text[:-2]) * GB
        except ValueError:
            nbytes = 0.0
        if nbytes > 0:
            return ModelSize(text, nbytes)
    path = Path(text)
    if text and path.is_dir():
        return _of_directory(path, count)
    if path.is_file() and path.suffix == ".json":
        return _of_json(path, count)
    known = ", ".join(NAMED)
    raise InvalidConfig(
        "--model", f"must be {known}, a size such as 500GB, a checkpoint or a config.json, got {text!r}"
    )


def _of_directory(path: Path, count: Count) -> ModelSize:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _of_json(index, count)
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    if not sizes:
        raise InvalidConfig("--model", f"{path} holds no safetensors files")
    return ModelSize(path.name, sum(sizes))


def _of_json(path: Path, count: Count) -> ModelSize:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig("--model", f"{path} is no JSON: {error}") from error
    total = content.get("metadata", {}).get("total_size") if isinstance(content, dict) else None
    if isinstance(total, int | float) and total > 0:
        return ModelSize(path.parent.name or path.name, float(total))
    if not isinstance(content, dict) or "model_type" not in content:
        raise InvalidConfig("--model", f"{path} is neither an index of a checkpoint nor a configuration of a model")
    return ModelSize(path.parent.name or path.name, float(WIDTH * count(path)))
