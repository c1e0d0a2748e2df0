"""Made-up changes of a trainer's weights at a given rate, as a stress case.

Each element is drawn by its name and its place in the full tensor, not by where it is stored: replicas get the same
changes, and so does every layout of the same weights, be it shards of any number of ranks or one whole copy. The draw
is uniform, so each owner's shards change at the rate, up to the spread of a random sample. A drawn element moves by a
relative amplitude between 0.75 and 1.25 times the given one, up or down; one whose stored bits would stay the same (a
zero, a rounding) moves to the next stored value instead. So exactly the drawn elements change.
Not handled: elements that are infinite or NaN, which stay; tensors that are not floating point.

Paper: Section 8.1 (element change rates)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, dtype_name, tensor_from_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.source.dtensor import dtensor_map
from nemo_dcr.source.maps import BoxMap

_BLOCK = 1 << 20
"""Elements that are drawn at a time."""
Draws = NDArray[np.uint64]


def inject(
    tensors: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    rate: float,
    *,
    amplitude: float = 1e-2,
    seed: int,
    stored: str | None = None,
) -> int:
    """Change a fraction `rate` of the elements of the local shards, in place; returns how many changed here.

    Args:
        tensors: parameters by name; the shards of DTensors, and whole plain tensors. A tied parameter comes once.
        stored: dtype in which a change has to show, such as `BF16` for FP32 masters of a BF16 policy; by default each
            tensor's own.

    Raises: InvalidConfig for a rate outside [0, 1] or a tensor that is not floating point; UnsupportedMapping (SC5) for
    a placement that is not a box.
    """
    pairs = tensors.named_parameters() if isinstance(tensors, nn.Module) else tensors
    pairs = pairs.items() if isinstance(pairs, Mapping) else pairs
    changed = 0
    for name, tensor in pairs:
        box = dtensor_map(TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype)), tensor)
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        changed += inject_shard(box, local, rate, amplitude=amplitude, seed=seed, stored=stored)
    return changed


def inject_shard(
    box: BoxMap, local: Tensor, rate: float, *, amplitude: float = 1e-2, seed: int, stored: str | None = None
) -> int:
    """Change one shard, the elements that `box` cuts out of its tensor; otherwise as `inject`.

    Raises: InvalidConfig, as `inject`.
    """
    if not 0 <= rate <= 1:
        raise InvalidConfig("inject.rate", f"must be between 0 and 1, got {rate}")
    if not local.is_floating_point():
        raise InvalidConfig("inject.tensors", f"{box.tensor.name} is {local.dtype}; only floating point can be scaled")
    local = local.detach()
    flat = local.contiguous().view(-1)
    key = hashlib.blake2b(f"{seed} {box.tensor.name}".encode(), digest_size=8).digest()
    below = np.uint64(math.ceil(rate * 2.0**53))  # as `_unit(draws) < rate`, without a float for every element
    changed = 0
    for begin in range(0, flat.numel(), _BLOCK):
        numbers = np.arange(begin, min(begin + _BLOCK, flat.numel()), dtype=np.int64)
        draws = _mixed(box.destinations(numbers).astype(np.uint64) + np.frombuffer(key, dtype="<u8"))
        drawn = numbers[draws >> np.uint64(11) < below]
        values = flat[drawn]
        finite = torch.isfinite(values)
        drawn, values = drawn[finite.cpu().numpy()], values[finite]
        moved = _mixed(draws[drawn - begin])
        flat[drawn] = _moved(values, moved, amplitude, stored or dtype_name(local.dtype))
        changed += len(drawn)
    if not local.is_contiguous():
        local.copy_(flat.view(local.shape))
    return changed


def _moved(values: Tensor, draws: Draws, amplitude: float, stored: str) -> Tensor:
    """Finite values after their change; none keeps its bits in the stored dtype."""
    steps = amplitude * (0.75 + 0.5 * _unit(draws)) * np.where(draws & np.uint64(1), 1.0, -1.0)
    moved = (values.double() * (1.0 + torch.from_numpy(steps).to(values.device))).to(values.dtype)
    before, after = (copied_words(each.to(torch_dtype(stored))) for each in (values, moved))
    stay = torch.from_numpy((before == after) | ~torch.isfinite(moved).cpu().numpy())
    beside = tensor_from_words(_beside(before, stored), stored, tuple(values.shape)).to(values.dtype)
    return torch.where(stay.to(values.device), beside.to(values.device), moved)


def _beside(words: Words, dtype: str) -> Words:
    """The next stored values, one step away from zero, or towards it where that step would leave the finite values."""
    away = words + words.dtype.type(1)
    finite = torch.isfinite(tensor_from_words(away, dtype, words.shape).float()).numpy()
    return np.where(finite, away, words - words.dtype.type(1))


def _mixed(numbers: Draws) -> Draws:
    """64 well mixed bits in place of each number (the finalizer of SplitMix64)."""
    numbers += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= np.uint64(factor)
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _unit(draws: Draws) -> NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 bits."""
    return (draws >> np.uint64(11)).astype(np.float64) * 2.0**-53
