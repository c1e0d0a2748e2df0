"""A check of index maps against Bridge's own export: elements that carry their destination must arrive there.

Each parameter is replaced by an array of the same shape in which every element is a label: the canonical tensor and the
flat index that the map sends the element to, or -1 for padding. Bridge's mapping objects then export the labels, over
the real process groups, with code that knows nothing of the maps. A tensor arrives as its own labels in order exactly
if the map is what the export does, on all ranks together. All ranks make this call, for the same parameters.
Not handled: conversions that compute, which have no map.

Paper: Appendix A.1   Proofs: affine_destinations   Conditions: SC5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.ownership import stable_hash
from nemo_dcr.source.piecewise import IndexMap

INDEX_BITS = 40
PADDING = -1
_NAME_BITS = 22

Labels = NDArray[np.int64]


def destination_labels(tensor: TensorMeta, flat: Labels) -> Labels:
    """The labels of elements of a tensor: its hash above their flat indices."""
    return flat + ((stable_hash(tensor.name) >> (64 - _NAME_BITS)) << INDEX_BITS)


def map_labels(index_map: IndexMap) -> Labels:
    """The label of each element of a parameter, flat, by its map."""
    which, flat = index_map.destinations(np.arange(int(np.prod(index_map.shape)), dtype=np.int64))
    labels = np.full(len(which), PADDING, dtype=np.int64)
    for number, tensor in enumerate(index_map.tensors):
        here = which == number
        labels[here] = destination_labels(tensor, flat[here])
    return labels


def check_exports(tasks: Iterable[tuple[Any, IndexMap | None]], tensors: Mapping[str, TensorMeta]) -> tuple[str, ...]:
    """Export the labels of parameters, all ranks together; the canonical names that arrived, sorted.

    Args:
        tasks: conversion tasks of Bridge, in the same order on all ranks, each with the map of the local parameter, or
            None on a rank that does not hold it. The mapping objects must not be used for anything else: they remember
            the dtype of what they exported.
        tensors: of the checkpoint.

    Raises: UnsupportedMapping (SC5) for a tensor that arrives otherwise, (SC1) for one that the checkpoint lacks.
    """
    arrived = set()
    for task, index_map in tasks:
        labels = None
        if index_map is not None:
            flat = torch.from_numpy(map_labels(index_map))
            labels = flat.reshape(index_map.shape).to(task.param_weight.device)
        for name, value in task.mapping.megatron_to_hf(labels, task.megatron_module).items():
            if name not in tensors:
                raise UnsupportedMapping(
                    name, "SC1", f"{task.mapping.megatron_param} becomes it; the checkpoint lacks it"
                )
            _check(tensors[name], value)
            arrived.add(name)
    return tuple(sorted(arrived))


def _check(tensor: TensorMeta, value: torch.Tensor) -> None:
    found = value.detach().cpu().numpy().reshape(-1)
    wanted = destination_labels(tensor, np.arange(tensor.numel, dtype=np.int64))
    # Padding stands behind the last row.
    if not np.array_equal(found[: tensor.numel], wanted) or np.any(found[tensor.numel :] != PADDING):
        wrong = int(np.count_nonzero(found[: tensor.numel] != wanted)) if len(found) >= tensor.numel else tensor.numel
        detail = f"Bridge's export puts other elements at {wrong} of its {tensor.numel} places; use no map for it"
        raise UnsupportedMapping(tensor.name, "SC5", detail)
