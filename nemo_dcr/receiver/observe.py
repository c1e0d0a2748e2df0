"""Running a native loader without letting it touch resident storage, and writing down what it does.

The observer runs the loader over canonical tensors, attributes every operator to the tensor that was yielded last, and
records each write into resident storage as a step. Copies and fills do not execute (into a shadow, where one is given);
any other write aborts the load. An operator that computes from resident storage gives its result that storage as an
origin; operators that only look at shape and dtype do not count as reads.

Paper: Section 6.1 (prewarm), Figure A.8   Proofs: L5 inactive_unchanged, L6 overwrite_supplies
Conditions: LC1, LC2, LC4, LC5, LC8, LC11, LC12
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.conditions import (
    BitsPreserved,
    Breach,
    Condition,
    ConsumedInOrder,
    DistinctPlaceholder,
    Elementwise,
    InterceptedWrites,
    NoStateAcrossCalls,
    ReportedAsCopied,
    first_breach,
)
from nemo_dcr.receiver.escapes import MemoryEscapes, leaves_torch
from nemo_dcr.receiver.hook import Operator, operator_of, tensors_in
from nemo_dcr.receiver.paths import Step, StepKind
from nemo_dcr.receiver.provenance import NOTHING, GuardedTensor, Origins, unwrap, wrap
from nemo_dcr.receiver.residents import NativeModel, Residents, storage_key
from nemo_dcr.receiver.shadow import Shadow
from nemo_dcr.receiver.views import CANONICAL, View, view_of

_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
_SHAPE_ONLY_NAMES = frozenset(
    f"aten::{name}" for name in (*_SHAPE_ONLY, "new_empty_strided", "rand_like", "randn_like")
)


class LoadAborted(Exception):
    """Ends a load at the first write that must not happen. Never leaves this package's prewarm."""


@dataclass(slots=True)
class Observation:
    """What happened while one canonical tensor was current."""

    tensor: TensorMeta
    number: int
    """Positive origin number of this yield."""
    steps: list[Step] = field(default_factory=list)
    first_bits: list[Tensor] = field(default_factory=list)
    """With a shadow: flat source bits of each non-constant step into the shadowed storage that does not repeat."""
    later_bits: list[tuple[int, Tensor]] = field(default_factory=list)
    """With a shadow: position among `first_bits` of the view that a repeating step writes, and that step's source."""
    live_views: list[Tensor] = field(default_factory=list)
    """The resident views of the steps of `first_bits`."""
    breach: Breach | None = None

    @property
    def copies(self) -> list[Step]:
        """The steps that move values of the tensor."""
        return [step for step in self.steps if step.kind is not StepKind.CONSTANT]


def convert(destination: Tensor, source: Tensor) -> Tensor:
    """`source` as the copy into `destination` would store it; with the same strides, so that the same kernels run."""
    converted = torch.empty_strided(
        destination.shape, destination.stride(), dtype=destination.dtype, device=destination.device
    )
    return converted.copy_(source.expand(destination.shape))


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One observed loader; use `load` for each call."""

    def __init__(self, model: NativeModel, residents: Residents) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._residents = residents
        self._origins = Origins()
        self._names: list[str] = [""]
        """Canonical name of each origin number."""
        self._current: Observation | None = None
        self._shadow: Shadow | None = None
        self._thread = get_ident()
        self._given = 0
        self._call_start = 0
        self.trespassed = False
        """Another thread used a yielded tensor during the last load (LC2)."""
        self.late: set[str] = set()
        """Names that were copied after a later one had been yielded in the last load (LC11)."""
        self.tied: dict[str, set[str]] = {}
        """Names whose values some load put into one copy, and their partners; of all loads (LC12)."""
        self.leaked: set[str] = set()
        """Names whose values some load took out of torch (LC12)."""
        self.shadow_bytes = 0
        """Largest shadow so far."""

    def load(
        self,
        tensors: Sequence[TensorMeta],
        content: Callable[[TensorMeta], Tensor],
        *,
        shadow: Shadow | None = None,
    ) -> tuple[list[Observation], list[str] | None, str | None]:
        """Make one `load_weights` call over `tensors`.

        Returns the observations in the order of the yields, the loader's report (None when there is none), and the
        text of the exception that ended the call early, if one did.
        """
        seen: list[Observation] = []
        self._shadow, self.trespassed = shadow, False
        self._call_start = len(self._names)
        self.late = set()
        if shadow is not None:
            self.shadow_bytes = max(self.shadow_bytes, shadow.nbytes)
        report: list[str] | None = None
        error: str | None = None
        try:
            escapes = MemoryEscapes(self._residents, self._refuse_array)
            with torch.inference_mode(self._residents.on_inference_mode), torch.no_grad(), escapes, self:
                reported = self._model.load_weights(self._feed(tensors, content, seen))
                report = None if reported is None else [str(name) for name in reported]
        except LoadAborted:
            error = "the load was stopped at a refused write"
        except Exception as raised:
            error = f"the loader raised {type(raised).__name__}: {raised}"
        for observation in seen:
            if self.trespassed and observation.breach is None:
                detail = "the loader uses the tensor in another thread, where copies cannot be intercepted"
                observation.breach = first_breach(ReportedAsCopied(other=detail))
        self._current, self._shadow = None, None
        return seen, report, error

    def _feed(
        self, tensors: Sequence[TensorMeta], content: Callable[[TensorMeta], Tensor], seen: list[Observation]
    ) -> Iterator[tuple[str, Tensor]]:
        for meta in tensors:
            observation = Observation(meta, len(self._names))
            self._names.append(meta.name)
            self._current = observation
            seen.append(observation)
            tensor = content(meta)
            self._given = storage_key(tensor)
            self._origins.set(tensor, frozenset({observation.number}))
            yield meta.name, GuardedTensor(tensor, self._trespass)

    def _refuse_array(self, function: str) -> None:
        raise self._refuse(InterceptedWrites(f"an array from {function}", constant=False))

    def _trespass(self) -> None:
        if get_ident() != self._thread:
            self.trespassed = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator of the loader."""
        kwargs = kwargs or {}
        operator = operator_of(func)
        guarded: list[GuardedTensor] = []
        inner = unwrap(list(args), guarded)
        inner_kwargs = {key: unwrap(value, guarded) for key, value in kwargs.items()}
        if operator.is_view:
            result = func(*inner, **inner_kwargs)
            if func._schema.name == "aten::lift_fresh":
                self._origins.add(result, NOTHING)
            return wrap(result, self._trespass) if guarded else result
        inputs = [*tensors_in(inner), *tensors_in(list(inner_kwargs.values()))]
        if operator.positions or operator.keywords:
            return self._write(func, operator, args, inner, inner_kwargs, inputs)
        origins = NOTHING if func._schema.name in _SHAPE_ONLY_NAMES else self._origins_of(inputs)
        result = func(*self._shadowed(inner), **self._shadowed(inner_kwargs))
        if leaves_torch(result):
            self.leaked.update(self._names[number] for number in origins if number > 0)
        known = {storage_key(tensor) for tensor in inputs}
        for made in tensors_in(result):
            if storage_key(made) not in known:
                self._origins.add(made, origins)
        return wrap(result, self._trespass) if any(number > 0 for number in origins) else result

    def _origins_of(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """Yields are positive numbers, resident storage s is -1 - s."""
        found: set[int] = set()
        for tensor in tensors:
            storage = self._residents.number_of(tensor)
            if storage is not None:
                found.add(-1 - storage)
            else:
                found |= self._origins.get(tensor) or NOTHING
        return frozenset(found)

    def _shadowed(self, value: Any) -> Any:
        if self._shadow is None:
            return value
        if isinstance(value, Tensor):
            return self._shadow.of(value) if self._residents.number_of(value) == self._shadow.storage else value
        if isinstance(value, list | tuple):
            return type(value)([self._shadowed(entry) for entry in value])
        return {key: self._shadowed(entry) for key, entry in value.items()} if isinstance(value, dict) else value

    def _write(
        self,
        func: Any,
        operator: Operator,
        args: Sequence[Any],
        inner: list[Any],
        kwargs: dict[str, Any],
        inputs: Sequence[Tensor],
    ) -> Any:
        written = list(operator.written(inner, kwargs))
        storages = [self._residents.number_of(tensor) for tensor in written]
        if any(storage is not None for storage in storages):
            storage = storages[0]
            if len(written) != 1 or storage is None or not (operator.copies or operator.fills):
                raise self._refuse(InterceptedWrites(operator.name, constant=False))
            if operator.copies:
                self._copy(written[0], inner[1], storage, operator)
            elif written[0].numel() > 0:
                values = inner[1:2]
                self._constant(written[0], values[0] if values else 0, storage, operator)
            return args[0]
        origins = self._origins_of(inputs)
        for tensor in written:
            known = self._origins.get(tensor)
            if known is None:
                raise self._refuse(NoStateAcrossCalls(outside=operator.name))
            if storage_key(tensor) == self._given:
                raise self._refuse(BitsPreserved(edited_by=operator.name))
            self._origins.add(tensor, origins)
        result = func(*self._shadowed(inner), **self._shadowed(kwargs))
        # An operator that writes in place returns what it wrote: hand back the loader's own object.
        return args[0] if args and any(entry is inner[0] for entry in tensors_in(result)) else result

    def _copy(self, destination: Tensor, source: Tensor, storage: int, operator: Operator) -> None:
        target = view_of(destination, storage)
        origins = self._origins_of([source])
        given = sorted(number for number in origins if number > 0)
        observation = self._owner(given)
        if observation is None or (destination.numel() == 0 and not given):
            return
        if not origins:
            self._constant(destination, source, storage, operator)
            return
        repeats = any(step.target == target for step in observation.copies)
        if destination.numel() > 0:
            self._check_reads({-1 - number for number in origins if number < 0}, observation, target, repeats)
        if len(given) > 1:
            raise self._refuse_tie({self._names[number] for number in given}, observation)
        direct = storage_key(source) == self._given and not source.is_conj() and not source.is_neg()
        kind = StepKind.DIRECT if direct else StepKind.DERIVED
        expanded = source.expand(destination.shape)
        if self._shadow is not None and self._shadow.storage == storage:
            bits = integer_view(expanded.resolve_conj().resolve_neg()).flatten().clone()
            if repeats:
                firsts = [s.target for s in observation.copies if s.target.storage == storage and not s.repeats]
                observation.later_bits.append((firsts.index(target), bits))
            else:
                observation.first_bits.append(bits)
                observation.live_views.append(destination)
            self._shadow.of(destination).copy_(self._shadowed(expanded))
        observation.steps.append(Step(kind, target, view_of(expanded, CANONICAL) if direct else None, repeats))

    def _check_reads(self, read: set[int], observation: Observation, target: View, repeats: bool) -> None:
        """A value may be computed from resident storage only in a composed step, and only from its own target."""
        if not read or (repeats and read == {target.storage}):
            return
        foreign = read - {step.target.storage for step in observation.copies}
        if foreign or repeats:
            name = self._residents.names[min(foreign or read - {target.storage})][0]
            raise self._refuse(Elementwise(foreign_read=name))
        raise self._refuse(DistinctPlaceholder(first_from_resident=True))

    def _owner(self, given: Sequence[int]) -> Observation | None:
        """The current observation, once the source is known to belong to it; None for a copy that comes late.

        Late copies do not end the load, so that the loader's own state is whole when its tensors are taken one by one.
        """
        if self._current is None:
            raise LoadAborted
        earlier = [number for number in given if number < self._call_start]
        if earlier:
            raise self._refuse_tie({self._names[number] for number in earlier}, self._current)
        late = [self._names[number] for number in given if number != self._current.number]
        if late and len(given) == 1:
            self.late.update(late)
            self._refuse(ConsumedInOrder(current=self._current.tensor.name, late=late[0]))
            return None
        return self._current

    def _constant(self, destination: Tensor, value: Any, storage: int, operator: Operator) -> None:
        observation = self._current
        if observation is None:
            raise LoadAborted
        values = [value] if isinstance(value, Tensor) else []
        constant = not self._origins_of(values)
        present = False
        if constant:
            filled = torch.empty_strided(
                destination.shape, destination.stride(), dtype=destination.dtype, device=destination.device
            )
            if operator.copies:
                filled.copy_(value.expand(destination.shape))
            else:
                filled.fill_(value)
            present = bool((integer_view(filled) == integer_view(destination)).all())
        wrong = first_breach(InterceptedWrites(operator.name, constant, bits_present=present))
        if wrong is not None and observation.breach is None:
            observation.breach = wrong
        observation.steps.append(Step(StepKind.CONSTANT, view_of(destination, storage), None, repeats=False))

    def _refuse_tie(self, names: set[str], current: Observation) -> LoadAborted:
        """One copy needs several tensors: all of them break the row, not only the one that came last."""
        names = names | {current.tensor.name}
        for name in names:
            self.tied.setdefault(name, set()).update(names - {name})
        return self._refuse(NoStateAcrossCalls(tied_to=names - {current.tensor.name}))

    def _refuse(self, row: Condition) -> LoadAborted:
        """Note the broken row at the current tensor; the caller raises the result to end the load."""
        if self._current is not None and self._current.breach is None:
            self._current.breach = first_breach(row)
        return LoadAborted()
