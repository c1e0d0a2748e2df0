"""Small loaders over any dtype, for the failure tests of groups A and B."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.bits.tensors import torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.testing.refit_outcome import Outcome, refit_outcome
from nemo_dcr.testing.strategies import SPECIAL_WORDS
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[Mapping[str, Tensor], Weights], Iterable[str] | None]
Act = Callable[[Tensor, Tensor], object]
FLOAT_KINDS = ("BF16", "F16", "F32", "F64")
KINDS = ("BF16", "F32", "F8_E4M3", "I64", "BOOL")
"""Every width, floats and integers, a one-byte float, booleans."""


def versions(metas: Sequence[TensorMeta], seed: int = 0) -> tuple[dict[str, Words], dict[str, Words]]:
    """Old and new words: special words, ordinary ones, every second element changed."""
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for meta in metas:
        kind = unsigned(meta.dtype)
        special = np.array(SPECIAL_WORDS.get(meta.dtype, (0, 1)), dtype=kind)
        words = np.frombuffer(rng.bytes(meta.numel * kind.itemsize), dtype=kind)
        words = np.where(rng.random(meta.numel) < 0.5, rng.choice(special, meta.numel), words).astype(kind)
        words = words & kind.type(1) if meta.dtype == "BOOL" else words
        old[meta.name] = words
        new[meta.name] = np.where(np.arange(meta.numel) % 2 == 1, words ^ kind.type(1), words).astype(kind)
    return old, new


def zeros(meta: TensorMeta, shape: tuple[int, ...] | None = None, dtype: str = "") -> Tensor:
    """A resident tensor like `meta`, or of another shape or dtype."""
    return torch.zeros(meta.shape if shape is None else shape, dtype=torch_dtype(dtype or meta.dtype))


def each_by(act: Act) -> Load:
    """A loader that gives every tensor to `act(resident, tensor)` and reports its name."""
    return lambda residents, weights: [
        name for name, tensor in weights if act(residents[name], tensor) is not residents
    ]


def outcome_of(
    act: Act, dtype: str, *, shape: tuple[int, ...] = (4, 2), padded: int = 0, resident: str = "", seed: int = 0
) -> Outcome:
    """What becomes of one tensor `w`, loaded by `act`; `padded` rows follow it, `resident` is another stored dtype."""
    meta = TensorMeta("w", shape, dtype)
    stored = (shape[0] + padded, *shape[1:]) if shape else ()
    return outcome_of_load(lambda: each_by(act), [meta], lambda: {"w": zeros(meta, stored, resident)}, seed=seed)


def outcome_of_load(
    fresh: Callable[[], Load],
    metas: Sequence[TensorMeta],
    residents: Callable[[], Mapping[str, Tensor]] | None = None,
    *,
    old: Mapping[str, Words] | None = None,
    new: Mapping[str, Words] | None = None,
    seed: int = 0,
) -> Outcome:
    """What becomes of one rank with a loader of its own state, over resident tensors like the canonical ones."""
    stored = residents or (lambda: {meta.name: zeros(meta) for meta in metas})
    drawn_old, drawn_new = versions(metas, seed)
    return refit_outcome(
        [lambda: ScriptedModel(stored(), fresh())], metas, old or drawn_old, new or drawn_new, seed=seed
    )
