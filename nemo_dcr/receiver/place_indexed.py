"""What one intercepted copy does to resident storage where it has an index map: the entries alone are placed.

The loader runs and asks for its copy as always, over a scratch that stays at rest. The copy is first compared with the
step that prewarm saw, as on the dense path; then the entries that it takes are changed or stored in the resident words
that its views name, at once, so that whatever comes next finds what a dense load would have left. No placeholder is
needed. The number of entries that met a copy has to agree with what prewarm says of the path, and the scratch must not
have been written: a difference fails the attempt. The post-apply check lays the item out over the scratch after all and
compares every element of the view with the dense path's result.
Not handled: paths with a cast, a computed source or a second copy into a view (dense scratch).

Paper: Section 6.1 (XOR path, overwrite path)   Proofs: L4 xor_reconstructs, L5 inactive_unchanged
Conditions: LC2, LC5
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import integer_view
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.receiver.conditions import BitsPreserved, ReportedAsCopied
from nemo_dcr.receiver.index_map import index_map
from nemo_dcr.receiver.paths import LoaderPath, LoaderTable, Step
from nemo_dcr.receiver.place import DenseScratchPlacer, Pass


class IndexedPlacer(DenseScratchPlacer):
    """Carries out the copies of one item after another; items of other passes take the dense scratch."""

    def __init__(self, table: LoaderTable, *, post_apply_check: bool) -> None:
        super().__init__(table, post_apply_check=post_apply_check)
        self._item: Item | None = None
        self._version = 0
        self._met = 0
        """Entries that met a copy; one that two copies take counts twice."""

    def begin(self, item: Item, path: LoaderPath, how: Pass, placeholder: int, occurrence: int) -> None:
        """See `DenseScratchPlacer`."""
        super().begin(item, path, how, placeholder, occurrence)
        self._item = item if how is Pass.INDEXED else None
        self._met, self._version = 0, self._table.scratch.version

    def finish(self) -> None:
        """End the item: every step of its path and every entry has been seen.

        Raises: ConditionViolated (LC2, LC5).
        """
        path, item = self._path, self._item
        super().finish()
        if path is None or item is None:
            return
        self._require_scratch_at_rest(item.tensor.name)
        least = item.count if path.covered == item.tensor.numel else 0
        most = item.count if path.by_index == path.covered else item.count * path.copies
        if not least <= self._met <= most:
            detail = f"{self._met} of {item.count} entries met a copy, which prewarm did not see"
            self._fail(ReportedAsCopied(other=detail), item.tensor.name)

    def _carry_out(self, name: str, step: Step, number: int, destination: Tensor, expanded: Tensor) -> None:
        item = self._item
        if item is None:
            super()._carry_out(name, step, number, destination, expanded)
            return
        self._require_scratch_at_rest(name)
        found = index_map(destination.shape, expanded.stride(), destination.stride())
        resident = self._table.residents.words_of(step.target.storage, step.target.width)
        if found is None or resident is None or step.source is None or destination.is_conj() or destination.is_neg():
            self._fail(BitsPreserved(same_dtype=False), name)
        expected = None
        if self._post_apply_check:
            with self._timed_check():
                expected = self._expected(item, destination, expanded)
        self._met += found.write(item, resident, step.source.offset, step.target.offset)
        if expected is not None:
            with self._timed_check():
                self._check(name, integer_view(destination), expected)

    def _expected(self, item: Item, destination: Tensor, source: Tensor) -> Tensor:
        """The words of the whole view after the copy, by way of the dense scratch."""
        scratch = self._table.scratch
        words, resident = integer_view(source), integer_view(destination)
        try:
            if item.encoding is Encoding.XOR:
                scratch.load(item, 0)
                return resident ^ words
            scratch.load(replace(item, values=item.values * 0 + item.values.dtype.type(1)), 0)
            mask = words != 0
            scratch.load(item, 0)
            return torch.where(mask, words, resident)
        finally:
            scratch.clear()

    def _require_scratch_at_rest(self, name: str) -> None:
        if self._table.scratch.version != self._version:
            self._fail(BitsPreserved(edited_by="a write on another thread"), name)
