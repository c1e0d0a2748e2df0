"""Native loaders as programs: random compositions of what real loaders do, and of what breaks a loader condition.

A program has a pipeline for each canonical tensor: views and transforms of the source, a placement, composed stages in
the resident tensor, and at most one foreign act (see `foreign_writes`) before or after the copies. The call as a whole
may take its tensors out of order and may report the wrong names. `clean` programs are exact by construction; all others
may be refused, and must never be applied wrongly (see `refit_outcome`).

Paper: Section 3 (native loader L_r); Table A.2   Conditions: LC1-LC12
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.testing.foreign_writes import FOREIGN, TAKEN_EARLIER, Memory
from nemo_dcr.testing.toy_loader import ScriptedModel, shard

Entry = tuple[str, Tensor]
Weights = Iterable[Entry]


def _rows(tensor: Tensor, rank: int, world: int) -> Tensor:
    return tensor.narrow(0, *shard(tensor.shape[0], rank, world)) if tensor.dim() else tensor


def _columns(tensor: Tensor, rank: int, world: int) -> Tensor:
    return tensor.narrow(-1, *shard(tensor.shape[-1], rank, world)) if tensor.dim() else tensor


def _turned(tensor: Tensor) -> Tensor:
    return tensor.permute(tuple(range(tensor.dim() - 1, -1, -1)))


SOURCES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "narrow rows": _rows,
    "narrow columns": _columns,
    "transpose": lambda t, rank, world: _turned(t),
    "permute and clone": lambda t, rank, world: _turned(t).clone(memory_format=torch.contiguous_format),
    "clone": lambda t, rank, world: t.clone(),
    "flatten": lambda t, rank, world: t.reshape(-1),
}
"""Any dtype."""
FLOAT_SOURCES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "to F32": lambda t, rank, world: t.to(torch.float32),
    "to BF16": lambda t, rank, world: t.to(torch.bfloat16),
    "negate": lambda t, rank, world: -t,
    "exp": lambda t, rank, world: t.exp(),
}


def _same(parameters: Sequence[Tensor], value: Tensor) -> None:
    parameters[0].copy_(value)


def _assign(parameters: Sequence[Tensor], value: Tensor) -> None:
    parameters[0].data[...] = value


def _cast(parameters: Sequence[Tensor], value: Tensor) -> None:
    parameters[0].copy_(value)


def _twice(parameters: Sequence[Tensor], value: Tensor) -> None:
    for parameter in parameters:
        parameter.copy_(value)


def _split(parameters: Sequence[Tensor], value: Tensor) -> None:
    first = value.shape[0] // 2
    parameters[0].copy_(value[:first])
    parameters[1].copy_(value[first:])


def _braid(parameters: Sequence[Tensor], value: Tensor) -> None:
    even = -(-value.shape[0] // 2)
    parameters[0][::2].copy_(value[:even])
    parameters[0][1::2].copy_(value[even:])


def _by_row(parameters: Sequence[Tensor], value: Tensor) -> None:
    for row, part in zip(parameters[0], value, strict=True):
        row.copy_(part)


def _pad_fill(parameters: Sequence[Tensor], value: Tensor) -> None:
    parameters[0][: value.shape[0]].data.copy_(value)
    integer_view(parameters[0][value.shape[0] :]).fill_(0)


def _pad_cat(parameters: Sequence[Tensor], value: Tensor) -> None:
    parameters[0].copy_(torch.cat([value, torch.zeros((2, *value.shape[1:]), dtype=value.dtype)]))


Shape = tuple[int, ...]


def _padded(shape: Shape) -> list[Shape]:
    return [(shape[0] + 2, *shape[1:])]


PLACEMENTS: dict[str, tuple[Callable[[Shape], list[Shape]], Callable[[Sequence[Tensor], Tensor], None]]] = {
    "same": (lambda shape: [shape], _same),
    "item assignment": (lambda shape: [shape], _assign),
    "cast in the copy": (lambda shape: [shape], _cast),
    "replicate": (lambda shape: [shape, shape], _twice),
    "split": (lambda shape: [(shape[0] // 2, *shape[1:]), (shape[0] - shape[0] // 2, *shape[1:])], _split),
    "interleave": (lambda shape: [shape], _braid),
    "row by row": (lambda shape: [shape], _by_row),
    "pad and fill": (_padded, _pad_fill),
    "pad and copy": (_padded, _pad_cat),
}
"""Shapes of the resident tensors, and the copies. All but the first four need an axis."""
NEED_AXIS = frozenset(PLACEMENTS) - {"same", "item assignment", "cast in the copy", "replicate"}

STAGES: dict[str, Callable[[Tensor], object]] = {
    "-exp": lambda p: p.copy_(-p.exp()),
    "1 + p": lambda p: p.copy_(1 + p),
}
"""Second copies into the whole resident tensor, computed from it."""


ORDERS = ("as it comes", "list", "reversed", "look ahead", "pairs", "pairs of one call")
REPORTS = ("resident", "canonical", "none", "too few", "too many", "another")


@dataclass(frozen=True)
class TensorProgram:
    """What a loader does with one canonical tensor."""

    meta: TensorMeta
    sources: tuple[str, ...] = ()
    placement: str = "same"
    stages: tuple[str, ...] = ()
    foreign: str = ""
    early: bool = False
    """An act over memory that was taken earlier comes before the copies."""
    skipped_on: int | None = None
    """Rank that skips it natively."""

    def value(self, tensor: Tensor, rank: int, world: int) -> Tensor:
        """The tensor after its views and transforms."""
        for source in self.sources:
            tensor = (SOURCES | FLOAT_SOURCES)[source](tensor, rank, world)
        return tensor

    def declare(self, rank: int, world: int) -> dict[str, Tensor]:
        """Resident tensors of one rank."""
        if self.skipped_on == rank:
            return {}
        value = self.value(torch.zeros(self.meta.shape, dtype=torch_dtype(self.meta.dtype)), rank, world)
        dtype = torch.float32 if self.placement == "cast in the copy" else value.dtype
        shapes = PLACEMENTS[self.placement][0](tuple(value.shape))
        return {f"{self.meta.name}_{number}": torch.zeros(shape, dtype=dtype) for number, shape in enumerate(shapes)}


@dataclass(frozen=True)
class LoaderProgram:
    """A whole loader; `engine` makes one rank of it with fresh storage and fresh state.

    Order, report and foreign acts are those of rank 0: a path that one rank alone cannot take must be refused for all.
    """

    tensors: tuple[TensorProgram, ...]
    world: int = 1
    order: str = "as it comes"
    report: str = "resident"

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        """The tensor table."""
        return tuple(each.meta for each in self.tensors)

    @property
    def clean(self) -> bool:
        """Every part of it is exact by construction, so that a refusal is a fault of the receiver."""
        narrow = ("narrow rows", "narrow columns")
        taken = all(
            each.skipped_on is None or (self.world > 1 and not set(narrow) & set(each.sources)) for each in self.tensors
        )
        honest = self.report in ("resident", "canonical", "none") and "pairs" not in self.order
        return taken and honest and not any(each.foreign for each in self.tensors)

    def engine(self, rank: int) -> ScriptedModel:
        """One rank that holds zeros."""
        return _ProgramModel(self, rank)


class _ProgramModel(ScriptedModel):
    def __init__(self, program: LoaderProgram, rank: int) -> None:
        resident = {"table": torch.arange(1, 4, dtype=torch.float32)}
        for each in program.tensors:
            resident |= each.declare(rank, program.world)
        super().__init__(resident, lambda _, weights: self._place(weights))
        self._program, self._rank = program, rank
        self._by_name = {each.meta.name: each for each in program.tensors}
        self._pending: dict[str, Tensor] = {}
        self._memory = {name: Memory.of(tensor) for name, tensor in self.named_buffers()}

    def _place(self, weights: Weights) -> list[str] | None:
        loaded: list[str] = []
        names: list[str] = []
        odd = self._rank == 0
        for name, tensor in self._ordered(weights, self._program.order if odd else "as it comes"):
            each = self._by_name[name]
            if each.skipped_on == self._rank:
                continue
            names.append(name)
            loaded += self._place_one(each, tensor)
        match self._program.report if odd else "resident":
            case "none":
                return None
            case "canonical":
                return names
            case "too few":
                return loaded[:-1]
            case "too many":
                return [*loaded, "table"]
            case "another":
                return [*loaded[:-1], "table"]
        return loaded

    def _place_one(self, each: TensorProgram, given: Tensor) -> list[str]:
        prefix = f"{each.meta.name}_"
        keys = [key for key, _ in self.named_buffers(remove_duplicate=False) if key.startswith(prefix)]
        parameters = [getattr(self, key) for key in keys]
        value = each.value(given, self._rank, self._program.world)
        acts = self._rank == 0
        if acts and each.early:
            self._act_on_memory(each.foreign, keys[0])
        PLACEMENTS[each.placement][1](parameters, value)
        for stage in each.stages:
            for parameter in parameters:
                STAGES[stage](parameter)
        if acts and each.foreign in FOREIGN:
            FOREIGN[each.foreign](parameters[0], value, given)
        elif acts and not each.early:
            self._act_on_memory(each.foreign, keys[0])
        return keys

    def _act_on_memory(self, act: str, key: str) -> None:
        if act in TAKEN_EARLIER:
            TAKEN_EARLIER[act](self._memory[key])

    def _ordered(self, weights: Weights, order: str) -> Iterator[Entry]:
        match order:
            case "list":
                yield from list(weights)
            case "reversed":
                yield from reversed(list(weights))
            case "look ahead":
                before: list[Entry] = []
                for entry in weights:
                    yield from before
                    before = [entry]
                yield from before
            case "pairs":
                for name, tensor in weights:
                    self._pending[name] = tensor
                    if len(self._pending) == 2:
                        yield from list(self._pending.items())
                        self._pending.clear()
            case "pairs of one call":
                held = list(weights)
                yield from held if len(held) > 1 else []
            case _:
                yield from weights
