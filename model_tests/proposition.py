"""Proposition 1 in integers and dictionaries: a delta through a native loader ends in the bits of a dense load.

A weight is a word, a number. A loader path says for each cell of resident storage which canonical elements it stores,
one after the other, and what it makes of their words. An item scatters the records of one tensor into a scratch tensor
with a placeholder everywhere else, the loader runs, and only active positions are stored. Nothing here knows a dtype.
Not handled: which loaders have such a path (conditions LC1 to LC12), payloads, attempts.

Paper: Sections 3 and 6.1; Proposition 1   Proofs: xor_reconstructs, inactive_unchanged, overwrite_supplies,
loader_commutes, retry_repairs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Destination = tuple[str, int]
"""d = (n, k): element k of canonical tensor n."""
Cell = tuple[str, int]
"""An element of resident storage: parameter and offset."""
Weights = dict[Destination, int]
"""W^v: the word of every canonical element."""
Storage = dict[Cell, int]
"""P_r: the word of every cell of a receiver."""
Landed = Callable[[str, Cell], bool]
"""Whether the write of an item, by the name of its tensor, into a cell takes effect."""


class Writer(NamedTuple):
    """One copy of a loader into one cell."""

    source: Destination
    stored: Callable[[int], int]
    """What the loader makes of a canonical word before it is in the cell; the identity where bits are kept."""


@dataclass(frozen=True)
class Path:
    """The native loader L_r of one receiver. Cells that are in neither table are left alone."""

    writers: Mapping[Cell, tuple[Writer, ...]]
    """In the order of the load; the last one wins."""
    constants: Mapping[Cell, int]
    """Padding: written by every load, with the same word."""


class Record(NamedTuple):
    """One entry of a delta."""

    encoding: str
    """"xor": the word is a mask. "overwrite": it is the new value."""
    word: int


Delta = dict[str, dict[int, Record]]
"""Items: for each tensor that has any, its records by element."""


def dense_load(path: Path, weights: Weights, storage: Storage) -> Storage:
    """L_r(W), over storage that holds anything."""
    placed = {cell: writers[-1].stored(weights[writers[-1].source]) for cell, writers in path.writers.items()}
    return {**storage, **path.constants, **placed}


def changed_set(old: Weights, new: Weights) -> set[Destination]:
    """Every destination whose word differs. Words are compared, not the numbers they stand for."""
    return {destination for destination, word in new.items() if word != old[destination]}


def delta(old: Weights, new: Weights, xor: Iterable[str] = ()) -> Delta:
    """The complete changed set as records; the tensors in `xor` travel as masks."""
    masks = set(xor)
    items: Delta = {}
    for name, element in sorted(changed_set(old, new)):
        value, before = new[name, element], old[name, element]
        record = Record("xor", value ^ before) if name in masks else Record("overwrite", value)
        items.setdefault(name, {})[element] = record
    return items


def everything(weights: Weights) -> Delta:
    """A dense refit as records: every element is overwritten."""
    items: Delta = {}
    for (name, element), word in weights.items():
        items.setdefault(name, {})[element] = Record("overwrite", word)
    return items


def may_xor(path: Path, name: str) -> bool:
    """Whether masks for a tensor arrive unchanged (LC5), and nothing else is written where they arrive (LC6)."""
    reached = [writers for writers in path.writers.values() if any(one.source[0] == name for one in writers)]
    return all(len(writers) == 1 and writers[0].stored is keep for writers in reached)


def keep(word: int) -> int:
    """The path keeps the stored bits."""
    return word


def apply(path: Path, items: Delta, storage: Storage, landed: Landed = lambda name, cell: True) -> Storage:
    """Every item, one after the other; of an attempt that failed, only the writes that `landed`."""
    for name, records in items.items():
        storage = apply_item(path, name, records, storage, landed)
    return storage


def apply_item(path: Path, name: str, records: Mapping[int, Record], storage: Storage, landed: Landed) -> Storage:
    """Scatter the records, run the loader for this tensor, and store at active positions only."""
    masks = all(record.encoding == "xor" for record in records.values())
    placeholder = 0 if masks else free_word(record.word for record in records.values())
    after = dict(storage)
    for cell, writers in path.writers.items():
        for writer in writers:
            if writer.source[0] == name and landed(name, cell):
                word = records[writer.source[1]].word if writer.source[1] in records else placeholder
                if masks:
                    after[cell] ^= writer.stored(word)
                elif word != placeholder:
                    after[cell] = writer.stored(word)
    return after


def free_word(values: Iterable[int]) -> int:
    """A placeholder that no value of the item equals."""
    taken = set(values)
    return next(word for word in range(len(taken) + 1) if word not in taken)
