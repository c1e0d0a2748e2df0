"""Hypothesis strategies: bit patterns, tensor tables with toy loaders, and change sets.

Words are drawn so that NaN payloads, both zeros, infinities and subnormals are common, whatever the dtype. A change set
gives new words to a subset of the elements; the subset may be empty, scattered, a run, or everything, and every drawn
new word differs from the old one.

Paper: Section 5 (stored bit patterns)
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemo_dcr.bits import Words, unsigned, width
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.testing import toy_loader as toy

SPECIAL_WORDS: dict[str, tuple[int, ...]] = {
    "BF16": (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x7F81, 0x0001, 0x8001, 0x3F80, 0x4000, 0xFFFF),
    "F16": (0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE01, 0x0001, 0x8001, 0x3C00, 0xFFFF),
    "F32": (0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC00001, 0x7F800001, 0xFFC00001, 1, 0x3F800000),
    "F64": (0, 1 << 63, 0x7FF0000000000000, 0x7FF8000000000001, 0x7FF0000000000001, 1, 0x3FF0000000000000),
    "F8_E4M3": (0x00, 0x80, 0x7F, 0xFF, 0x01, 0x38),
    "F8_E5M2": (0x00, 0x80, 0x7C, 0x7D, 0xFF, 0x01),
    "F8_E8M0": (0x00, 0xFF, 0x7F),
}
"""Zeros, infinities, NaNs with payloads, signalling NaNs, subnormals and ones."""

FLOATS = ("BF16", "F16", "F32", "F64")
ANY_DTYPE = (
    *FLOATS,
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "I32",
    "U32",
    "I64",
    "U64",
    "C64",
)


def words(dtype: str, count: int) -> st.SearchStrategy[Words]:
    """`count` stored words of `dtype`, special ones often; booleans hold 0 or 1."""
    special = SPECIAL_WORDS.get(dtype, (0, 1, (1 << (8 * width(dtype))) - 1))
    any_word = st.integers(0, (1 << (8 * width(dtype))) - 1)
    one = st.integers(0, 1) if dtype == "BOOL" else st.sampled_from(special) | any_word
    return st.lists(one, min_size=count, max_size=count).map(lambda drawn: np.array(drawn, dtype=unsigned(dtype)))


def shapes(*, min_dims: int = 0, max_dims: int = 3, max_side: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Small shapes, 0-d and empty ones included."""
    side = st.integers(1, max_side) | st.just(0) if min_dims == 0 else st.integers(1, max_side)
    return st.lists(side, min_size=min_dims, max_size=max_dims).map(tuple)


def rules_for(meta: TensorMeta) -> st.SearchStrategy[toy.Rule]:
    """Any rule that can place a tensor of this dtype and shape."""
    choices: list[st.SearchStrategy[toy.Rule]] = [
        st.builds(toy.Slice, axis=st.integers(0, 2), by_item=st.booleans()),
        st.just(toy.Replicate()),
        st.just(toy.Split()),
        st.builds(toy.Transpose, contiguous=st.booleans()),
        st.builds(toy.OnRank, owner=st.integers(0, 2)),
        st.just(toy.Interleave()),
        st.just(toy.Duplicate()),
        st.just(toy.Stacked()),
        st.builds(toy.PadRows, multiple=st.integers(1, 4)),
    ]
    if meta.dtype in FLOATS:
        target = st.sampled_from((torch.float32, torch.bfloat16, torch.float64, torch.float16))
        choices += [
            st.builds(toy.Cast, dtype=target, before=st.booleans()),
            st.builds(toy.Composed, dtype=st.sampled_from((None, torch.float32))),
            st.just(toy.Negate()),
            st.builds(toy.PadRows, multiple=st.integers(1, 4), by_copy=st.just(True)),
        ]
    return st.one_of(choices)


@dataclass(frozen=True)
class ToyCase:
    """A tensor table, a rule for each tensor, a rank count, and the words before and after."""

    tensors: tuple[TensorMeta, ...]
    rules: dict[str, toy.Rule]
    world: int
    old: dict[str, Words]
    new: dict[str, Words]

    def model(self, rank: int) -> toy.ToyModel:
        """A rank that holds zeros."""
        return toy.ToyModel(self.tensors, self.rules, rank, self.world)

    def changed(self, name: str) -> NDArray[np.int64]:
        """Sorted flat indices whose words differ."""
        return np.nonzero(self.old[name] != self.new[name])[0].astype(np.int64)

    def items(self, encodings: dict[str, Encoding]) -> list[Item]:
        """One item for each changed tensor, in table order."""
        made = []
        for meta in self.tensors:
            at = self.changed(meta.name)
            if len(at) == 0:
                continue
            encoding = encodings[meta.name]
            new, old = self.new[meta.name][at], self.old[meta.name][at]
            made.append(Item.of(meta, encoding, at, new ^ old if encoding is Encoding.XOR else new))
        return made


ToyTable = tuple[tuple[TensorMeta, ...], dict[str, toy.Rule]]


@st.composite
def toy_tables(draw: st.DrawFn, max_tensors: int = 3) -> ToyTable:
    """A random table under random rules; sometimes a fused group of two or three tensors of one row shape."""
    tensors: list[TensorMeta] = []
    rules: dict[str, toy.Rule] = {}
    for number in range(draw(st.integers(1, max_tensors))):
        meta = TensorMeta(f"t{number}.w", draw(shapes()), draw(st.sampled_from(ANY_DTYPE)))
        tensors.append(meta)
        rules[meta.name] = draw(rules_for(meta))
    if draw(st.booleans()):
        dtype, columns = draw(st.sampled_from(ANY_DTYPE)), draw(st.integers(1, 5))
        rows = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
        first = 0
        for number, count in enumerate(rows):
            meta = TensorMeta(f"f{number}.w", (count, columns), dtype)
            tensors.append(meta)
            rules[meta.name] = toy.Fuse("fused", first, sum(rows))
            first += count
    return tuple(tensors), rules


@st.composite
def toy_cases(draw: st.DrawFn, max_tensors: int = 3) -> ToyCase:
    """A random table under random rules, and the words of two versions."""
    tensors, rules = draw(toy_tables(max_tensors))
    old = {meta.name: draw(words(meta.dtype, meta.numel)) for meta in tensors}
    new = {meta.name: draw(changes(meta, old[meta.name])) for meta in tensors}
    return ToyCase(tensors, rules, draw(st.integers(1, 3)), old, new)


@st.composite
def changes(draw: st.DrawFn, meta: TensorMeta, old: Words) -> Words:
    """New words for a drawn subset of the elements."""
    count = prod(meta.shape)
    if count == 0:
        return old.copy()
    kind = draw(st.sampled_from(("none", "some", "run", "all")))
    chosen = np.zeros(count, dtype=np.bool_)
    if kind == "some":
        chosen[draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))] = True
    elif kind == "run":
        start = draw(st.integers(0, count - 1))
        chosen[start : draw(st.integers(start + 1, count))] = True
    elif kind == "all":
        chosen[:] = True
    fresh = draw(words(meta.dtype, count))
    flip = old ^ old.dtype.type(1)
    return np.where(chosen, np.where(fresh == old, flip, fresh), old).astype(old.dtype)
