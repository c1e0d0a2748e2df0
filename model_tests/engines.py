"""Toy engines for the state machine: tensor tables drawn once, and prewarmed models that are lent and taken back.

A prewarm costs more than a whole example, and depends on the loader alone. So tables come from a fixed list that the
strategy of the loader tests drew, and an engine that an example gave back is blanked and lent again: every stored byte
is zero, as in a new model, and application state is new. What prewarm found stays true: the storage is the same.
Not handled: tables that prewarm refuses (tests/unit/receiver); more ranks than two.

Paper: Section 6.1 (prewarm)   Proofs: loader_commutes   Conditions: LC1, LC3
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from hypothesis import HealthCheck, Phase, given, settings

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
from nemo_dcr.testing.strategies import ToyTable, toy_tables
from nemo_dcr.testing.toy_loader import Rule, ToyModel

RANKS = (1, 2)
TABLES = 20
"""Tables to draw from."""
DRAWN = 400
"""Tables that they are chosen from."""
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
    """Each rule of the library comes soon, over several elements, then each dtype, then each rule again, then the rest.

    A table that some receiver refuses covers nothing.
    """
    found: list[Table] = []
    left = _drawn()
    for often, kinds in ((1, _rules), (1, _dtypes), (2, _rules), (count, _any)):
        seen = Counter(kind for table in found for kind in kinds((table.tensors, table.rules)))
        for drawn in [table for table in left if any(seen[kind] < often for kind in kinds(table))]:
            if len(found) < count and any(seen[kind] < often for kind in kinds(drawn)):
                left.remove(drawn)
                table = _accepted(drawn, len(found))
                found += [] if table is None else [table]
                seen.update(() if table is None else kinds(drawn))
    return tuple(found)


def _accepted(drawn: ToyTable, number: int) -> Table | None:
    """A table that every receiver of any rank count takes, with its engines in the pool; None when one refuses it."""
    tensors, rules = drawn
    engines = [new_engine(tensors, rules, rank, ranks) for ranks in RANKS for rank in range(ranks)]
    classes = _united(engines)
    if classes is None:
        return None
    for engine in engines:
        POOL.take_back(number, engine)
    return Table(tensors, rules, classes)


def _drawn() -> list[ToyTable]:
    """Tables with at least one element, as the strategy draws them."""
    drawn: list[ToyTable] = []

    @settings(
        max_examples=DRAWN,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(toy_tables())
    def collect(table: ToyTable) -> None:
        if sum(meta.numel for meta in table[0]):
            drawn.append(table)

    collect()
    return drawn


def _rules(table: ToyTable) -> set[str]:
    tensors, rules = table
    return {type(rules[meta.name]).__name__ for meta in tensors if meta.numel >= SEVERAL}


def _dtypes(table: ToyTable) -> set[str]:
    return {meta.dtype for meta in table[0] if meta.numel}


def _any(table: ToyTable) -> set[str]:
    return {""}


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
