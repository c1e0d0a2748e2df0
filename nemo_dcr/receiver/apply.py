"""Application of a group of items through the native loader.

The loader gets one `load_weights` call for the group and pulls the items one after another from one reused scratch;
it alone decides where values go. Items that this rank skips natively are left out. Where every copy of a path has an
index map, an item's entries are placed one by one and its cost follows their number; other paths, and items that
change most of a large tensor, are laid out over the scratch. Overwrites that need two passes make two calls, the first
of which writes nothing. A failure may leave a group partly applied: an attempt that fails is repaired by overwriting
every one of its records.
Not handled: fences, acknowledgements and retries (protocol/); support of a path (see prewarm).

Paper: Section 6.1; Algorithm B.1 (apply); Figures A.13, A.14   Spec: ApplyItem
Proofs: L4 xor_reconstructs, L7 loader_commutes   Conditions: LC2, LC5, LC6, LC9, LC11
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.errors import AttemptFailed, ConditionViolated
from nemo_dcr.ids import AttemptId
from nemo_dcr.receiver.conditions import BitsPreserved, ReportedAsCopied, StableTargets
from nemo_dcr.receiver.hook import WriteHook
from nemo_dcr.receiver.paths import LoaderPath, LoaderTable, Step, StepKind
from nemo_dcr.receiver.place import Pass
from nemo_dcr.receiver.place_indexed import IndexedPlacer
from nemo_dcr.receiver.repeats import XorRepeats
from nemo_dcr.receiver.report import report_row
from nemo_dcr.receiver.residents import NativeModel
from nemo_dcr.receiver.scratch import free_pattern

_FEW_ENTRIES = 4096
_DENSE_SHARE = 4
"""An item of more entries than that, and of more than this part of its tensor, is faster over the scratch."""


@dataclass(frozen=True, slots=True)
class ApplyReport:
    """What one `apply` call did."""

    items: int
    """Items that went through the loader."""
    skipped: int
    """Items that this rank skips natively."""
    copies: int
    """Intercepted copies that wrote."""
    elements: int
    """Entries of the items that went through the loader."""
    checked_elements: int
    """Resident elements read back, changed or not; 0 without the post-apply check."""
    check_seconds: float
    """Elapsed time of the post-apply check, a part of the call's own time."""


@dataclass(slots=True)
class _Planned:
    item: Item
    path: LoaderPath
    how: Pass
    placeholder: int
    occurrence: int

    @property
    def tensor(self) -> TensorMeta:
        return self.item.tensor

    @property
    def copies(self) -> list[Step]:
        return [step for step in self.path.steps if step.kind is not StepKind.CONSTANT]

    @property
    def accounted(self) -> list[Step]:
        """See `Taken`."""
        return self.copies


class Applier:
    """Applies items to one model; used by one thread at a time."""

    def __init__(
        self, model: NativeModel, table: LoaderTable, *, post_apply_check: bool = False, index_space: bool = True
    ) -> None:
        """Take the table that `prewarm` made for this very model; items of unsupported names will be refused.

        Without `index_space` every item is laid out over the scratch; the bits are the same.
        """
        self._model = model
        self._index_space = index_space
        self._table = table
        self._post_apply_check = post_apply_check
        self._attempt: AttemptId | None = None
        self._repeats = XorRepeats()

    def apply(
        self,
        items: Sequence[Item],
        *,
        attempt: AttemptId | None = None,
        on_item: Callable[[Item], None] | None = None,
    ) -> ApplyReport:
        """Apply a group of items in order.

        With `attempt`, XOR elements that an earlier call of the same attempt changed are refused (LC6); without it,
        only repeats inside this call. `on_item` is called after each item that was written.

        Raises: ConditionViolated, before the write that breaks the condition; PostApplyMismatch after it.
        """
        if attempt is None or attempt != self._attempt:
            self._attempt, self._repeats = attempt, XorRepeats()
        single: list[_Planned] = []
        double: list[_Planned] = []
        counts: Counter[str] = Counter()
        for item in items:
            path = self._path(item)
            if path.path_class is PathClass.SKIPPED or item.count == 0:
                continue
            counts[item.tensor.name] += 1
            planned = self._plan(item, path, counts[item.tensor.name])
            (double if planned.how is Pass.RECORD else single).append(planned)
        StableTargets(moved=self._table.residents.replaced()).require("resident storage")
        placer = IndexedPlacer(self._table, post_apply_check=self._post_apply_check)
        with torch.inference_mode(self._table.residents.on_inference_mode), torch.no_grad():
            for batch in self._batches(single, limit=None):
                self._load(placer, batch, on_item)
            for batch in self._batches(double, limit=self._table.scratch.capacity):
                self._load(placer, batch, None)
                self._load(placer, [_second(planned) for planned in batch], on_item)
        StableTargets(moved=self._table.residents.replaced()).require("resident storage")
        applied = [*single, *double]
        return ApplyReport(
            items=len(applied),
            skipped=len(items) - len(applied),
            copies=placer.copies,
            elements=sum(planned.item.count for planned in applied),
            checked_elements=placer.checked_elements,
            check_seconds=placer.check_seconds,
        )

    def flush(self) -> None:
        """Wait until the writes of earlier calls have reached the device."""
        if any(entry.tensor.device.type != "cpu" for entry in self._table.residents.tensors.values()):
            torch.accelerator.synchronize()

    def _path(self, item: Item) -> LoaderPath:
        name = item.tensor.name
        path = self._table.paths.get(name)
        if path is None or (path.tensor is not item.tensor and path.tensor != item.tensor):
            raise ConditionViolated(StableTargets.code, name, f"{item.tensor} is not the tensor that was prewarmed")
        if path.breach is not None:
            raise ConditionViolated(path.breach.code, name, path.breach.detail)
        if item.count and not 0 <= item.start <= item.last < item.tensor.numel:
            raise ConditionViolated("SC5", name, f"elements {item.start} to {item.last} are outside the tensor")
        if item.encoding is Encoding.XOR and path.path_class is PathClass.OVERWRITE:
            exact = path.steps and all(step.source is not None for step in path.steps)
            BitsPreserved(shares_scratch=bool(exact), same_dtype=False).require(name)
        return path

    def _plan(self, item: Item, path: LoaderPath, occurrence: int) -> _Planned:
        by_index = self._index_space and path.by_index is not None
        if by_index and item.count > _FEW_ENTRIES:
            by_index = item.count <= item.tensor.numel // _DENSE_SHARE
        if item.encoding is Encoding.XOR:
            self._repeats.add(item)
            return _Planned(item, path, Pass.INDEXED if by_index else Pass.XOR, 0, occurrence)
        if item.count == item.tensor.numel:
            return _Planned(item, path, Pass.WHOLE, 0, occurrence)
        if by_index:
            return _Planned(item, path, Pass.INDEXED, 0, occurrence)
        pattern = None if path.two_pass else free_pattern(item.values, item.tensor.dtype)
        if pattern is not None:
            return _Planned(item, path, Pass.PLACEHOLDER, pattern, occurrence)
        first, _ = path.placeholders or (0, 1)
        return _Planned(item, path, Pass.RECORD, first, occurrence)

    def _batches(self, planned: Sequence[_Planned], limit: int | None) -> Iterator[list[_Planned]]:
        """One batch for each loader call; `limit` bounds the bytes that two-pass items hold between the passes."""
        batch: list[_Planned] = []
        held = 0
        for entry in planned:
            over = limit is not None and held + entry.tensor.nbytes > limit
            if batch and (over or not self._table.grouped):
                yield batch
                batch, held = [], 0
            batch.append(entry)
            held += entry.tensor.nbytes
        if batch:
            yield batch

    def _load(self, placer: IndexedPlacer, batch: Sequence[_Planned], on_item: Callable[[Item], None] | None) -> None:
        scratch = self._table.scratch
        hook = WriteHook(self._table.residents, scratch.key, placer)
        # Made before the hook sees every operator.
        given = [scratch.tensor(planned.tensor) for planned in batch]
        taken: list[_Planned] = []

        def finish() -> None:
            if len(taken) > finished[0]:
                placer.finish()
                scratch.clear()
                finished[0] += 1
                if on_item is not None:
                    on_item(taken[-1].item)

        def feed() -> Iterator[tuple[str, Tensor]]:
            for planned, tensor in zip(batch, given, strict=True):
                if taken:
                    finish()
                placer.begin(planned.item, planned.path, planned.how, planned.placeholder, planned.occurrence)
                hook.name = planned.tensor.name
                taken.append(planned)
                if planned.how is not Pass.INDEXED:
                    scratch.load(planned.item, planned.placeholder)
                yield planned.tensor.name, tensor

        finished = [0]
        report: list[str] | None = None
        try:
            with hook:
                reported = self._model.load_weights(feed())
                report = None if reported is None else [str(name) for name in reported]
            if placer.failure is None:
                finish()
        except AttemptFailed:
            raise
        except Exception as error:
            if placer.failure is None:
                detail = f"the loader raised {type(error).__name__}: {error}"
                raise ConditionViolated(ReportedAsCopied.code, hook.name, detail) from error
        finally:
            scratch.clear()
        if placer.failure is not None:
            raise placer.failure
        if len(taken) != len(batch):
            ReportedAsCopied(other="the loader did not take every tensor of the call").require(
                batch[len(taken)].tensor.name
            )
        row = report_row(report, taken, self._table.residents)
        if row is not None:
            row.require(batch[0].tensor.name)


def _second(planned: _Planned) -> _Planned:
    _, second = planned.path.placeholders or (0, 1)
    return _Planned(planned.item, planned.path, Pass.REPLAY, second, planned.occurrence)
