"""Digest classes in traces: whose words a rank holds for each item, told by an oracle and checked against the model.

No process can tell: it would need the digests of every candidate and the time to read its storage. Who records a
cluster in memory can. There the state after a line of a receiver has the field `stored` (docs/trace.md): for each item
the candidates whose dense load leaves the same bits at that rank. The committed one makes the item *old*, the attempt's
one makes it *new*, none makes it *mixed*. In the model an item is a word, and the same is asked of it.
A rank may hold a candidate's bits by chance where the model has another word: casts merge words, and some ranks hold no
element of an item. Storage that nobody knows may be anything.
Not handled: reading storage (storage_oracle); tensors that are no items of the model.

Paper: Proposition 1   Spec: store, content
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import TYPE_CHECKING

from model_tests.follower_names import Mismatch, Names
from model_tests.model_state import RAW, State, Word

if TYPE_CHECKING:
    from model_tests.follower import Follower

FIRST = "first"
"""How the weights that training began with are called in a line."""


def told(held: Mapping[tuple[int, str], Collection[str]]) -> str:
    """The field of a line: the candidates that each (owner, tensor) is equal to."""
    return ",".join(
        f"{owner}:{tensor}={'+'.join(sorted(candidate or FIRST for candidate in candidates))}"
        for (owner, tensor), candidates in sorted(held.items())
    )


def read(text: str) -> dict[tuple[str, str], frozenset[str]]:
    """What a field tells: candidates by (owner node, tensor)."""
    found = {}
    for each in filter(None, text.split(",")):
        item, _, candidates = each.rpartition("=")
        owner, _, tensor = item.partition(":")
        names = filter(None, candidates.split("+"))
        found[f"owner {owner}", tensor] = frozenset("" if name == FIRST else name for name in names)
    return found


def why_not_stored(item: str, held: Collection[int], stored: Collection[int], *, raw: bool) -> str:
    """Why storage that is equal to the candidates `stored` is not what a model says of this item; empty when it may be.

    Args:
        held: the candidates whose word the item has in the model.
        raw: nobody knows the word.
    """
    if not set(held) <= set(stored):
        return f"{item} is the word of {sorted(stored)}, in the model of {sorted(held)}"
    if not held and stored and not raw:
        return f"{item} is the word of {sorted(stored)}, in the model of no candidate"
    return ""


def candidates_with(state: State, item: str, word: Word) -> set[int]:
    """The candidates that give an item this word in the model."""
    return {c for c in range(state.step + 1) if state.content[c][item] == word}


def items_of(names: Names, items: Container[str], text: str) -> dict[str, frozenset[int]]:
    """What a field tells of the items of a model: numbers of candidates, as far as they were frozen."""
    found = {names.item(*key): told for key, told in read(text).items() if not names.is_left_out(*key)}
    numbers = names.candidates
    return {
        item: frozenset(numbers[candidate] for candidate in told if candidate in numbers)
        for item, told in found.items()
        if item in items
    }


def compare_stored(f: Follower, r: str, text: str) -> None:
    """The rank holds what the model says.

    Raises: Mismatch.
    """
    for item, stored in items_of(f.names, f.config.items, text).items():
        word = f.state.store[r][item]
        why = why_not_stored(item, candidates_with(f.state, item, word), stored, raw=word >= RAW)
        if why:
            raise Mismatch(why)
