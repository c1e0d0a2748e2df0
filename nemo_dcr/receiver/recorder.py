"""The writes of an observed loader as steps: which ones a path may have, and whose value each one stores.

A copy belongs to the tensor that was yielded last, and its source to that tensor alone. A value may be computed from
resident storage only in a second copy into a view that was filled before. A constant has to be resident already. The
first write that breaks a row of Table A.2 is noted at the current tensor and ends the load; late copies and constants
do not end it, so that the loader's own state is whole when its tensors are taken one by one.

Paper: Section 6.1 (prewarm), Figure A.8   Proofs: L5 inactive_unchanged, L6 overwrite_supplies
Conditions: LC1, LC4, LC8, LC11, LC12
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.conditions import (
    Condition,
    ConsumedInOrder,
    DistinctPlaceholder,
    Elementwise,
    InterceptedWrites,
    NoStateAcrossCalls,
    first_breach,
)
from nemo_dcr.receiver.hook import Operator
from nemo_dcr.receiver.observation import LoadAborted, Observation
from nemo_dcr.receiver.paths import Step, StepKind
from nemo_dcr.receiver.provenance import Origins
from nemo_dcr.receiver.residents import Residents, storage_key
from nemo_dcr.receiver.shadow import Shadow
from nemo_dcr.receiver.views import CANONICAL, View, view_of


class StepRecorder:
    """Records the writes of one loader over all its calls."""

    def __init__(self, residents: Residents, origins: Origins) -> None:
        self._residents = residents
        self._origins = origins
        self._names: list[str] = [""]
        """Canonical name of each origin number."""
        self._call_start = 0
        self._current: Observation | None = None
        self.shadow: Shadow | None = None
        """Takes the copies into one storage during the current call."""
        self.given = 0
        """Storage identity of the tensor that was yielded last."""
        self.given_numel = 0
        """Its number of elements."""
        self.late: set[str] = set()
        """Names that were copied after a later one had been yielded in the last call (LC11)."""
        self.tied: dict[str, set[str]] = {}
        """Names whose values some call put into one copy, and their partners; of all calls (LC12)."""

    def begin_call(self, shadow: Shadow | None) -> None:
        """Forget what belongs to the call before."""
        self.shadow, self._current = shadow, None
        self._call_start = len(self._names)
        self.late = set()

    def end_call(self) -> None:
        """No tensor is current any more."""
        self.shadow, self._current = None, None

    def begin_tensor(self, meta: TensorMeta) -> Observation:
        """Make `meta` the current tensor."""
        self._current = Observation(meta, len(self._names))
        self._names.append(meta.name)
        return self._current

    def give(self, tensor: Tensor, number: int) -> None:
        """The memory that the loader gets for the yield `number`."""
        self.given, self.given_numel = storage_key(tensor), tensor.numel()
        self._origins.set(tensor, frozenset({number}))

    @property
    def untouched(self) -> bool:
        """Nothing was copied from the current tensor yet."""
        return self._current is not None and not self._current.copies

    def erase(self, tensor: Tensor) -> None:
        """The given tensor is a constant from now on."""
        self._origins.set(tensor, frozenset())
        if self._current is not None:
            self._current.erased = True

    def names_of(self, origins: frozenset[int]) -> set[str]:
        """Canonical names among the origins of a value."""
        return {self._names[number] for number in origins if number > 0}

    def refuse(self, row: Condition) -> LoadAborted:
        """Note the broken row at the current tensor; the caller raises the result to end the load."""
        if self._current is not None and self._current.breach is None:
            self._current.breach = first_breach(row)
        return LoadAborted()

    def copy(self, destination: Tensor, source: Tensor, storage: int, operator: Operator) -> None:
        """Record a copy into resident storage number `storage`; only a shadow is written.

        Raises: LoadAborted when the copy breaks a condition.
        """
        target = view_of(destination, storage)
        origins = self._origins.of([source])
        given = sorted(number for number in origins if number > 0)
        observation = self._owner(given)
        if observation is None or (destination.numel() == 0 and not given):
            return
        if not origins:
            self.constant(destination, source, storage, operator)
            return
        repeats = any(step.target == target for step in observation.copies)
        if destination.numel() > 0:
            self._check_reads({-1 - number for number in origins if number < 0}, observation, target, repeats)
        if len(given) > 1:
            raise self._refuse_tie({self._names[number] for number in given}, observation)
        direct = storage_key(source) == self.given and not source.is_conj() and not source.is_neg()
        kind = StepKind.DIRECT if direct else StepKind.DERIVED
        expanded = source.expand(destination.shape)
        if self.shadow is not None and self.shadow.storage == storage:
            self._copy_to_shadow(self.shadow, observation, destination, expanded, target if repeats else None)
        observation.steps.append(Step(kind, target, view_of(expanded, CANONICAL) if direct else None, repeats))

    def constant(self, destination: Tensor, value: Any, storage: int, operator: Operator) -> None:
        """Record a write of `value`, which may be a number: fine when it depends on nothing and is resident already.

        Raises: LoadAborted when no tensor is current.
        """
        observation = self._current
        if observation is None:
            raise LoadAborted
        constant = not self._origins.of([value] if isinstance(value, Tensor) else [])
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

    @staticmethod
    def _copy_to_shadow(
        shadow: Shadow, observation: Observation, destination: Tensor, source: Tensor, repeated: View | None
    ) -> None:
        bits = integer_view(source.resolve_conj().resolve_neg()).flatten().clone()
        if repeated is not None:
            firsts = [s.target for s in observation.copies if s.target.storage == shadow.storage and not s.repeats]
            observation.later_bits.append((firsts.index(repeated), bits))
        else:
            observation.first_bits.append(bits)
            observation.live_views.append(destination)
        shadow.of(destination).copy_(shadow.redirect(source))

    def _check_reads(self, read: set[int], observation: Observation, target: View, repeats: bool) -> None:
        """A value may be computed from resident storage only in a composed step, and only from its own target."""
        if not read or (repeats and read == {target.storage}):
            return
        foreign = read - {step.target.storage for step in observation.copies}
        if foreign or repeats:
            name = self._residents.names[min(foreign or read - {target.storage})][0]
            raise self.refuse(Elementwise(foreign_read=name))
        raise self.refuse(DistinctPlaceholder(first_from_resident=True))

    def _owner(self, given: Sequence[int]) -> Observation | None:
        """The current observation, once the source is known to belong to it; None for a copy that comes late."""
        if self._current is None:
            raise LoadAborted
        earlier = [number for number in given if number < self._call_start]
        if earlier:
            raise self._refuse_tie({self._names[number] for number in earlier}, self._current)
        late = [self._names[number] for number in given if number != self._current.number]
        if late and len(given) == 1:
            self.late.update(late)
            self.refuse(ConsumedInOrder(current=self._current.tensor.name, late=late[0]))
            return None
        return self._current

    def _refuse_tie(self, names: set[str], current: Observation) -> LoadAborted:
        """One copy needs several tensors: all of them break the row, not only the one that came last."""
        names = names | {current.tensor.name}
        for name in names:
            self.tied.setdefault(name, set()).update(names - {name})
        return self.refuse(NoStateAcrossCalls(tied_to=names - {current.tensor.name}))
