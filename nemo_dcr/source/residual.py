"""Residual conversion: rebuild the canonical tensors that a change can reach and compare them as a whole.

Each rank flags the inputs it watches whose bits changed. The flags of all ranks, followed along the declared
dependencies, select U_req. For each chunk of U_req every rank converts its parts and sends them to the rank that keeps
the tensor's residual baseline; that rank assembles them, compares the result with its baseline and emits overwrites of
the bits that differ. Outputs whose bits stay the same are omitted. Memory is bounded by one chunk of tensors.
All ranks make the same rounds: `capture` and `chunks` are calls of all ranks together (see `exchange`). Only a restore
reads the baseline of this rank alone.
Not handled: undeclared dependencies and conversions that are not deterministic (SC6 asks for both).

Paper: Section 5 (U_req, D_u); Figure A.4; Appendix C (chunks in converted bytes)
Proofs: residual_changes_complete   Conditions: SC6
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.buckets import Chunk, group_chunks
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.errors import ConditionViolated, EndpointLost
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.kernels import hot
from nemo_dcr.kernels.plain import Indices
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.assembly import assemble, pack_parts, unpack_parts
from nemo_dcr.source.baseline import LOST, Baseline, Copied, committed, untold
from nemo_dcr.source.exchange import Exchange, never
from nemo_dcr.source.geometry import Plan
from nemo_dcr.source.ownership import residual_owner
from nemo_dcr.source.tasks import Part, ResidualInput, ResidualTask

_FLAGS = msgspec.msgpack.Decoder(list[str])
_Assembled = list[tuple[TensorMeta, Words]]


@dataclass(slots=True)
class ResidualCounts:
    """What one stream saw on this rank; a lost tracker counts as changed everywhere."""

    changed_inputs: int = 0
    """Source elements of watched inputs that changed."""
    emitted: int = 0
    """Canonical elements with a record."""
    emitted_changed: int = 0
    """Those of them whose canonical bits changed."""
    changed_by_tensor: dict[str, int] = field(default_factory=dict)
    """The same by canonical name; tensors without a change are left out."""


class ResidualConverter:
    """This rank's share: the inputs it watches, its conversions, and the residual baselines that it keeps.

    `inputs` and `tasks` are all that this rank holds; the plan says which of them it owns.
    """

    def __init__(
        self,
        plan: Plan,
        exchange: Exchange,
        inputs: Iterable[ResidualInput],
        tasks: Iterable[ResidualTask],
        *,
        chunk_target_bytes: int,
    ) -> None:
        rank = OwnerId(exchange.rank)
        self._exchange = exchange
        self._dependencies = plan.dependencies
        self._inputs = plan.owned_inputs(rank, inputs)
        self._tasks: dict[TensorMeta, list[ResidualTask]] = defaultdict(list)
        for task in plan.owned_residual(rank, tasks):
            for tensor in task.outputs:
                self._tasks[tensor].append(task)
        self._chunk_target = chunk_target_bytes
        self._tensors = tuple(
            tensor
            for tensor in plan.dependencies.all_tensors()
            if residual_owner(tensor.name, exchange.world) == exchange.rank
        )
        self._trackers = Baseline(watched.key for watched in self._inputs)
        self._outputs = Baseline(tensor.name for tensor in self._tensors)
        self._pending: dict[str, tuple[Indices | None, Words]] | None = None
        """Changes of the last complete stream by canonical name; the indices are None for a whole tensor."""
        self.counts = ResidualCounts()

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        """Canonical tensors whose residual baseline this rank keeps, sorted by name."""
        return self._tensors

    @property
    def trackers(self) -> Baseline:
        """Trackers of the watched inputs by shard key."""
        return self._trackers

    @property
    def outputs(self) -> Baseline:
        """The residual baseline by canonical name."""
        return self._outputs

    @property
    def source_elements(self) -> int:
        """Elements of the watched inputs: this rank's residual share of N_src."""
        return sum(watched.count for watched in self._inputs)

    def capture(self, version: Version, key: str, copied: Copied = untold) -> None:
        """Take the resident weights as the committed `version`, all ranks together; `key` is new for each call.

        `copied` is told the name of each tensor whose residual baseline this rank keeps.

        Raises: ConditionViolated (SC4, SC6); EndpointLost; AttemptFailed when another rank failed.
        """
        self._pending = None
        for watched in self._inputs:
            self._trackers.capture(watched.key, watched.words(), version)
        with contextlib.closing(self._rounds(self._dependencies.all_tensors(), key, never)) as rounds:
            for assembled, _ in rounds:
                for tensor, words in assembled:
                    self._outputs.capture(tensor.name, words, version)
                    copied(tensor.name)

    def chunks(self, mode: AttemptMode, key: str, stopped: Callable[[], bool] = never) -> Generator[Chunk, None, None]:
        """Overwrite items of the tensors that this rank assembles, chunk by chunk; `key` is new for each attempt.

        Close the iterator when it is given up: that tells the other ranks.
        Raises: ConditionViolated (SC3, SC4, SC6); EndpointLost; AttemptFailed when stopped here or elsewhere.
        """
        self.counts = ResidualCounts()
        if mode is AttemptMode.RESTORE:
            for tensor in self._tensors:
                yield self._chunk([_whole(tensor, self._outputs.words(tensor.name))], tensor.nbytes)
            return
        self._pending = None
        required = self._required(f"{key}/flags", stopped)
        if mode is AttemptMode.DENSE:
            required = self._dependencies.all_tensors()
        pending: dict[str, tuple[Indices | None, Words]] = {}
        with contextlib.closing(self._rounds(required, key, stopped)) as rounds:
            for assembled, input_bytes in rounds:
                items: list[Item] = []
                for tensor, words in assembled:
                    indices, values = pending[tensor.name] = self._changes(tensor, words, mode)
                    if mode is AttemptMode.DENSE:
                        items.append(_whole(tensor, words))
                    elif indices is not None and len(indices):
                        items.append(Item.of(tensor, Encoding.OVERWRITE, indices, values))
                    self.counts.emitted_changed += len(values)
                    if len(values):
                        self.counts.changed_by_tensor[tensor.name] = len(values)
                yield self._chunk(items, input_bytes)
        self._pending = pending

    def update(self, version: Version, copied: Copied = untold) -> None:
        """Make the committed candidate the baseline, in place; repeatable. This rank alone.

        A residual tensor moves by the changes that the last complete stream found: candidate and baseline are the same
        in all attempts of a transition, so each complete stream finds the same ones. `copied` as for `capture`.

        Raises: ConditionViolated (SC3) when a tracker cannot become `version`, or this rank has completed no stream of
        the candidate; capture then rebuilds the baseline.
        """
        done = self._outputs.tag in (None, committed(version))
        if self._pending is None and not done:
            raise ConditionViolated("SC3", "residual baseline", "no complete stream of this candidate; capture instead")
        for watched in self._inputs:
            self._trackers.update(watched.key, watched.words(), version)
        for tensor in self._tensors:
            if self._pending is not None and not done:
                self._move(tensor, self._pending, version)
                if (
                    tensor == self._tensors[-1]
                ):  # used up; a listener that raises must not keep them for another version
                    self._pending = None
            copied(tensor.name)

    def _move(self, tensor: TensorMeta, changes: dict[str, tuple[Indices | None, Words]], version: Version) -> None:
        nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=unsigned(tensor.dtype))
        indices, values = changes.get(tensor.name, nothing)
        if indices is None:
            self._outputs.update(tensor.name, values, version)
        else:
            self._outputs.update_at(tensor.name, indices, values, version)

    def _chunk(self, items: list[Item], input_bytes: int) -> Chunk:
        kept = tuple(item for item in items if item.count)
        self.counts.emitted += sum(item.count for item in kept)
        return Chunk(kept, input_bytes)

    def _changes(self, tensor: TensorMeta, words: Words, mode: AttemptMode) -> tuple[Indices | None, Words]:
        """Changed indices and their new words; None and all words when a dense attempt has no baseline to compare."""
        if mode is AttemptMode.DENSE and self._outputs.tag_of(tensor.name) == LOST:
            return None, words
        return hot.loops().changes(words, self._outputs.words(tensor.name), masks=False)

    def _required(self, meeting: str, stopped: Callable[[], bool]) -> tuple[TensorMeta, ...]:
        """U_req: compare the watched inputs and unite the flags of all ranks."""
        with self._telling_others(lambda: meeting):
            changed = set()
            for watched in self._inputs:
                count = watched.count
                if self._trackers.tag_of(watched.key) != LOST:
                    count = len(hot.loops().changed_indices(watched.words(), self._trackers.words(watched.key)))
                self.counts.changed_inputs += count
                if count:
                    changed.add(watched.name)
            self._exchange.meet(meeting, stopped)
        flags = self._exchange.gather(msgspec.msgpack.encode(sorted(changed)))
        return self._dependencies.required(name for data in flags for name in _FLAGS.decode(data))

    def _rounds(
        self, required: Iterable[TensorMeta], key: str, stopped: Callable[[], bool]
    ) -> Generator[tuple[_Assembled, int], None, None]:
        """Convert, exchange and assemble the required tensors; yields this rank's tensors and their bytes by chunk."""
        meeting = f"{key}/0"
        with self._telling_others(lambda: meeting):
            sized = ((tensor, tensor.nbytes) for tensor in required)
            for number, (chunk, _) in enumerate(group_chunks(sized, self._chunk_target)):
                messages = [pack_parts(parts) for parts in self._convert(chunk)]
                self._exchange.meet(meeting, stopped)
                meeting = f"{key}/{number + 1}"
                received = self._exchange.scatter(messages)
                del messages
                assembled = self._assemble(chunk, received)
                del received
                yield assembled, sum(tensor.nbytes for tensor, _ in assembled)

    def _convert(self, chunk: Iterable[TensorMeta]) -> list[list[Part]]:
        """This rank's parts of the chunk's tensors, by the rank that assembles them."""
        parts: list[list[Part]] = [[] for _ in range(self._exchange.world)]
        for tensor in chunk:
            for task in self._tasks.get(tensor, ()):
                made = task.convert(tensor)
                if any(part.map.tensor != tensor for part in made):
                    raise ConditionViolated("SC6", tensor.name, f"task {task.key!r} made a part of another tensor")
                parts[residual_owner(tensor.name, self._exchange.world)].extend(made)
        return parts

    def _assemble(self, chunk: Iterable[TensorMeta], messages: Iterable[bytes]) -> _Assembled:
        parts: dict[TensorMeta, list[Part]] = defaultdict(list)
        for message in messages:
            for part in unpack_parts(message):
                parts[part.map.tensor].append(part)
        mine = [tensor for tensor in chunk if residual_owner(tensor.name, self._exchange.world) == self._exchange.rank]
        return [(tensor, assemble(tensor, parts[tensor])) for tensor in mine]

    @contextlib.contextmanager
    def _telling_others(self, meeting: Callable[[], str]) -> Iterator[None]:
        """Give up the next meeting when this rank leaves early, so that no other rank waits for it."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(EndpointLost):
                self._exchange.give_up(meeting())
            raise


def _whole(tensor: TensorMeta, words: Words) -> Item:
    return Item.run(tensor, Encoding.OVERWRITE, 0, words)
