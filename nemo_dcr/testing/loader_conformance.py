"""One class for each loader condition: a loader that satisfies the condition, and one that breaks it and no other.

`check_satisfying` asks for refits that equal a dense load in every bit, `check_breaking` for a refusal with the code of
the condition and live storage untouched. The pairs are also the shortest description of what a native loader may do and
what it may not.

Paper: Table A.2   Conditions: LC1-LC12
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.testing.refit_outcome import Outcome, dense_load, refit_outcome, stored_bits
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[Mapping[str, Tensor], Weights], Iterable[str] | None]
A, B = TensorMeta("a", (4, 2), "BF16"), TensorMeta("b", (4, 2), "BF16")
OLD: dict[str, Words] = {"a": np.arange(0x3F80, 0x3F88, dtype="<u2"), "b": np.arange(0x4000, 0x4008, dtype="<u2")}
NEW: dict[str, Words] = {name: np.where(np.arange(8) % 3 == 1, words ^ 1, words) for name, words in OLD.items()}


def two_tensors() -> dict[str, Tensor]:
    """Resident tensors like the canonical ones."""
    return {meta.name: torch.zeros(meta.shape, dtype=torch.bfloat16) for meta in (A, B)}


def plain(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
    """Copy every tensor into the resident tensor of its name."""
    loaded = []
    for name, tensor in weights:
        residents[name].copy_(tensor)
        loaded.append(name)
    return loaded


def replacing_a(act: Callable[[Mapping[str, Tensor], Tensor], object]) -> Callable[[], Load]:
    """Loaders that do `act` with tensor `a` and copy all others."""

    def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        loaded = []
        for name, tensor in weights:
            if name == "a":
                act(residents, tensor)
            else:
                residents[name].copy_(tensor)
            loaded.append(name)
        return loaded

    return lambda: load


@dataclass(frozen=True)
class Case:
    """A loader on one or more ranks, and what it loads."""

    fresh: Callable[[], Load] = lambda: plain
    """Makes the loader with state of its own."""
    residents: Callable[[], dict[str, Tensor]] = two_tensors
    tensors: tuple[TensorMeta, ...] = (A, B)
    more_ranks: tuple[Callable[[], Load], ...] = field(default=())
    """Loaders of further ranks, over the same resident tensors."""

    def engines(self) -> list[Callable[[], ScriptedModel]]:
        """One maker of fresh engines a rank."""
        return [partial(self._engine, fresh) for fresh in (self.fresh, *self.more_ranks)]

    def _engine(self, fresh: Callable[[], Load]) -> ScriptedModel:
        return ScriptedModel(self.residents(), fresh())

    def outcome(self) -> Outcome:
        """Play every kind of attempt. Raises: AssertionError for an outcome that is not allowed."""
        return refit_outcome(self.engines(), self.tensors, OLD, NEW)


class LoaderConformance(ABC):
    """One condition."""

    code: ClassVar[str]

    @abstractmethod
    def satisfying(self) -> Case:
        """A loader that is exact."""

    @abstractmethod
    def breaking(self) -> Case:
        """A loader that breaks this condition alone."""

    def check_satisfying(self) -> None:
        """Raises: AssertionError when a refit through the satisfying loader is refused or not exact."""
        outcome = self.satisfying().outcome()
        if not outcome.exact:
            raise AssertionError(f"{self.code}: the satisfying loader is refused: {outcome.detail}")

    def check_breaking(self) -> None:
        """Raises: AssertionError when the breaking loader is accepted, or refused by another condition."""
        outcome = self.breaking().outcome()
        if outcome.refused != self.code:
            raise AssertionError(f"{self.code}: the breaking loader gives {outcome.detail or 'no refusal'}")


class InterceptedWritesConformance(LoaderConformance):
    """Zeroed pad rows are harmless; a multiplication in place is not."""

    code = "LC1"

    def satisfying(self) -> Case:
        """Copy, then zero two pad rows."""
        act = replacing_a(lambda r, t: (r["a"][:4].copy_(t), r["a"][4:].fill_(0)))
        return Case(act, lambda: two_tensors() | {"a": torch.zeros(6, 2, dtype=torch.bfloat16)})

    def breaking(self) -> Case:
        """Copy, then multiply in place."""
        return Case(replacing_a(lambda r, t: r["a"].copy_(t).mul_(2)))


class ReportedAsCopiedConformance(LoaderConformance):
    """Reports may use canonical or resident names; a name without a copy may not stand in them."""

    code = "LC2"

    def satisfying(self) -> Case:
        """A resident tensor of another name, reported by that name."""

        def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
            return plain(residents, ((f"{name}_stored", tensor) for name, tensor in weights))

        return Case(lambda: load, lambda: {f"{name}_stored": tensor for name, tensor in two_tensors().items()})

    def breaking(self) -> Case:
        """Report `a` and leave it as it was."""
        return Case(replacing_a(lambda r, t: None))


class TakenSomewhereConformance(LoaderConformance):
    """A rank may skip a tensor that another rank takes."""

    code = "LC3"

    @staticmethod
    def _skip_a(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return plain(residents, ((name, tensor) for name, tensor in weights if name != "a"))

    def satisfying(self) -> Case:
        """The second rank skips `a`."""
        return Case(more_ranks=(lambda: self._skip_a,))

    def breaking(self) -> Case:
        """Both ranks skip `a`."""
        return Case(lambda: self._skip_a, more_ranks=(lambda: self._skip_a,))


class ElementwiseConformance(LoaderConformance):
    """Each output comes from one canonical element."""

    code = "LC4"

    def satisfying(self) -> Case:
        """A transform of each element."""
        return Case(replacing_a(lambda r, t: r["a"].copy_(t.float().exp())))

    def breaking(self) -> Case:
        """The larger one of two neighbours."""
        return Case(replacing_a(lambda r, t: r["a"].copy_(torch.maximum(t, t.roll(1, 0)))))


class BitsPreservedConformance(LoaderConformance):
    """Views of the given tensor keep its bits."""

    code = "LC5"

    def satisfying(self) -> Case:
        """Views of source and target."""
        return Case(replacing_a(lambda r, t: r["a"].t().copy_(t.t())))

    def breaking(self) -> Case:
        """An edit of the given tensor."""
        return Case(replacing_a(lambda r, t: r["a"].copy_(t.mul_(2))))


class DisjointXorConformance(LoaderConformance):
    """No element is changed twice by XOR in one attempt. Two items break it, whatever the loader."""

    code = "LC6"

    def satisfying(self) -> Case:
        """Even and odd rows of one tensor."""
        return Case(replacing_a(lambda r, t: (r["a"][::2].copy_(t[:2]), r["a"][1::2].copy_(t[2:]))))

    def breaking(self) -> Case:
        """The plain loader, for items that share an element."""
        return Case()

    def check_breaking(self) -> None:
        """Two XOR items of one call share element 2. Raises: AssertionError."""
        (engine,) = (make() for make in self.breaking().engines())
        dense_load(engine, (A, B), OLD)
        table, before = prewarm(engine, (A, B)), stored_bits(engine)
        ones = np.ones(2, dtype="<u2")
        items = [Item.of(A, Encoding.XOR, np.array(at), ones) for at in ((1, 2), (2, 5))]
        _require_refusal(self.code, lambda: Applier(engine, table).apply(items))
        if stored_bits(engine) != before:
            raise AssertionError("the refused items changed live storage")


class OverlapAgreesConformance(LoaderConformance):
    """A second copy into the same view is a step of the path; copies of two names may not meet."""

    code = "LC7"

    def satisfying(self) -> Case:
        """The same copy twice."""
        return Case(replacing_a(lambda r, t: (r["a"].copy_(t), r["a"].copy_(t))))

    def breaking(self) -> Case:
        """Two names over one storage."""
        return Case(residents=lambda: dict.fromkeys(("a", "b"), torch.zeros(4, 2, dtype=torch.bfloat16)))


class DistinctPlaceholderConformance(LoaderConformance):
    """The first copy into a view tells which elements were sent."""

    code = "LC8"

    def satisfying(self) -> Case:
        """A composed loader."""
        return Case(replacing_a(lambda r, t: (r["a"].copy_(t), r["a"].copy_(-r["a"].exp()))))

    def breaking(self) -> Case:
        """A view that is first filled from another resident tensor."""
        act = replacing_a(lambda r, t: (r["a"].copy_(t), r["b"].copy_(r["a"])))
        return Case(act, tensors=(A,))


class StableTargetsConformance(LoaderConformance):
    """Tensors keep their place."""

    code = "LC9"

    def satisfying(self) -> Case:
        """A detached alias of the resident tensor."""
        return Case(replacing_a(lambda r, t: r["a"].data.copy_(t)))

    def breaking(self) -> Case:
        """A copy, then a new storage."""
        return Case(replacing_a(lambda r, t: _rebind(r["a"].copy_(t))))


class NothingDerivedConformance(LoaderConformance):
    """An alias follows by itself; a copy that is made once goes stale."""

    code = "LC10"

    def satisfying(self) -> Case:
        """A transposed alias, and a table that is nobody's copy."""

        def residents() -> dict[str, Tensor]:
            tensors = two_tensors()
            return tensors | {"alias": tensors["a"].t(), "table": torch.arange(8, dtype=torch.bfloat16)}

        return Case(residents=residents)

    def breaking(self) -> Case:
        """A transposed copy that a step after the first load made."""

        def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
            names = plain(residents, weights)
            if not _get_current_dispatch_mode_stack():  # no refit runs the step
                residents["absorbed"].copy_(residents["a"].t())
            return names

        return Case(lambda: load, lambda: two_tensors() | {"absorbed": torch.zeros(2, 4, dtype=torch.bfloat16)})


class ConsumedInOrderConformance(LoaderConformance):
    """A loader that holds its input gets one call a tensor; one that starts to hold it after prewarm is refused."""

    code = "LC11"

    @staticmethod
    def _holding(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return plain(residents, reversed(list(weights)))

    def satisfying(self) -> Case:
        """All tensors first, then the copies in reverse order."""
        return Case(lambda: self._holding)

    def breaking(self) -> Case:
        """The plain loader, until it starts to hold its input."""
        return Case()

    def check_breaking(self) -> None:
        """The loader changes between prewarm and the attempt. Raises: AssertionError."""
        (engine,) = (make() for make in self.breaking().engines())
        dense_load(engine, (A, B), OLD)
        table, before = prewarm(engine, (A, B)), stored_bits(engine)
        engine._load = lambda residents, weights: plain(residents, list(weights))
        items = [Item.run(meta, Encoding.OVERWRITE, 1, NEW[meta.name][1:3]) for meta in (A, B)]
        _require_refusal(("LC2", self.code), lambda: Applier(engine, table).apply(items))
        if stored_bits(engine) != before:
            raise AssertionError("the late copy changed live storage")


class NoStateAcrossCallsConformance(LoaderConformance):
    """State may count; it may not hold one tensor until another one comes."""

    code = "LC12"

    def satisfying(self) -> Case:
        """A counter of calls."""

        def fresh() -> Load:
            calls: list[int] = []

            def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
                calls.append(len(calls))
                return plain(residents, weights)

            return load

        return Case(fresh)

    def breaking(self) -> Case:
        """A pair that is written when both halves are there."""

        def fresh() -> Load:
            waiting: dict[str, Tensor] = {}

            def load(residents: Mapping[str, Tensor], weights: Weights) -> list[str]:
                waiting.update(weights)
                if len(waiting) < 2:
                    return []
                residents["fused"].copy_(torch.cat([waiting.pop("a"), waiting.pop("b")]))
                return ["fused"]

            return load

        return Case(fresh, lambda: {"fused": torch.zeros(8, 2, dtype=torch.bfloat16)})


def _rebind(tensor: Tensor) -> Tensor:
    tensor.data = tensor.detach().clone()
    return tensor


def _require_refusal(codes: str | tuple[str, ...], act: Callable[[], object]) -> None:
    try:
        act()
    except ConditionViolated as refusal:
        if refusal.condition not in codes:
            raise AssertionError(f"{codes}: refused by another condition: {refusal}") from refusal
        return
    raise AssertionError(f"{codes}: applied without a refusal")


LOADER_CONFORMANCE: tuple[type[LoaderConformance], ...] = (
    InterceptedWritesConformance,
    ReportedAsCopiedConformance,
    TakenSomewhereConformance,
    ElementwiseConformance,
    BitsPreservedConformance,
    DisjointXorConformance,
    OverlapAgreesConformance,
    DistinctPlaceholderConformance,
    StableTargetsConformance,
    NothingDerivedConformance,
    ConsumedInOrderConformance,
    NoStateAcrossCallsConformance,
)
"""Table A.2 in order."""
