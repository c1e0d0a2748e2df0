"""Probing one derived or composed loader path on a shadow.

A path is derived when the value at a copy was computed (a cast into a new tensor, a contiguous transpose,
arithmetic), and composed when a second copy into the same view follows. Such a path is supported when its outputs are
functions of one canonical element each. The probe loads patterns of two words q1, q2 that the path maps to different
bits at every output: whole tensors of each, and for every bit of the element number the pattern of that bit and its
complement. An output of one element shows q2's bits in exactly one pattern of every such pair; an output of two
elements does not. The first copy's source, the source of every later copy into the view and the final bits must agree
on it, so that the mask of the first serves all of them.
Not handled: more than 2**20 elements are told apart by 20 bits of a mixed number, so a dependence between two given
elements is missed with probability 2**-20; a dependence that no pattern of q1 and q2 shows is missed.

Paper: Section 6.1 (prewarm; loader conditions); Figure A.10   Proofs: L5 inactive_unchanged   Conditions: LC4, LC8
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.bits.tensors import copied_words, integer_view, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.conditions import Breach, DistinctPlaceholder, Elementwise, InterceptedWrites, first_breach
from nemo_dcr.receiver.observation import Observation
from nemo_dcr.receiver.observe import Observer
from nemo_dcr.receiver.paths import Step, StepKind
from nemo_dcr.receiver.residents import Residents
from nemo_dcr.receiver.scratch import Scratch
from nemo_dcr.receiver.shadow import Shadow

_PROBE_BITS = 20
_BLOCK = 1 << 20
_VALUE_PAIRS = ((1, 2), (0, 1), (-1, 1), (0.25, 3), (-2, -1))
_BYTE_PAIRS = ((0x01, 0x02), (0x00, 0xFF))


@cache
def probe_pairs(dtype: str) -> tuple[tuple[int, int], ...]:
    """Pairs of words to try as (q1, q2): small numbers of the dtype, then patterns that differ in every byte."""
    kind = unsigned(dtype)
    pairs: list[tuple[int, int]] = []
    for values in _VALUE_PAIRS:
        try:
            low, high = copied_words(torch.tensor(values).to(torch_dtype(dtype))).tolist()
        except (NotImplementedError, RuntimeError):
            continue  # a dtype without conversion kernels: the byte patterns remain
        pairs.append((low, high))
    for values in _BYTE_PAIRS:
        low, high = (int.from_bytes(bytes([value]) * kind.itemsize, "little") for value in values)
        pairs.append((low, high))
    if dtype == "BOOL":
        pairs = [(0, 1)]
    return tuple(dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]))


@dataclass(slots=True)
class Probed:
    """What a probe found."""

    breach: Breach | None = None
    placeholders: tuple[int, int] | None = None
    outputs: int = 0
    """Outputs that depend on the canonical tensor."""
    constant_at: dict[int, Tensor] = field(default_factory=dict)
    """By step number: flat mask of outputs that depend on nothing."""


class _Broken(Exception):
    def __init__(self, breach: Breach | None) -> None:
        super().__init__()
        self.breach = breach


Bits = list[Tensor]


class PathProbe:
    """Probes the paths of one model; the scratch is used for every pattern."""

    def __init__(self, observer: Observer, residents: Residents, scratch: Scratch) -> None:
        self._observer = observer
        self._residents = residents
        self._scratch = scratch

    @staticmethod
    def is_needed(tensor: TensorMeta, steps: Sequence[Step]) -> bool:
        """True when the geometry of the copies alone does not prove the path elementwise."""
        return any(_unproven(step, tensor) for step in steps)

    def run(self, observation: Observation) -> Probed:
        """Probe every target storage that an unproven step of the path writes."""
        meta, steps = observation.tensor, observation.steps
        result = Probed()
        if meta.numel == 0:
            return result
        pairs = list(probe_pairs(meta.dtype))
        try:
            for storage in sorted({step.target.storage for step in steps if _unproven(step, meta)}):
                pairs = self._probe_storage(observation, storage, pairs, result)
        except _Broken as broken:
            result.breach = broken.breach
        result.placeholders = pairs[0] if pairs else None
        return result

    def _probe_storage(
        self, observation: Observation, storage: int, pairs: list[tuple[int, int]], result: Probed
    ) -> list[tuple[int, int]]:
        """Probe one storage; returns the pair that separates all its outputs, alone in a list."""
        tried: list[tuple[tuple[int, int], Bits, Bits]] = []
        for low, high in pairs:
            low_first, low_final = self._load(observation, storage, _uniform(low))
            high_first, high_final = self._load(observation, storage, _uniform(high))
            tried.append(((low, high), _differ(low_first, high_first), _differ(low_final, high_final)))
            if _all(tried[-1][1]) and _all(tried[-1][2]):
                break
        # What no pair changes is taken as constant, and has to be resident already.
        constant = [~torch.stack(parts).any(0) for parts in zip(*(final for _, _, final in tried), strict=True)]
        for pair, first, final in tried:
            if _all([a | c for a, c in zip(first, constant, strict=True)]) and _all(
                [a ^ c for a, c in zip(final, constant, strict=True)]
            ):
                self._probe_elements(observation, storage, pair, constant)
                self._note_constants(observation, storage, constant, result)
                return [pair]
        raise _Broken(first_breach(DistinctPlaceholder(separable=False)))

    def _probe_elements(self, observation: Observation, storage: int, pair: tuple[int, int], constant: Bits) -> None:
        low, high = pair
        low_first, low_final = self._load(observation, storage, _uniform(low))
        low_later = self._later
        again = self._load(observation, storage, _uniform(low), flipped=True)[1]
        if not _all([~part for part in _differ(low_final, again)]):
            detail = "two loads of one tensor over different resident bits differ"
            raise _Broken(first_breach(Elementwise(other=detail)))
        del again
        for live, bits, still in zip(self._live, low_final, constant, strict=True):
            if not bool((integer_view(live).flatten()[still] == bits[still]).all()):
                row = InterceptedWrites("aten.copy_ (of padding)", constant=True, bits_present=False)
                raise _Broken(first_breach(row))
        high_first, high_final = self._load(observation, storage, _uniform(high))
        high_later = self._later
        for bit in range(min(_PROBE_BITS, (observation.tensor.numel - 1).bit_length())):
            in_pattern: Bits = []
            for inverted in (False, True):
                first, final = self._load(observation, storage, _bit_pattern(low, high, bit, inverted))
                shows_high = [~part for part in _differ(final, high_final)]
                shows_low = [~part for part in _differ(final, low_final)]
                masked_high = [~part for part in _differ(first, high_first)]
                masked_low = [~part for part in _differ(first, low_first)]
                for number, still in enumerate(constant):
                    one = shows_high[number] ^ shows_low[number]
                    same = (shows_high[number] == masked_high[number]) & (shows_low[number] == masked_low[number])
                    other = in_pattern[number] ^ shows_high[number] if inverted else one
                    if not bool(torch.where(still, shows_low[number], one & same & other).all()):
                        raise _Broken(first_breach(Elementwise(independent=False)))
                for (view, bits), (_, all_low), (_, all_high) in zip(self._later, low_later, high_later, strict=True):
                    # The final bits alone would not tell a step that moves elements from a later one that undoes it.
                    agrees = ((bits == all_high) == shows_high[view]) & ((bits == all_low) == shows_low[view])
                    if not bool(agrees.all()):
                        raise _Broken(first_breach(Elementwise(independent=False)))
                in_pattern = shows_high

    @staticmethod
    def _note_constants(observation: Observation, storage: int, constant: Bits, result: Probed) -> None:
        steps = observation.steps
        firsts = [
            number
            for number, step in enumerate(steps)
            if step.target.storage == storage and step.kind is not StepKind.CONSTANT and not step.repeats
        ]
        for number, still in zip(firsts, constant, strict=True):
            result.outputs += int((~still).sum())
            if bool(still.any()):
                if sum(step.target == steps[number].target for step in steps) > 1:
                    raise _Broken(first_breach(DistinctPlaceholder(separable=False)))
                result.constant_at[number] = still

    def _load(
        self, observation: Observation, storage: int, fill: Callable[[Words], None], *, flipped: bool = False
    ) -> tuple[Bits, Bits]:
        """Load a pattern into the shadow: the source bits at the first copy into each view, and the final bits."""
        meta = observation.tensor

        def content(tensor: TensorMeta) -> Tensor:
            fill(self._scratch.fill(tensor))
            return self._scratch.tensor(tensor)

        shadow = Shadow(self._residents.tensor_of(storage), storage, flipped=flipped)
        seen, _, error = self._observer.load([meta], content, shadow=shadow)
        self._scratch.clear()
        if error is not None or seen[0].breach is not None or seen[0].steps != observation.steps:
            raise _Broken((seen[0].breach if seen else None) or first_breach(Elementwise(deterministic=False)))
        self._live, self._later = seen[0].live_views, seen[0].later_bits
        return seen[0].first_bits, [shadow.bits(view) for view in seen[0].live_views]


def _unproven(step: Step, tensor: TensorMeta) -> bool:
    if step.kind is StepKind.CONSTANT:
        return False
    return (
        step.kind is StepKind.DERIVED or step.repeats or (step.source is not None and step.source.width != tensor.width)
    )


def _differ(left: Bits, right: Bits) -> Bits:
    return [one != other for one, other in zip(left, right, strict=True)]


def _all(masks: Bits) -> bool:
    return all(bool(mask.all()) for mask in masks)


def _uniform(word: int) -> Callable[[Words], None]:
    return lambda words: words.fill(word)


def _bit_pattern(low: int, high: int, bit: int, inverted: bool) -> Callable[[Words], None]:
    """`high` where bit `bit` of the element's number is set (clear, if inverted), `low` elsewhere."""

    def fill(words: Words) -> None:
        for start, numbers in _numbers(len(words)):
            is_set = ((numbers >> np.uint64(bit)) & np.uint64(1)) != np.uint64(inverted)
            words[start : start + len(numbers)] = np.where(is_set, words.dtype.type(high), words.dtype.type(low))

    return fill


def _numbers(count: int) -> Iterator[tuple[int, Words]]:
    """Element numbers in blocks; mixed down to 20 bits where they are longer."""
    for start in range(0, count, _BLOCK):
        numbers = np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
        if count > 1 << _PROBE_BITS:
            numbers = (numbers * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _PROBE_BITS)
        yield start, numbers
