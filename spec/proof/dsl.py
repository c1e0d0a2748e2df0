"""The language of the model: sorts, a state table, guards, actions and invariants as plain Python functions.

An action is a function `(state, parameters) -> (guard, post)`. The same function runs twice: over a `Symbolic` state it
builds formulas for a solver, over a `Concrete` state it computes. `post` says which symbols change: one row (`put`),
all rows under a prefix (`rows`) or every row (`rows` with no prefix); everything else stays. A guard is a named
function under `@guard`, so that a mutant can swap exactly one of them.
Not handled: arithmetic, sequences, cardinalities. Without them every query stays in a decidable fragment.

Spec: none of its own; the vocabulary and the actions beside it carry the names of DeltaRefit.tla
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import product
from typing import Annotated, Any, Self, get_args, get_origin, get_type_hints

import z3

Term = Any
"""A z3 expression in a symbolic state, a plain Python value in a concrete one."""


@dataclass(frozen=True, slots=True)
class Sort:
    """A set of things without structure."""

    name: str


BOOL = Sort("Bool")
Flag = Annotated[Any, BOOL]


@dataclass(frozen=True, slots=True)
class Symbol:
    """One row of the state table: a relation (result `BOOL`) or a function of its arguments."""

    name: str
    args: tuple[Sort, ...]
    result: Sort
    rigid: bool
    """Never changes: an order, the words of a candidate, a choice that an attempt carries from the beginning."""
    about: str


@dataclass(frozen=True, slots=True)
class Change:
    """New values of one symbol for all keys that begin with `prefix`; `value` takes the rest of the key."""

    prefix: tuple[Term, ...]
    value: Callable[..., Term]


Post = dict[str, Change]
Action = Callable[..., tuple[Term, Post]]
Claim = Callable[..., Term]


def put(*key: Term, to: Term) -> Change:
    """One row: `symbol(*key)` becomes `to`."""
    return Change(key, lambda: to)


def rows(*prefix: Term, to: Callable[..., Term]) -> Change:
    """All rows under `prefix`: each becomes what `to` says of the rest of its key."""
    return Change(prefix, to)


# ------------------------------------------------------------------------------------------------------- connectives


def conj(*terms: Term) -> Term:
    """All of them."""
    kept = [term for term in terms if term is not True]
    if any(term is False for term in kept):
        return False
    return True if not kept else kept[0] if len(kept) == 1 else z3.And(*kept)


def disj(*terms: Term) -> Term:
    """Any of them."""
    kept = [term for term in terms if term is not False]
    if any(term is True for term in kept):
        return True
    return False if not kept else kept[0] if len(kept) == 1 else z3.Or(*kept)


def neg(term: Term) -> Term:
    """Not."""
    return (not term) if isinstance(term, bool) else z3.Not(term)


def implies(left: Term, right: Term) -> Term:
    """If `left` then `right`."""
    return disj(neg(left), right)


def ite(condition: Term, then: Term, otherwise: Term) -> Term:
    """`then` where the condition holds."""
    if isinstance(condition, bool):
        return then if condition else otherwise
    if isinstance(then, bool) and isinstance(otherwise, bool):
        return condition if then and not otherwise else neg(condition) if otherwise and not then else then
    if isinstance(then, bool):
        then = z3.BoolVal(then)
    if isinstance(otherwise, bool):
        otherwise = z3.BoolVal(otherwise)
    return z3.If(condition, then, otherwise)


# ------------------------------------------------------------------------------------------------------------ states


class State(ABC):
    """What an action sees: each symbol as a function, and quantifiers over sorts."""

    swaps: Mapping[str, Callable[..., Term]]
    """Guards that a mutant replaces, by name."""

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.lookup(name)

    @abstractmethod
    def lookup(self, name: str) -> Callable[..., Term]:
        """The symbol `name` as a function of its arguments."""
        ...

    @abstractmethod
    def every(self, sorts: Sort | tuple[Sort, ...], body: Callable[..., Term]) -> Term:
        """`body` holds for all things of these sorts."""
        ...

    def some(self, sorts: Sort | tuple[Sort, ...], body: Callable[..., Term]) -> Term:
        """`body` holds for some things of these sorts."""
        return neg(self.every(sorts, lambda *things: neg(body(*things))))

    @abstractmethod
    def after(self, post: Post) -> State:
        """The state that an action leaves."""
        ...


def guard(function: Callable[..., Term]) -> Callable[..., Term]:
    """Make a named condition (or a value that an action writes) that a mutant can swap."""

    @wraps(function)
    def looked_up(state: State, *args: Term) -> Term:
        return state.swaps.get(function.__name__, function)(state, *args)

    return looked_up


def _z3_sort(sort: Sort) -> z3.SortRef:
    return z3.BoolSort() if sort == BOOL else z3.DeclareSort(sort.name)


def constant(name: str, sort: Sort) -> z3.ExprRef:
    """A free constant."""
    return z3.Const(name, _z3_sort(sort))


class Symbolic(State):
    """A state of unknown size: symbols are uninterpreted, an updated symbol is a macro over the state before it."""

    def __init__(
        self,
        table: Mapping[str, Symbol],
        *,
        swaps: Mapping[str, Callable[..., Term]] | None = None,
        macros: Mapping[str, Callable[..., Term]] | None = None,
        read: set[str] | None = None,
    ) -> None:
        """`read`, if given, collects the names of the symbols that are looked up."""
        self.table = table
        self.swaps = {} if swaps is None else swaps
        self.macros = macros or {}
        self.read = read

    def lookup(self, name: str) -> Callable[..., Term]:
        """See `State.lookup`."""
        if self.read is not None:
            self.read.add(name)
        if name in self.macros:
            return self.macros[name]
        return declared(self.table[name])

    def every(self, sorts: Sort | tuple[Sort, ...], body: Callable[..., Term]) -> Term:
        """See `State.every`."""
        bound = [z3.FreshConst(_z3_sort(sort), sort.name[:3].lower()) for sort in _tuple(sorts)]
        claim = body(*bound)
        return claim if isinstance(claim, bool) else z3.ForAll(bound, claim)

    def after(self, post: Post) -> Self:
        """See `State.after`."""
        macros = dict(self.macros)
        for name, change in post.items():
            macros[name] = _macro(self.lookup(name), change)
        return type(self)(self.table, swaps=self.swaps, macros=macros, read=self.read)


def declared(symbol: Symbol) -> Callable[..., Term]:
    """The uninterpreted symbol of the state before an action."""
    sorts = [_z3_sort(sort) for sort in (*symbol.args, symbol.result)]
    if not symbol.args:
        value = z3.Const(symbol.name, sorts[0])
        return lambda: value
    function: Callable[..., Term] = z3.Function(symbol.name, *sorts)
    return function


def _macro(old: Callable[..., Term], change: Change) -> Callable[..., Term]:
    def updated(*key: Term) -> Term:
        head, rest = key[: len(change.prefix)], key[len(change.prefix) :]
        hit = conj(*[left == right for left, right in zip(head, change.prefix, strict=True)])
        return ite(hit, change.value(*rest), old(*key))

    return updated


def _tuple(sorts: Sort | tuple[Sort, ...]) -> tuple[Sort, ...]:
    return sorts if isinstance(sorts, tuple) else (sorts,)


@dataclass
class Concrete(State):
    """A finite state: rows as dictionaries, things as Python values. Rows that were never written hold the default."""

    table: Mapping[str, Symbol]
    things: Mapping[str, list[Any]]
    """The members of every sort, by its name."""
    values: dict[str, dict[tuple[Any, ...], Any]] = field(default_factory=dict)
    defaults: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """What a row holds that was never written: relations are false unless named here."""
    swaps: Mapping[str, Callable[..., Term]] = field(default_factory=dict)

    def lookup(self, name: str) -> Callable[..., Term]:
        """See `State.lookup`."""
        written, default = self.values.get(name, {}), self.defaults.get(name)

        def value(*key: Any) -> Any:
            if key in written:
                return written[key]
            return default(*key) if default else False

        self.__dict__.setdefault(name, value)  # a state does not change: the next look needs no search
        return value

    def every(self, sorts: Sort | tuple[Sort, ...], body: Callable[..., Term]) -> bool:
        """See `State.every`."""
        return all(body(*each) for each in product(*[self.things[sort.name] for sort in _tuple(sorts)]))

    def after(self, post: Post) -> Concrete:
        """See `State.after`."""
        values = dict(self.values)
        for name, change in post.items():
            rest = self.table[name].args[len(change.prefix) :]
            changed = dict(values.get(name, {}))
            for key in product(*[self.things[sort.name] for sort in rest]):
                changed[(*change.prefix, *key)] = change.value(*key)
            values[name] = changed
        return Concrete(self.table, self.things, values, self.defaults, self.swaps)


# -------------------------------------------------------------------------------------------------- functions as data


def action_name(action: Callable[..., Any]) -> str:
    """`endpoint_prepare` is the action EndpointPrepare."""
    return "".join(part.capitalize() for part in action.__name__.split("_"))


@cache
def parameters(function: Callable[..., Any]) -> dict[str, Sort]:
    """Names and sorts of the parameters after the state (and the state after it), from the annotations.

    Raises: TypeError when a parameter has no sort.
    """
    hints = get_type_hints(function, include_extras=True)
    found: dict[str, Sort] = {}
    for name in list(hints):
        if name in ("return", "s", "after"):
            continue
        sort = get_args(hints[name])[-1] if get_origin(hints[name]) is Annotated else None
        if not isinstance(sort, Sort):
            raise TypeError(f"{function.__name__}: parameter {name} has no sort")
        found[name] = sort
    return found


def closed(state: State, claim: Claim) -> Term:
    """The claim for all values of its parameters."""
    sorts = tuple(parameters(claim).values())
    return state.every(sorts, lambda *things: claim(state, *things)) if sorts else claim(state)


def symbols_read(table: Mapping[str, Symbol], claims: Iterable[Claim]) -> dict[str, set[str]]:
    """Which symbols each claim looks at, by name of the claim."""
    found = {}
    for claim in claims:
        read: set[str] = set()
        closed(Symbolic(table, read=read), claim)
        found[claim.__name__] = read
    return found
