"""How whole tensors are grouped: chunks are compared together, buckets become one payload each.

Both rules are greedy and keep the declared order. A group closes once its size reaches the target, so it may exceed
the target by less than its last member; a member is never split. A chunk's size is the input bytes of its tensors,
before unchanged elements are dropped. A bucket counts the full input size of each chunk that emits records, and a chunk
without records counts nothing. An empty bucket is never emitted.
Not handled: which tensors there are and in what order (source/); the bytes of a payload (codec/payload.py).

Paper: Appendix C (chunk and bucket targets), Figure C.3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from nemo_dcr.codec.records import Item

T = TypeVar("T")


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """What one round of comparison emitted."""

    items: tuple[Item, ...]
    """In declared order; empty when nothing changed."""
    input_bytes: int
    """Bytes of all tensors that were compared, changed or not."""


@dataclass(frozen=True, eq=False, slots=True)
class Bucket:
    """The records of one payload."""

    items: tuple[Item, ...]
    """In declared order; never empty."""
    input_bytes: int
    """Input bytes of the chunks that emitted these records."""


def group_chunks(sized: Iterable[tuple[T, int]], target: int) -> Iterator[tuple[tuple[T, ...], int]]:
    """Group (member, input bytes) pairs; yields (members, input bytes) of each chunk, lazily.

    Members are whole tensors, or whatever the caller compares as one. Every member is in exactly one chunk, also one of
    zero bytes.
    """
    members: list[T] = []
    size = 0
    for member, nbytes in sized:
        members.append(member)
        size += nbytes
        if size >= target:
            yield tuple(members), size
            members, size = [], 0
    if members:
        yield tuple(members), size


def pack_buckets(chunks: Iterable[Chunk], target: int) -> Iterator[Bucket]:
    """Pack chunks into buckets, lazily: a bucket is yielded as soon as it is full, before the next chunk is read."""
    items: list[Item] = []
    size = 0
    for chunk in chunks:
        if not chunk.items:
            continue
        items.extend(chunk.items)
        size += chunk.input_bytes
        if size >= target:
            yield Bucket(tuple(items), size)
            items, size = [], 0
    if items:
        yield Bucket(tuple(items), size)
