"""Toy engines for the state machine: tensor tables drawn once, and prewarmed models that are lent and taken back.

A prewarm costs more than a whole example, and depends on the loader alone. So tables come from a fixed list that the
strategy of the loader tests drew, and an engine that an example gave back is blanked and lent again: every stored byte
is zero, as in a new model, and application state is new. What prewarm found stays true: the storage is the same.
Drawn tables are joined in pairs, each with one more tensor whose loader computes. Alone, many of them hold nothing that
can change in part, most dtypes can not be computed with, and a rule that is in one of twenty tables is met by few
examples: Hypothesis repeats and varies what it drew.
Not handled: tables that prewarm refuses (tests/unit/receiver); more ranks than two.

Paper: Section 6.1 (prewarm)   Proofs: loader_commutes   Conditions: LC1, LC3
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import resident_words, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import UnsupportedLoaderPath
from nemo_dcr.ids import NO_CANDIDATE
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.paths import LoaderTable, unite_tables
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.testing.local_oracle import DenseOracle
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.strategies import FLOATS, ToyTable, rules_for, toy_tables
from nemo_dcr.testing.toy_loader import Cast, Composed, Fuse, Negate, Rule, ToyModel

RANKS = (1, 2)
TABLES = 10
"""Tables to draw from."""
JOINED = 2
"""Drawn tables that make one of them."""
DRAWN = 200
"""Tables that they are chosen from."""
COMPUTES = (Cast, Composed, Negate)
SEVERAL = 4
"""Elements with which a tensor can change in part, in places that its rule moves."""


@dataclass(frozen=True, eq=False)
class Table:
    """A tensor table, and the rule by which the native loader places each tensor."""

    tensors: tuple[TensorMeta, ...]
    rules: Mapping[str, Rule]
    classes: Mapping[str, PathClass]
    """Of each path, over all ranks of all rank counts."""

    @property
    def metas(self) -> dict[str, TensorMeta]:
        """Tensors by name."""
        return {meta.name: meta for meta in self.tensors}


@dataclass(eq=False)
class Engine:
    """One rank of an engine: its model, what prewarm found, and an applier."""

    model: ToyModel
    table: LoaderTable
    applier: Applier

    def blank(self) -> None:
        """Zero every stored word, as in a new model; its constant buffer is no stored word."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            if name != "frequencies":
                resident_words(tensor.detach())[...] = 0
        self.applier = Applier(self.model, self.table)

    def load(self, tensors: Sequence[TensorMeta], words: Mapping[str, Words]) -> None:
        """Load full canonical words by the model's own loader."""
        self.model.load_weights(
            (meta.name, tensor_from_words(words[meta.name].copy(), meta.dtype, meta.shape)) for meta in tensors
        )


class Pool:
    """Engines by table and rank: lent to one example at a time."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, int], list[Engine]] = defaultdict(list)

    def lend(self, number: int, rank: int, ranks: int) -> Engine:
        """A blank engine of a table."""
        free = self._free[number, rank, ranks]
        if free:
            engine = free.pop()
            engine.blank()
            return engine
        table = tables()[number]
        return new_engine(table.tensors, table.rules, rank, ranks)

    def take_back(self, number: int, engine: Engine) -> None:
        """The example is over."""
        self._free[number, engine.model.rank, engine.model.world].append(engine)


def new_engine(tensors: tuple[TensorMeta, ...], rules: Mapping[str, Rule], rank: int, ranks: int) -> Engine:
    """A model that loaded a checkpoint and was prewarmed."""
    model = ToyModel(tensors, rules, rank, ranks)
    DenseOracle(LocalSource(tensors), rules).load(model, NO_CANDIDATE)
    found = prewarm(model, tensors)
    engine = Engine(model, found, Applier(model, found))
    engine.blank()
    return engine


POOL = Pool()


def tables(count: int = TABLES) -> tuple[Table, ...]:
    """The first `count` tables of the strategy that every rank count can serve; always the same ones."""
    return _tables(count)


@cache
def _tables(count: int) -> tuple[Table, ...]:
    found: list[Table] = []
    order = _covering(_drawn())
    for first in range(0, len(order), JOINED):
        tensors, rules = joined(order[first : first + JOINED])
        engines = [new_engine(tensors, rules, rank, ranks) for ranks in RANKS for rank in range(ranks)]
        classes = _united(engines)
        if classes is not None:
            for engine in engines:
                POOL.take_back(len(found), engine)
            found.append(Table(tensors, rules, classes))
        if len(found) == count:
            break
    return tuple(found)


@st.composite
def computed(draw: st.DrawFn) -> ToyTable:
    """One tensor over several elements whose loader does more than to move it."""
    shape = draw(st.lists(st.integers(2, 4), min_size=2, max_size=2).map(tuple))
    meta = TensorMeta("x.w", shape, draw(st.sampled_from(FLOATS)))
    return (meta,), {meta.name: draw(rules_for(meta).filter(lambda rule: isinstance(rule, COMPUTES)))}


def _drawn() -> list[ToyTable]:
    """Tables as the strategy draws them, each with a tensor whose loader computes."""
    drawn: list[ToyTable] = []

    @settings(
        max_examples=DRAWN,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(toy_tables(), computed())
    def collect(table: ToyTable, one_more: ToyTable) -> None:
        drawn.append(((*table[0], *one_more[0]), {**table[1], **one_more[1]}))

    collect()
    return drawn


def joined(drawn: Sequence[ToyTable]) -> ToyTable:
    """One table with the tensors of all, under names of their own."""
    tensors: list[TensorMeta] = []
    rules: dict[str, Rule] = {}
    for letter, (metas, placed) in zip("ab", drawn, strict=False):
        for meta in metas:
            name, rule = f"{letter}.{meta.name}", placed[meta.name]
            tensors.append(TensorMeta(name, meta.shape, meta.dtype))
            rules[name] = replace(rule, fused=f"{letter}.{rule.fused}") if isinstance(rule, Fuse) else rule
    return tuple(tensors), rules


def _covering(drawn: Sequence[ToyTable]) -> list[ToyTable]:
    """The same tables in another order: each rule of the library comes soon, over several elements, and each dtype."""
    order: list[ToyTable] = []
    for often, kinds in ((1, _rules), (1, _dtypes), (2, _rules), (3, _rules)):
        seen = Counter(kind for table in order for kind in kinds(table))
        for table in drawn:
            if table not in order and any(seen[kind] < often for kind in kinds(table)):
                order.append(table)
                seen.update(kinds(table))
    return [*order, *(table for table in drawn if table not in order)]


def _rules(table: ToyTable) -> set[str]:
    tensors, rules = table
    return {type(rules[meta.name]).__name__ for meta in tensors if meta.numel >= SEVERAL}


def _dtypes(table: ToyTable) -> set[str]:
    return {meta.dtype for meta in table[0] if meta.numel}


def _united(engines: Sequence[Engine]) -> dict[str, PathClass] | None:
    """Class of each path over all ranks of all rank counts; None when some receiver cannot take the table."""
    found = {f"{e.model.rank} of {e.model.world}": e.table.classes for e in engines}
    try:
        for ranks in RANKS:
            unite_tables({name: each for name, each in found.items() if name.endswith(f"of {ranks}")})
    except UnsupportedLoaderPath:
        return None
    return unite_tables(found)


def busiest() -> int:
    """The number of the table with the most tensors that have elements."""
    return max(range(TABLES), key=lambda number: sum(meta.numel > 0 for meta in tables()[number].tensors))
