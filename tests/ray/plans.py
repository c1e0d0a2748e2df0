"""What the actors of the Ray test make and do; imported by them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from nemo_dcr.adapters.owner import Owner
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.testing.local_oracle import StoredBits, stored_bits
from nemo_dcr.testing.toy_loader import Slice, ToyModel
from tests.e2e.module_refits import bits, full_tensors, step

TABLE = (TensorMeta("weight", (7, 5), "BF16"), TensorMeta("bias", (7,), "F32"))


def policy() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Linear(5, 7)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def engine(rank: int, ranks: int) -> ToyModel:
    return ToyModel(TABLE, {tensor.name: Slice(0) for tensor in TABLE}, rank, ranks)


def train(model: nn.Module, owner: Owner) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    step(optimizer)


def served(model: nn.Module, owner: Owner) -> dict[str, bytes]:
    return {name: bits(value) for name, value in full_tensors(model, TABLE).items()}


def held(model: ToyModel) -> StoredBits:
    return stored_bits(model)


def dense(full: dict[str, bytes], rank: int, ranks: int) -> StoredBits:
    """A fresh engine rank after a dense load."""
    import numpy as np

    fresh = engine(rank, ranks)
    kinds: dict[str, Any] = {"BF16": "<u2", "F32": "<u4"}
    fresh.load_weights(
        (each.name, tensor_from_words(np.frombuffer(full[each.name], kinds[each.dtype]), each.dtype, each.shape))
        for each in TABLE
    )
    return stored_bits(fresh)
