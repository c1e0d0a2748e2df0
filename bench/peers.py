"""Encoders of public projects, unmodified, for the same tensors.

verl's change detection is taken from its wheel, which `make bench` installs without dependencies into a directory of
its own; the file is loaded alone, because the package around it imports GPU frameworks. What verl's engine does after
it is done here as it does it: positions become 32-bit integers, and positions and values of all tensors are joined.
Not handled: its collectives and its check sum.

Paper: Section 8
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.weights import DTYPE, Pair
from nemo_dcr.bits.tensors import tensor_from_words

PEERS = Path(sys.prefix) / "peers"
"""Where set-up puts the wheels of other projects."""


def verl_encoder(pairs: list[Pair]) -> Callable[[], int]:
    """A call that encodes the changes of all pairs and returns how many there are.

    Raises: FileNotFoundError before set-up of the peers.
    """
    detect = _module(PEERS / "verl/checkpoint_engine/delta_sync/sparse_gather.py").shard_delta_indices
    tensors = [(_tensor(pair.new), _tensor(pair.old)) for pair in pairs]

    def call() -> int:
        found = [detect(new, old, 0) for new, old in tensors]
        positions = torch.cat([at.to(torch.int32).view(torch.uint8) for at, _ in found])
        values = torch.cat([each for _, each in found])
        return values.numel() if positions.numel() == 4 * values.numel() else -1

    return call


def _tensor(words: Any) -> torch.Tensor:
    return tensor_from_words(words, DTYPE, (len(words),))


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing; run make setup-peers")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
