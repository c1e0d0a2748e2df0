"""Running a native loader without letting it touch resident storage.

The observer runs the loader over canonical tensors and sees every operator. Copies and fills of resident storage do
not execute (into a shadow, where one is given): the recorder writes them down as steps. Any other write to it, and a
write to memory that outlives the call, ends the load. An operator's result has the origins of its inputs; operators
that only look at shape and dtype do not count as reads.
Not handled: writes that torch does not dispatch on this thread (see `live_storage`).

Paper: Section 6.1 (prewarm), Figure A.8   Proofs: L5 inactive_unchanged   Conditions: LC1, LC2, LC5, LC12
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.conditions import (
    BitsPreserved,
    InterceptedWrites,
    NoStateAcrossCalls,
    ReportedAsCopied,
    first_breach,
)
from nemo_dcr.receiver.escapes import MemoryEscapes, leaves_torch
from nemo_dcr.receiver.hook import Operator, operator_of, tensors_in
from nemo_dcr.receiver.observation import LoadAborted, Observation
from nemo_dcr.receiver.provenance import NOTHING, GuardedTensor, Origins, unwrap, wrap
from nemo_dcr.receiver.recorder import StepRecorder
from nemo_dcr.receiver.residents import NativeModel, Residents, storage_key
from nemo_dcr.receiver.shadow import Shadow

_SHAPE_ONLY = ("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full")
SHAPE_ONLY_NAMES = frozenset(f"aten::{name}" for name in (*_SHAPE_ONLY, "new_empty_strided", "rand_like", "randn_like"))


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One observed loader; use `load` for each call."""

    def __init__(self, model: NativeModel, residents: Residents) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._residents = residents
        self._origins = Origins(residents)
        self._recorder = StepRecorder(residents, self._origins)
        self._thread = get_ident()
        self.trespassed = False
        """Another thread used a yielded tensor during the last load (LC2)."""
        self.leaked: set[str] = set()
        """Names whose values some load took out of torch (LC12)."""
        self.shadow_bytes = 0
        """Largest shadow so far."""

    @property
    def late(self) -> set[str]:
        """Names that were copied after a later one had been yielded in the last load (LC11)."""
        return self._recorder.late

    @property
    def tied(self) -> dict[str, set[str]]:
        """Names whose values some load put into one copy, and their partners; of all loads (LC12)."""
        return self._recorder.tied

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
        self.trespassed = False
        self._recorder.begin_call(shadow)
        if shadow is not None:
            self.shadow_bytes = max(self.shadow_bytes, shadow.nbytes)
        report: list[str] | None = None
        error: str | None = None
        try:
            escapes = MemoryEscapes(self._residents, self.escape)
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
        self._recorder.end_call()
        return seen, report, error

    def _feed(
        self, tensors: Sequence[TensorMeta], content: Callable[[TensorMeta], Tensor], seen: list[Observation]
    ) -> Iterator[tuple[str, Tensor]]:
        for meta in tensors:
            observation = self._recorder.begin_tensor(meta)
            seen.append(observation)
            tensor = content(meta)
            self._recorder.give(tensor, observation.number)
            yield meta.name, GuardedTensor(tensor, self)

    def trespass(self) -> None:
        """See `Guard`."""
        if get_ident() != self._thread:
            self.trespassed = True

    def escape(self, function: str) -> LoadAborted:
        """See `Guard`: memory is about to be handed out by that function of a tensor."""
        self.trespass()
        return self._recorder.refuse(InterceptedWrites(escape=function))

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
            return wrap(result, self) if guarded else result
        inputs = [*tensors_in(inner), *tensors_in(list(inner_kwargs.values()))]
        if operator.positions or operator.keywords:
            return self._write(func, operator, args, inner, inner_kwargs, inputs)
        origins = NOTHING if func._schema.name in SHAPE_ONLY_NAMES else self._origins.of(inputs)
        result = self._call(func, inner, inner_kwargs)
        if leaves_torch(result):
            self.leaked |= self._recorder.names_of(origins)
        known = {storage_key(tensor) for tensor in inputs}
        for made in tensors_in(result):
            if storage_key(made) not in known:
                self._origins.add(made, origins)
        return wrap(result, self) if any(number > 0 for number in origins) else result

    def _erases(self, operator: Operator, tensor: Tensor, args: Sequence[Any]) -> bool:
        """A fill of the whole given tensor with a number, before anything was copied from it."""
        whole = tensor.is_contiguous() and tensor.numel() == self._recorder.given_numel
        return (
            self._recorder.untouched
            and operator.fills
            and whole
            and not any(isinstance(value, Tensor) for value in args[1:])
        )

    def _call(self, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The operator itself, over the shadow where it reads or writes the shadowed storage."""
        shadow = self._recorder.shadow
        return func(*args, **kwargs) if shadow is None else func(*shadow.redirect(args), **shadow.redirect(kwargs))

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
                raise self._recorder.refuse(InterceptedWrites(operator.name, constant=False))
            if operator.copies:
                self._recorder.copy(written[0], inner[1], storage, operator)
            elif written[0].numel() > 0:
                values = inner[1:2]
                self._recorder.constant(written[0], values[0] if values else 0, storage, operator)
            return args[0]
        origins = self._origins.of(inputs)
        for tensor in written:
            if self._origins.get(tensor) is None:
                raise self._recorder.refuse(NoStateAcrossCalls(outside=operator.name))
            if storage_key(tensor) == self._recorder.given:
                if not self._erases(operator, tensor, inner):
                    raise self._recorder.refuse(BitsPreserved(edited_by=operator.name))
                # Nothing of the given tensor is left: what is copied from it now is a constant.
                self._recorder.erase(tensor)
                continue
            self._origins.add(tensor, origins)
        result = self._call(func, inner, kwargs)
        # An operator that writes in place returns what it wrote: hand back the loader's own object.
        return args[0] if args and any(entry is inner[0] for entry in tensors_in(result)) else result
