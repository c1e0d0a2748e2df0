"""What one intercepted copy does to resident storage: the dense-scratch placer of the paper.

XOR: resident words ^= source words; inactive positions hold zero. Overwrite: the source is converted exactly as the
copy would convert it, and only active words are stored. Active positions are read off the scratch at the first copy
into a view, as the words that differ from the placeholder. Where the source was computed, or no placeholder is free,
a first pass with one placeholder only records the source words, and active are those that a second pass with another
placeholder repeats. Later copies into the same view reuse the mask. An item that covers its tensor needs no mask.
Every write is first compared with the step that prewarm saw; a difference fails the attempt before it executes.

Paper: Section 6.1 (XOR path, overwrite path); Figures A.10, A.13, A.14
Proofs: L4 xor_reconstructs, L5 inactive_unchanged, L6 overwrite_supplies
Conditions: LC1, LC2, LC4, LC5, LC8, LC11
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, NoReturn

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.codec.records import Item
from nemo_dcr.errors import ConditionViolated, PostApplyMismatch
from nemo_dcr.receiver.conditions import (
    BitsPreserved,
    Condition,
    ConsumedInOrder,
    DistinctPlaceholder,
    Elementwise,
    InterceptedWrites,
    ReportedAsCopied,
)
from nemo_dcr.receiver.hook import Operator
from nemo_dcr.receiver.observation import convert
from nemo_dcr.receiver.paths import LoaderPath, LoaderTable, Step, StepKind
from nemo_dcr.receiver.residents import storage_key
from nemo_dcr.receiver.scratch import signed
from nemo_dcr.receiver.views import CANONICAL, View, is_view, view_of


class Pass(Enum):
    """How the copies of the current item are carried out."""

    XOR = auto()
    WHOLE = auto()
    """Overwrite of every element: plain copies."""
    PLACEHOLDER = auto()
    """Overwrite; active words differ from the placeholder."""
    RECORD = auto()
    """First of two passes: nothing is written."""
    REPLAY = auto()
    """Second of two passes: active words are the ones that the first pass had as well."""
    INDEXED = auto()
    """Either encoding, entry by entry: see place_indexed."""


class DenseScratchPlacer:
    """Carries out the copies of one item after another."""

    def __init__(self, table: LoaderTable, *, post_apply_check: bool) -> None:
        self._table = table
        self._post_apply_check = post_apply_check
        self._scratch = table.scratch.key
        self._path: LoaderPath | None = None
        self._pass = Pass.XOR
        self._placeholder = 0
        self._next = 0
        self._masks: dict[View, Tensor] = {}
        self._recorded: dict[tuple[str, int, int], Tensor] = {}
        self._occurrence = 0
        self.failure: ConditionViolated | PostApplyMismatch | None = None
        """The first failure; it stands even when the loader swallows the exception."""
        self.copies = 0
        self.checked_elements = 0
        self.check_seconds = 0.0

    def begin(self, item: Item, path: LoaderPath, how: Pass, placeholder: int, occurrence: int) -> None:
        """Start an item; `occurrence` tells items of one name in one call apart."""
        self._path, self._pass, self._occurrence = path, how, occurrence
        self._placeholder = signed(placeholder, item.tensor.width)
        self._next = 0
        self._masks = {}

    def finish(self) -> None:
        """End the item: every step of its path has been seen.

        Raises: ConditionViolated (LC2) when copies are missing.
        """
        path, self._path = self._path, None
        if path is not None and self._next != len(path.steps):
            detail = f"{self._next} of {len(path.steps)} writes came before the next tensor was taken"
            self._fail(ReportedAsCopied(other=detail), path.tensor.name)

    def place(self, name: str, destination: Tensor, source: Tensor) -> None:
        """See `Placer`."""
        if destination.numel() == 0 and not self._comes_next(destination):
            return
        step, number = self._expect(name, destination)
        expanded = source if source.shape == destination.shape else source.expand(destination.shape)
        if step.kind is StepKind.CONSTANT:
            self._compare_constant(name, "aten.copy_", destination, convert(destination, expanded))
            return
        given = storage_key(source) == self._scratch and not source.is_conj() and not source.is_neg()
        if given != (step.kind is StepKind.DIRECT) or (given and not is_view(expanded, CANONICAL, step.source)):
            self._fail(DistinctPlaceholder(scratch_ok=False), name)
        self.copies += self._pass is not Pass.RECORD
        self._carry_out(name, step, number, destination, expanded)

    def _carry_out(self, name: str, step: Step, number: int, destination: Tensor, expanded: Tensor) -> None:
        """The copy is the one that prewarm saw."""
        if self._pass is Pass.XOR:
            self._xor(name, destination, expanded)
        elif self._pass is Pass.RECORD:
            if not step.repeats:
                self._recorded[name, self._occurrence, number] = _source_words(expanded).clone()
        else:
            self._overwrite(name, step, number, destination, expanded)

    def other_write(self, name: str, operator: Operator, destination: Tensor, arguments: Sequence[Any]) -> None:
        """See `Placer`."""
        if operator.fills and destination.numel() == 0:
            return
        if not operator.fills:
            self._fail(InterceptedWrites(operator.name, constant=False), name)
        step, _ = self._expect(name, destination)
        if step.kind is not StepKind.CONSTANT:
            self._fail(InterceptedWrites(operator.name, constant=False), name)
        value = arguments[1] if len(arguments) > 1 else 0
        filled = torch.empty_strided(
            destination.shape, destination.stride(), dtype=destination.dtype, device=destination.device
        )
        filled.fill_(value)
        self._compare_constant(name, operator.name, destination, filled)

    def scratch_write(self, name: str, operator: Operator) -> None:
        """See `Placer`."""
        self._fail(BitsPreserved(edited_by=operator.name), name)

    def _comes_next(self, destination: Tensor) -> bool:
        steps = () if self._path is None else self._path.steps
        storage = self._table.residents.number_of(destination)
        return self._next < len(steps) and steps[self._next].target == view_of(destination, storage or 0)

    def _expect(self, name: str, destination: Tensor) -> tuple[Step, int]:
        """The step that has to come now, if it writes this view."""
        if self.failure is not None:
            raise self.failure
        number = self._table.residents.number_of(destination)
        path = self._path
        if path is None or number is None:
            self._fail(ReportedAsCopied(other="a write came when no tensor was current"), name)
        steps = path.steps
        if self._next < len(steps) and is_view(destination, number, steps[self._next].target):
            self._next += 1
            return steps[self._next - 1], self._next - 1
        target = view_of(destination, number)
        late = next((other for other, entry in self._table.paths.items() if _writes(entry, target)), "")
        resident = self._table.residents.names[number][0]
        row: Condition = ReportedAsCopied(other=f"write {self._next + 1} goes to {resident!r}, unlike at prewarm")
        if late and late != name:
            row = ConsumedInOrder(current=name, late=late)
        return self._fail(row, name)

    def _compare_constant(self, name: str, operator: str, destination: Tensor, value: Tensor) -> None:
        present = bool((integer_view(value) == integer_view(destination)).all())
        if not present:
            self._fail(InterceptedWrites(operator, constant=True, bits_present=False), name)

    def _xor(self, name: str, destination: Tensor, source: Tensor) -> None:
        resident, masks = integer_view(destination), integer_view(source).to(destination.device)
        if not self._post_apply_check:
            resident.bitwise_xor_(masks)
            return
        with self._timed_check():
            before = resident.clone()
        resident.bitwise_xor_(masks)
        with self._timed_check():
            self._check(name, resident, before.bitwise_xor_(masks))

    def _overwrite(self, name: str, step: Step, number: int, destination: Tensor, source: Tensor) -> None:
        mask = None if self._pass is Pass.WHOLE else self._mask(name, step, number, source)
        plain = destination.dtype == source.dtype and destination.device == source.device
        converted = source.resolve_conj().resolve_neg() if plain else convert(destination, source)
        resident, words = integer_view(destination), integer_view(converted)
        if mask is not None:
            mask = mask.view(destination.shape).to(destination.device)
            still = self._path.constant_at.get(number) if self._path is not None else None
            if still is not None:
                still = still.view(destination.shape)
                # An output that depended on nothing at prewarm holds its constant; a value there breaks LC4.
                if not bool((words[still] == resident[still]).all()):
                    self._fail(Elementwise(other="an output that was constant at prewarm has another value"), name)
        expected = None
        if self._post_apply_check:
            with self._timed_check():
                expected = words.clone() if mask is None else torch.where(mask, words, resident)
        if mask is None:
            resident.copy_(words)
        else:
            torch.where(mask, words, resident, out=resident)
        if expected is not None:
            with self._timed_check():
                self._check(name, resident, expected)

    def _mask(self, name: str, step: Step, number: int, source: Tensor) -> Tensor:
        if step.repeats:
            return self._masks[step.target]
        words = _source_words(source)
        if self._pass is Pass.PLACEHOLDER:
            mask = words != self._placeholder
        else:
            mask = words == self._recorded.pop((name, self._occurrence, number))
        self._masks[step.target] = mask
        return mask

    @contextmanager
    def _timed_check(self) -> Iterator[None]:
        """Checks are no part of refit latency (Appendix C), so their time is kept apart."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.check_seconds += time.perf_counter() - begin

    def _check(self, name: str, resident: Tensor, expected: Tensor) -> None:
        differs = resident != expected
        self.checked_elements += resident.numel()
        if bool(differs.any()):
            self.failure = PostApplyMismatch(name, int(differs.sum()))
            raise self.failure

    def _fail(self, row: Condition, name: str) -> NoReturn:
        detail = row.check() or ""
        failure = ConditionViolated(row.code, name, detail)
        if self.failure is None:
            self.failure = failure
        raise self.failure


def _source_words(source: Tensor) -> Tensor:
    return integer_view(source.resolve_conj().resolve_neg()).flatten()


def _writes(path: LoaderPath, target: View) -> bool:
    return any(step.target == target for step in path.steps)
