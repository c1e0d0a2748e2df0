"""Whether the value of one tensor has a part in the load of another, through a number that left torch.

A loader that reads a value into Python (`item()`) may use it for a tensor that comes later, in the same call or in the
next one. Such names are loaded again in front of every computed path, with different values, and the path must get the
same bits each time. Where no value leaves torch, origins tell whose value a copy is, and nothing is loaded again.
Not handled: a tie that shows for other values than the ones that are tried.

Paper: Section 6.1 (prewarm; loader conditions)   Proofs: L7 loader_commutes   Conditions: LC12
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.receiver.observation import Observation
from nemo_dcr.receiver.observe import Observer
from nemo_dcr.receiver.paths import StepKind
from nemo_dcr.receiver.probe import probe_pairs
from nemo_dcr.receiver.residents import Residents
from nemo_dcr.receiver.scratch import Scratch
from nemo_dcr.receiver.shadow import Shadow

_ROUNDS = 2
"""State of the call before may decide, so that each value is loaded twice before the bits are looked at."""


def is_tied(
    observer: Observer,
    residents: Residents,
    scratch: Scratch,
    observation: Observation,
    leaked: Sequence[TensorMeta],
    *,
    grouped: bool,
) -> bool:
    """True when a computed copy of the observed tensor changes with the values of `leaked`."""
    others = [meta for meta in leaked if meta != observation.tensor and meta.numel > 0]
    storages = {step.target.storage for step in observation.steps if step.kind is StepKind.DERIVED}
    if not others or observation.tensor.numel == 0:
        return False
    pairs = max(len(probe_pairs(meta.dtype)) for meta in others)
    for storage in sorted(storages):
        seen: list[list[Tensor]] = []
        for choice in range(2 * min(pairs, 2)):
            words = {meta.name: _word(meta, choice) for meta in others}
            words[observation.tensor.name] = probe_pairs(observation.tensor.dtype)[0][1]
            shadow = Shadow(residents.tensor_of(storage), storage, flipped=False)
            found = _load(observer, scratch, [*others, observation.tensor], words, shadow, grouped=grouped)
            residents.put_back()
            if found is None or found.steps != observation.steps:
                return True
            seen.append([*found.first_bits, *(bits for _, bits in found.later_bits)])
        if any(bool((one != other).any()) for bits in seen[1:] for one, other in zip(seen[0], bits, strict=True)):
            return True
    return False


def _word(meta: TensorMeta, choice: int) -> int:
    pairs = probe_pairs(meta.dtype)
    return pairs[min(choice // 2, len(pairs) - 1)][choice % 2]


def _load(
    observer: Observer,
    scratch: Scratch,
    tensors: Sequence[TensorMeta],
    words: dict[str, int],
    shadow: Shadow,
    *,
    grouped: bool,
) -> Observation | None:
    """The last tensor as it was loaded after the others; None when it was not, or broke a condition."""

    def content(meta: TensorMeta) -> Tensor:
        scratch.clear()
        scratch.fill(meta).fill(words[meta.name])
        return scratch.tensor(meta)

    last: Observation | None = None
    calls: Collection[Sequence[TensorMeta]] = [tensors] if grouped else [[meta] for meta in tensors]
    for _ in range(_ROUNDS):
        for call in calls:
            seen, _, error = observer.load(call, content, shadow=shadow)
            scratch.clear()
            last = seen[-1] if seen and error is None else None
    return None if last is None or last.tensor != tensors[-1] or last.breach is not None else last
