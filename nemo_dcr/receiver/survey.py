"""The survey of one rank: what its native loader does with every canonical tensor, and which paths can be exact.

The loader runs over the whole tensor table under an observer, in one call where it takes each tensor before the next,
else in one call for each tensor. It runs twice, in both orders and with different contents, and has to make the same
writes. Copies from views of the given tensor are proved by geometry; derived and composed ones are probed on a shadow.
Then overlaps are looked for, within a path and across all paths, and tensors that copy others.
Not handled: writes that no operator shows (see prewarm).

Paper: Section 6.1 (prewarm), Figure A.8; Table A.2   Proofs: L7 loader_commutes   Conditions: LC1-LC12
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.bits.tensors import tensor_from_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import UnsupportedDtype
from nemo_dcr.receiver.attributes import PinnedAttributes
from nemo_dcr.receiver.conditions import (
    Breach,
    Elementwise,
    InterceptedWrites,
    NoStateAcrossCalls,
    NothingDerived,
    OverlapAgrees,
    ReportedAsCopied,
    StableTargets,
    first_breach,
)
from nemo_dcr.receiver.index_map import mapped_elements
from nemo_dcr.receiver.live_storage import LiveStorage
from nemo_dcr.receiver.observation import Observation
from nemo_dcr.receiver.observe import Observer
from nemo_dcr.receiver.paths import LoaderPath, LoaderTable, StepKind
from nemo_dcr.receiver.probe import PathProbe, Probed, probe_pairs
from nemo_dcr.receiver.rearranged import rearranged_copies
from nemo_dcr.receiver.report import report_row
from nemo_dcr.receiver.residents import NativeModel, Residents
from nemo_dcr.receiver.scratch import Scratch
from nemo_dcr.receiver.ties import is_tied
from nemo_dcr.receiver.views import CANONICAL, View, covered_bytes, in_bytes, overlapping

Content = Callable[[TensorMeta], Tensor]


class Survey:
    """One prewarm of one rank."""

    def __init__(
        self, model: NativeModel, residents: Residents, attributes: PinnedAttributes, live: LiveStorage
    ) -> None:
        self._residents = residents
        self._attributes = attributes
        self._live = live
        self._observer = Observer(model, residents)
        self._grouped = True
        self._scratch = Scratch(0)
        self._breaches: dict[str, Breach] = {}

    def table(self, tensors: Sequence[TensorMeta]) -> LoaderTable:
        """Run the loader over the tensor table; a name that breaks a condition is UNSUPPORTED in the result."""
        known = [meta for meta in tensors if self._is_known(meta)]
        first = self._observe(known, _lazy_zeros)
        self._scratch = Scratch(max((meta.nbytes for meta in known), default=0))
        self._compare_second_load(first)
        probed = self._probe(first)
        self._find_ties(first)
        self._find_overlaps(first)
        written = self._find_rearranged(first)
        paths = {meta.name: self._path(meta, first.get(meta.name), probed.get(meta.name)) for meta in tensors}
        unwritten = [name for name, entry in self._residents.tensors.items() if entry.storage not in written]
        table = LoaderTable(paths, self._residents, grouped=self._grouped, unwritten=tuple(unwritten))
        table.shadow_bytes = self._observer.shadow_bytes
        return table

    def _is_known(self, meta: TensorMeta) -> bool:
        try:
            torch_dtype(meta.dtype)
        except UnsupportedDtype as error:
            self._breaches[meta.name] = Breach("LC5", str(error))
            return False
        return True

    # -- observing ----------------------------------------------------------------------------------------------

    def _observe(self, tensors: Sequence[TensorMeta], content: Content) -> dict[str, Observation]:
        """One observation of each tensor, in as few calls as the loader allows."""
        found: dict[str, Observation] = {}
        alone: list[TensorMeta] = []
        together: set[str] = set()
        pending = list(tensors)
        while pending and self._grouped:
            seen, report, error = self._observer.load(pending, content)
            if len(pending) == len(tensors):
                self._live.look()
            late = self._observer.late
            together |= late | {observation.tensor.name for observation in seen if observation.copies}
            unclear = bool(late) or self._observer.trespassed or bool(self._moved())
            complete = error is None and len(seen) == len(pending)
            if not unclear and error is None:
                unclear = not complete or report_row(report, seen, self._residents) is not None
            if unclear:
                # Something cannot be pinned on one name in a joint call: take these again, one by one.
                self._grouped = not late
                self._put_back()
                alone += pending
                pending = []
                break
            found |= {observation.tensor.name: observation for observation in (seen if complete else seen[:-1])}
            alone += [observation.tensor for observation in seen[-1:] if not complete]
            if not seen:
                alone += pending
                break
            pending = pending[len(seen) :]
        if not self._grouped:
            alone += pending
        for number, meta in enumerate(alone):
            found[meta.name] = self._observe_alone(meta, content)
            if number in (0, len(alone) - 1):
                self._live.look()
            if found[meta.name].breach is None and not found[meta.name].copies and meta.name in together:
                # Not a native skip: among the others it was copied.
                found[meta.name].breach = first_breach(NoStateAcrossCalls(order=True))
        return found

    def _observe_alone(self, meta: TensorMeta, content: Content) -> Observation:
        seen, report, error = self._observer.load([meta], content)
        observation = seen[0] if seen else Observation(meta, 0)
        if observation.breach is None:
            row = report_row(report, seen, self._residents)
            observation.breach = first_breach(
                StableTargets(moved=self._moved()),
                ReportedAsCopied(other=error or ("" if seen else "the loader did not take the tensor")),
                *([row] if row is not None and not error else []),
            )
        self._put_back()
        return observation

    def _moved(self) -> list[str]:
        return [*self._residents.replaced(), *self._attributes.taken_from_the_given()]

    def _put_back(self) -> None:
        self._residents.put_back()
        self._attributes.put_back()

    def _compare_second_load(self, first: dict[str, Observation]) -> None:
        """Load again in reverse order with other contents: the steps must be the same."""
        good = [observation.tensor for observation in first.values() if observation.breach is None]
        again = self._observe(good[::-1], self._ones)
        self._scratch.clear()
        for name, second in again.items():
            breach = second.breach
            if breach is None and second.steps != first[name].steps:
                alone = self._observe_alone(second.tensor, _lazy_zeros)
                by_order = alone.steps != first[name].steps
                row = NoStateAcrossCalls(order=True) if by_order else Elementwise(deterministic=False)
                breach = first_breach(row)
            if breach is not None:
                self._breaches.setdefault(name, breach)
        for name, observation in first.items():
            if observation.breach is not None:
                self._breaches.setdefault(name, observation.breach)

    def _ones(self, meta: TensorMeta) -> Tensor:
        self._scratch.clear()
        words = self._scratch.fill(meta)
        words.fill(probe_pairs(meta.dtype)[0][1])
        # The same memory under a storage of its own, so that a copy which comes late is told from the current one.
        return tensor_from_words(words, meta.dtype, meta.shape)

    # -- judging ------------------------------------------------------------------------------------------------

    def _probe(self, first: dict[str, Observation]) -> dict[str, Probed]:
        probe = PathProbe(self._observer, self._residents, self._scratch)
        probed: dict[str, Probed] = {}
        for name, observation in first.items():
            if name not in self._breaches and probe.is_needed(observation.tensor, observation.steps):
                probed[name] = probe.run(observation)
                self._put_back()
                breach = probed[name].breach
                if breach is not None:
                    self._breaches[name] = breach
        return probed

    def _find_ties(self, first: dict[str, Observation]) -> None:
        """Refuse copies of several tensors, and computed paths that change with the value of another one (LC12)."""
        for name, partners in self._observer.tied.items():
            self._note(name, first_breach(NoStateAcrossCalls(tied_to=partners)))
        leaked = [first[name].tensor for name in sorted(self._observer.leaked) if name not in self._breaches]
        for name, observation in first.items():
            if name not in self._breaches and is_tied(
                self._observer, self._residents, self._scratch, observation, leaked, grouped=self._grouped
            ):
                others = {meta.name for meta in leaked} - {name}
                self._note(name, first_breach(NoStateAcrossCalls(tied_to=others)))

    def _find_overlaps(self, first: dict[str, Observation]) -> None:
        """Refuse copies that share bytes, but for one view of one path (LC7), and constants under copies (LC1)."""
        copies: dict[int, list[tuple[str, View]]] = {}
        constants: list[tuple[str, View]] = []
        for name, observation in first.items():
            if name in self._breaches:
                continue
            for target in dict.fromkeys(step.target for step in observation.copies):
                view = self._in_memory(target)
                copies.setdefault(view.storage, []).append((name, view))
            fills = (step for step in observation.steps if step.kind is StepKind.CONSTANT)
            constants += [(name, self._in_memory(step.target)) for step in fills]
        for entries in copies.values():
            for number, partner in overlapping([view for _, view in entries]).items():
                self._note(entries[number][0], first_breach(OverlapAgrees(partner=entries[partner][0])))
        for name, view in constants:
            near = [entry for entry in copies.get(view.storage, []) if _spans_meet(entry[1], view)]
            under = overlapping([*(other for _, other in near), view]).get(len(near))
            if under is not None:
                overlaps = near[under][0] if under < len(near) else name
                row = InterceptedWrites("a constant write", constant=True, bits_present=True, overlaps=overlaps)
                self._note(name, first_breach(row))

    def _in_memory(self, view: View) -> View:
        """The bytes of a view, where several storages may lie in one piece of memory."""
        return in_bytes(view, *self._residents.memory_of(view.storage))

    def _find_rearranged(self, first: dict[str, Observation]) -> set[int]:
        """Refuse names whose target an unwritten resident tensor repeats (LC10); returns the written storages."""
        writers: dict[int, list[str]] = {}
        for name, observation in first.items():
            for step in observation.copies:
                writers.setdefault(step.target.storage, []).append(name)
        for storage, derived in rearranged_copies(self._residents, set(writers)).items():
            for name in writers[storage]:
                self._note(name, first_breach(NothingDerived(derived=derived)))
        return set(writers)

    def _note(self, name: str, breach: Breach | None) -> None:
        if breach is not None:
            self._breaches.setdefault(name, breach)

    def _path(self, meta: TensorMeta, observation: Observation | None, probed: Probed | None) -> LoaderPath:
        breach = self._breaches.get(meta.name)
        if breach is not None or observation is None:
            return LoaderPath(meta, PathClass.UNSUPPORTED, breach=breach, consumed_before_next=self._grouped)
        steps = tuple(observation.steps)
        copies = observation.copies
        if not copies:
            # A constant alone moves nothing of the tensor: the name is skipped natively. Nothing of an empty tensor is
            # left out, so no rank has to take it.
            nothing = PathClass.XOR if meta.numel == 0 else PathClass.SKIPPED
            return LoaderPath(meta, nothing, steps, consumed_before_next=self._grouped)
        exact = all(step.source is not None and step.source.dtype == step.target.dtype for step in copies)
        path = LoaderPath(
            meta,
            PathClass.XOR if exact and not any(step.repeats for step in copies) else PathClass.OVERWRITE,
            steps,
            copies=len(copies),
            covered=_covered(meta, [step.source for step in copies if step.source is not None]),
            consumed_before_next=self._grouped,
            by_index=mapped_elements(meta, copies, self._residents),
        )
        if probed is None:
            return path
        firsts = [step for step in copies if not step.repeats]
        return replace(
            path,
            covered=min(meta.numel, path.covered + probed.outputs) if path.covered < meta.numel else path.covered,
            two_pass=any(step.source is None or step.source.width != meta.width for step in firsts),
            placeholders=probed.placeholders,
            constant_at=probed.constant_at,
        )


def _lazy_zeros(meta: TensorMeta) -> Tensor:
    """A tensor of its own storage whose pages are not resident until the loader touches them."""
    buffer = torch.from_numpy(np.zeros(max(meta.nbytes, 8), dtype=np.uint8))
    return buffer[: meta.nbytes].view(torch_dtype(meta.dtype)).view(meta.shape)


def _covered(meta: TensorMeta, sources: Collection[View]) -> int:
    views = [view for view in sources if view.storage == CANONICAL]
    return covered_bytes(views) // meta.width if views else 0


def _spans_meet(one: View, other: View) -> bool:
    return one.span[0] < other.span[1] and other.span[0] < one.span[1]
