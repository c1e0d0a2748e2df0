"""What a state of the specification is: constants, variables, records and messages, by the names of the specification.

Everything is immutable and hashes, so that states can be members of sets. A function of the specification is a `Map`, a
record is a named tuple, a sequence is a tuple whose place n - 1 holds element n.
Not handled: what may happen (model).

Spec: Words, Channel, CONSTANTS and VARIABLES of DeltaRefit
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import combinations
from typing import Any, NamedTuple, NoReturn, TypeVar

K = TypeVar("K")
V = TypeVar("V")
Word = frozenset[int]
"""The words of one item: the bits that are 1, one bit for each candidate; bit 0 is junk."""
Member = tuple[str, int]
"""A receiver and its incarnation."""
Members = frozenset[Member]

UNKNOWN = -1
RAW: Word = frozenset({0})
DELTA = ("xor", "overwrite", "dense")
MODES = (*DELTA, "restore", "finish")


class Map(dict[K, V]):
    """A function with a finite domain. `[f EXCEPT ![key] = value]` is `f.but(key, value)`."""

    __slots__ = ("_hash",)

    def __hash__(self) -> int:  # type: ignore[override]
        try:
            return self._hash
        except AttributeError:
            self._hash: int = hash(frozenset(self.items()))
            return self._hash

    def __setitem__(self, key: K, value: V) -> NoReturn:
        raise TypeError("a Map does not change; see but")

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return Map, (dict(self),)

    def but(self, key: K, value: V) -> Map[K, V]:
        """The same function with another value, or one more, at one place."""
        return Map({**self, key: value})


def flip(a: Word, b: Word) -> Word:
    """Exclusive or; also the changed set of two contents."""
    return a ^ b


def xor(word: Word, delta: Word) -> Word:
    return flip(word, delta)


def overwrite(word: Word, delta: Word, target: Word) -> Word:
    return (word - delta) | (target & delta)


class Tag(NamedTuple):
    kind: str
    ver: int
    cand: int
    att: int


class Record(NamedTuple):
    cand: int
    att: int
    req: frozenset[Member]
    epoch: int
    base: int


class Row(NamedTuple):
    epoch: int
    cand: int
    mode: str
    view: int
    req: frozenset[Member]
    owners: Map[str, int]


class Owner(NamedTuple):
    inc: int
    att: int
    fenced: int
    status: str
    kind: str
    ver: int
    filling: int
    frozen: int
    began: int
    live: int


class Coordinator(NamedTuple):
    phase: str
    epoch: int
    view: int
    att: int


class Digest(NamedTuple):
    item: str
    enc: str
    delta: Word
    target: Word


class Manifest(NamedTuple):
    owner: str
    payloads: frozenset[Digest]


class Call(NamedTuple):
    """prepare, stream, close, apply, stop and restored: all else is in the row of the attempt."""

    type: str
    att: int


class CommitRequest(NamedTuple):
    type: str
    att: int
    epoch: int
    view: int


class BaselineCall(NamedTuple):
    """update and end transition."""

    type: str
    cand: int
    ver: int


class OpenMessage(NamedTuple):
    type: str
    att: int
    ver: int
    record: int


class PayloadMessage(NamedTuple):
    type: str
    att: int
    item: str
    enc: str
    delta: Word
    target: Word


class EndMessage(NamedTuple):
    type: str
    att: int
    owner: str
    payloads: frozenset[Digest]


class AckMessage(NamedTuple):
    type: str
    att: int
    receiver: str
    inc: int
    proved: bool
    payloads: frozenset[Digest]


Message = Call | CommitRequest | BaselineCall | OpenMessage | PayloadMessage | EndMessage | AckMessage


class Receiver(NamedTuple):
    inc: int
    att: int
    fenced: int
    stopped: bool
    drained: bool
    tag: Tag
    loaded: bool
    gate: bool
    requests: frozenset[str]
    seen: frozenset[Digest]
    ends: frozenset[Manifest]
    pending: frozenset[PayloadMessage]
    open: bool
    writing: bool
    acked: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The constants. Attempts need no bound here."""

    receivers: tuple[str, ...]
    owners: tuple[str, ...]
    items: tuple[str, ...]
    owner_of: Mapping[str, str]
    coordinators: tuple[str, ...]
    max_candidate: int
    changes: Mapping[int, frozenset[str]]
    gate_mode: str = "sync"
    requests: tuple[str, ...] = ()
    arrivals: tuple[str, ...] = ("sound",)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The variables."""

    chain: tuple[Record, ...]
    epoch: int
    table: tuple[Row, ...]
    dead: frozenset[int]
    late: frozenset[int]
    content: Map[int, Map[str, Word]]
    step: int
    own: Map[str, Owner]
    base: Map[str, Word]
    rcv: Map[str, Receiver]
    store: Map[str, Map[str, Word]]
    coord: Map[str, Coordinator]
    net: frozenset[Message]


VARIABLES = tuple(field.name for field in fields(State))


def changed(state: State, changes: Mapping[str, Any]) -> State:
    """The state after a step; variables that the step does not name keep their value."""
    if not changes:
        return state
    return State(**{name: changes[name] if name in changes else getattr(state, name) for name in VARIABLES})


def mapped(keys: Iterable[K], value: V) -> Map[K, V]:
    """The constant function."""
    return Map(dict.fromkeys(keys, value))


NONE = Tag("none", 0, 0, 0)
NO_RECORD = Record(0, 0, frozenset(), 0, 0)


def clean(v: int) -> Tag:
    return Tag("clean", v, 0, 0)


def dirty(v: int, c: int) -> Tag:
    return Tag("dirty", v, c, 0)


def done(v: int, c: int, t: int) -> Tag:
    return Tag("done", v, c, t)


def version_of(n: int) -> int:
    return 0 if n == 0 else n - 1


def digest(p: PayloadMessage) -> Digest:
    return Digest(p.item, p.enc, p.delta, p.target)


def item_names(digests: Iterable[Digest]) -> set[str]:
    return {d.item for d in digests}


def some_of(whole: Members) -> set[Members]:
    return {frozenset(some) for size in range(len(whole)) for some in combinations(whole, size + 1)}


def arrived(p: PayloadMessage, how: str) -> PayloadMessage:
    """A damaged payload shows its wrong bits; a foreign one is whole, but not the one that the owner listed."""
    match how:
        case "damaged":
            return p._replace(delta=p.delta | RAW, target=p.target | RAW)
        case "foreign" if p.enc == "xor":
            return p._replace(delta=frozenset())
        case "foreign":
            return p._replace(target=flip(p.target, p.delta))
        case _:
            return p


def new_receiver(inc: int, tag: Tag, known: bool) -> Receiver:
    no: frozenset[Any] = frozenset()
    return Receiver(inc, 0, 0, True, True, tag, known, False, no, no, no, no, False, False, False)


def prepare_call(t: int) -> Call:
    return Call("prepare", t)


def stream_call(t: int) -> Call:
    return Call("stream", t)


def close_call(t: int) -> Call:
    return Call("close", t)


def apply_call(t: int) -> Call:
    return Call("apply", t)


def stop_call(t: int) -> Call:
    return Call("stop", t)


def restored_call(t: int) -> Call:
    return Call("restored", t)
