"""The owner's loop: compare, project or convert, and emit the complete changed set in chunks.

Each canonical tensor that an owner holds gives at most one item. An affine tensor gives an XOR item when the attempt,
the projection and the loader paths allow it, and an overwrite item otherwise; a residual tensor gives overwrites.
`xor` and `overwrite` compare the frozen candidate with the committed baseline, so a retry finds the same changed set.
`dense` sends all elements of the candidate, `restore` all elements of the baseline. Residual chunks come first, while
all ranks are in step; after them this owner runs alone. The same candidate and baseline give the same chunks.
Not handled: encoding and delivery of buckets, and when which mode is allowed (protocol).

Paper: Section 5 (delta construction); Appendix C (input bytes); Appendix D (N_src, N_chg, D, D_chg); Figure D.1
Spec: OwnerPrepare, EmitPayload, UpdateBaseline, CopyItem, RebuildBaseline   Proofs: change_detection_complete
Conditions: SC3, SC4
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.buckets import Bucket, Chunk, group_chunks, pack_buckets
from nemo_dcr.codec.records import Encoding, PathClass, choose_encoding
from nemo_dcr.config import CodecConfig
from nemo_dcr.errors import AttemptFailed, ConditionViolated, InternalError, UnsupportedMapping
from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId, OwnerId, Version
from nemo_dcr.kernels import hot
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.baseline import Baseline, BaselineState, BaselineTag, Copied, Hold, can_rebuild, unite_tags, untold
from nemo_dcr.source.baseline_files import BaselineFiles
from nemo_dcr.source.direct import AffineUnit, Emission
from nemo_dcr.source.exchange import never
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.residual import ResidualConverter
from nemo_dcr.source.tasks import AffineTask


@dataclass(slots=True)
class Counts:
    """What one stream of one owner saw so far: the quantities of Appendix D, and items by encoding."""

    source_elements: int
    """N_src: unique source elements that this owner compares."""
    compared: bool
    """False when a tracker was lost or the mode compares nothing: then the two `changed` counts mean nothing."""
    changed_elements: int = 0
    """N_chg: source elements that changed."""
    emitted: int = 0
    """|D|: canonical elements with a record."""
    emitted_changed: int = 0
    """|D_chg|: those of them whose canonical bits changed."""
    xor_items: int = 0
    overwrite_items: int = 0
    chunks: int = 0
    """Chunks that were compared or read."""
    input_bytes: int = 0
    """Bytes of those chunks, changed or not."""
    changed_by_tensor: dict[str, int] = field(default_factory=dict)
    """|D_chg| by canonical name; tensors without a change are left out."""


class DeltaOwner:
    """One rank's owned conversion tasks and its part of the source baseline.

    `affine_tasks` are the tasks that this rank owns (`Plan.owned_affine`); `residual` is its converter, if any. Empty
    shards of a tensor that has elements are left out.
    Raises: UnsupportedMapping (SC1) when a shard is given twice or a tensor is both affine and residual.
    """

    def __init__(
        self,
        owner: OwnerId,
        affine_tasks: Sequence[AffineTask],
        *,
        residual: ResidualConverter | None = None,
        config: CodecConfig | None = None,
        files: BaselineFiles | None = None,
    ) -> None:
        """`files`: where the baseline lies; in memory without them."""
        self.owner = owner
        self._files = files
        self._config = CodecConfig() if config is None else config
        self._residual = residual
        by_tensor: dict[TensorMeta, list[AffineTask]] = defaultdict(list)
        for task in sorted(affine_tasks, key=lambda task: task.key):
            if task.map.domain or not task.tensor.numel:
                by_tensor[task.tensor].append(task)
        self._units = tuple(AffineUnit(tensor, tuple(by_tensor[tensor])) for tensor in sorted(by_tensor))
        converted = () if residual is None else residual.tensors
        self._tensors = tuple(sorted((*by_tensor, *converted)))
        self._tasks = tuple(task for unit in self._units for task in unit.tasks)
        _refuse_repeats([task.key for task in self._tasks])
        _refuse_repeats([tensor.name for tensor in self._tensors])
        self._trackers = Baseline(task.key for task in self._tasks)
        self._baselines = (self._trackers, *(() if residual is None else (residual.trackers, residual.outputs)))
        if files is not None:
            for group, baseline in enumerate(self._baselines):
                baseline.keep_in(_holder(files, group))
        self._captures = 0
        hot.warm(sum(unit.nbytes for unit in self._units) + sum(tensor.nbytes for tensor in converted))
        self._counts = Counts(self.source_elements, compared=False)

    def tensor_table(self) -> tuple[TensorMeta, ...]:
        """Canonical tensors that this owner can emit records for, sorted by name."""
        return self._tensors

    def elements_by_tensor(self) -> dict[str, int]:
        """Canonical elements that this owner answers for, by canonical name."""
        mine = {unit.tensor.name: unit.source_elements for unit in self._units}
        return mine | {tensor.name: tensor.numel for tensor in (self._residual.tensors if self._residual else ())}

    @property
    def source_elements(self) -> int:
        """Unique source elements that this owner compares: its share of N_src."""
        residual = 0 if self._residual is None else self._residual.source_elements
        return residual + sum(unit.source_elements for unit in self._units)

    @property
    def tag(self) -> BaselineTag | None:
        """Tag of all trackers and residual baselines together; None for an owner that holds none of them."""
        return unite_tags(tag for baseline in self._baselines if (tag := baseline.tag) is not None)

    @property
    def baseline_bytes(self) -> int:
        """Host bytes of trackers and residual baselines."""
        return sum(baseline.nbytes for baseline in self._baselines)

    @property
    def counts(self) -> Counts:
        """Counts of the last stream; complete once that stream is exhausted."""
        return self._counts

    def capture(self, version: Version, copied: Copied = untold) -> None:
        """Take the resident weights as the committed `version`. With residual tasks: all ranks together.

        `copied` is told each name of `tensor_table` once.
        Raises: ConditionViolated (SC4, SC6); EndpointLost or AttemptFailed when another rank failed.
        """
        self._break_seal()
        for unit in self._units:
            for task in unit.tasks:
                self._trackers.capture(task.key, task.words(), version)
            copied(unit.tensor.name)
        if self._residual is not None:
            self._captures += 1
            self._residual.capture(version, f"capture/{version}/{self._captures}", copied)

    def rebuild(
        self,
        version: Version,
        copied: Copied = untold,
        *,
        open_candidate: CandidateId,
        committed_candidate: CandidateId = NO_CANDIDATE,
    ) -> None:
        """Rebuild a lost baseline as the committed `version` from the resident weights (D12). Otherwise as `capture`.

        Raises: ConditionViolated (SC3) when the resident weights are a candidate that is not committed.
        """
        if not can_rebuild(open_candidate=open_candidate, committed_candidate=committed_candidate):
            detail = f"candidate {open_candidate!r} is not committed; continue with dense attempts"
            raise ConditionViolated("SC3", f"owner {self.owner}", detail)
        self.capture(version, copied)

    def lose_baseline(self) -> None:
        """Drop all trackers and residual baselines, as a crash does."""
        self._break_seal()
        for baseline in self._baselines:
            baseline.lose()

    def seal(self, candidate: CandidateId, digest: bytes) -> None:
        """The baseline is complete and is the committed `candidate`: it may outlive this process where it has files.

        `digest`: that of the commit record; without one nothing could prove later that this is the baseline.
        """
        tag = self.tag
        if (
            self._files is not None
            and digest
            and tag is not None
            and tag.state is BaselineState.COMMITTED
            and tag.version is not None
        ):
            words = {f"{group}/{key}": each.words(key) for group, each in enumerate(self._baselines) for key in each}
            self._files.seal(tag.version, candidate, digest, words)

    def recover(self, version: Version, candidate: CandidateId, digest: bytes) -> bool:
        """Take the baseline over from its files if they are proved to be what the record says; True if so."""
        keys = [(group, key) for group, baseline in enumerate(self._baselines) for key in baseline]
        if self._files is None:
            return False
        found = self._files.recover(version, candidate, digest, [f"{group}/{key}" for group, key in keys])
        if found is None:
            return False
        for group, key in keys:
            self._baselines[group].adopt(key, found[f"{group}/{key}"], version)
        return True

    def _break_seal(self) -> None:
        if self._files is not None:
            self._files.break_seal()

    def update_baseline(self, version: Version, copied: Copied = untold) -> None:
        """Copy the committed candidate over the baseline, in place and tracker by tracker. Repeatable.

        Call it only after the joint commit of the resident candidate as `version`. `copied` is told each name of
        `tensor_table` once, also when an earlier call had copied that tensor already.
        Raises: ConditionViolated (SC3) when a tracker is neither lost nor at version - 1 nor at version.
        """
        self._break_seal()
        for unit in self._units:
            for task in unit.tasks:
                self._trackers.update(task.key, task.words(), version)
            copied(unit.tensor.name)
        if self._residual is not None:
            self._residual.update(version, copied)

    def tracker_words(self) -> Iterator[tuple[TensorMeta, BoxMap, Words]]:
        """Each affine tracker (words in the source dtype) and each residual baseline, for checks; not to be written.

        Raises: ConditionViolated (SC3) unless the tracker is committed.
        """
        for task in self._tasks:
            yield task.tensor, task.map, self._trackers.words(task.key)
        if self._residual is not None:
            for tensor in self._residual.tensors:
                yield tensor, BoxMap.whole(tensor), self._residual.outputs.words(tensor.name)

    def stream(
        self,
        mode: AttemptMode,
        path_classes: Mapping[str, PathClass],
        *,
        attempt: AttemptId = NO_ATTEMPT,
        base: Version | None = None,
        stopped: Callable[[], bool] = never,
    ) -> Generator[Bucket, None, None]:
        """The buckets of one attempt, built as they are asked for. Close the iterator when the attempt fails.

        Args:
            path_classes: what prewarm found, by canonical name; looked at in mode `xor` only.
            attempt: names the meetings of the ranks; new for each stream when there are residual tasks.
            base: the committed version K.ver; the baseline must hold exactly it. None takes what the baseline holds.
            stopped: asked between chunks and while this rank waits for others.

        Raises: ConditionViolated (SC3) at once, when the baseline is not committed at `base`. While iterating:
        ConditionViolated (SC4, SC6; LC3 for a missing class), EndpointLost, or AttemptFailed when stopped.
        """
        chunks = self.chunks(mode, path_classes, attempt=attempt, base=base, stopped=stopped)
        return _closing(chunks, pack_buckets(chunks, self._config.bucket_target_bytes))

    def chunks(
        self,
        mode: AttemptMode,
        path_classes: Mapping[str, PathClass],
        *,
        attempt: AttemptId = NO_ATTEMPT,
        base: Version | None = None,
        stopped: Callable[[], bool] = never,
    ) -> Generator[Chunk, None, None]:
        """The chunks behind `stream`, also those without records. Raises: as `stream`."""
        if mode is AttemptMode.FINISH:
            raise InternalError("a finish attempt carries no payloads and has no stream")
        tag = self.tag
        lost = tag is not None and tag.state is BaselineState.LOST
        if tag is not None and not (lost and mode is AttemptMode.DENSE):
            if tag.state is not BaselineState.COMMITTED:
                raise ConditionViolated("SC3", f"owner {self.owner}", f"the baseline is {tag}, not committed")
            if base is not None and tag.version != base:
                raise ConditionViolated("SC3", f"owner {self.owner}", f"the baseline is {tag}, the record is at {base}")
        self._counts = Counts(self.source_elements, compared=not lost and mode is not AttemptMode.RESTORE)
        return self._emit(mode, path_classes, f"attempt/{attempt}", stopped)

    def _emit(
        self, mode: AttemptMode, path_classes: Mapping[str, PathClass], key: str, stopped: Callable[[], bool]
    ) -> Generator[Chunk, None, None]:
        counts = self._counts
        if self._residual is not None:
            with contextlib.closing(self._residual.chunks(mode, key, stopped)) as chunks:
                for chunk in chunks:
                    yield _tally(counts, chunk)
            counts.changed_elements += self._residual.counts.changed_inputs
            counts.emitted_changed += self._residual.counts.emitted_changed
            counts.changed_by_tensor.update(self._residual.counts.changed_by_tensor)
        sized = ((unit, unit.nbytes) for unit in self._units)
        for units, input_bytes in group_chunks(sized, self._config.chunk_target_bytes):
            if stopped():
                raise AttemptFailed(f"owner {self.owner}: the attempt was stopped")
            items = []
            for unit in units:
                emission = self._emission(unit, mode, path_classes)
                counts.changed_elements += emission.changed
                counts.emitted_changed += emission.emitted_changed
                if emission.emitted_changed:
                    counts.changed_by_tensor[unit.tensor.name] = emission.emitted_changed
                if emission.item is not None:
                    items.append(emission.item)
            yield _tally(counts, Chunk(tuple(items), input_bytes))

    def _emission(self, unit: AffineUnit, mode: AttemptMode, path_classes: Mapping[str, PathClass]) -> Emission:
        if mode is AttemptMode.DENSE:
            return unit.candidate(self._trackers)
        if mode is AttemptMode.RESTORE:
            return unit.committed(self._trackers)
        if mode is AttemptMode.OVERWRITE:
            return unit.changes(self._trackers, Encoding.OVERWRITE)
        name = unit.tensor.name
        if name not in path_classes:
            raise ConditionViolated("LC3", name, "prepare carried no loader path class for it; prewarm again")
        encoding = choose_encoding(overwrite_attempt=False, bits_preserved=unit.preserves_bits, path=path_classes[name])
        return unit.changes(self._trackers, encoding)


def _closing(chunks: Generator[Chunk, None, None], buckets: Iterator[Bucket]) -> Generator[Bucket, None, None]:
    """`buckets`, and `chunks` behind them closed as soon as they are, so that other ranks learn of it."""
    try:
        yield from buckets
    finally:
        chunks.close()


def _tally(counts: Counts, chunk: Chunk) -> Chunk:
    counts.chunks += 1
    counts.input_bytes += chunk.input_bytes
    for item in chunk.items:
        counts.emitted += item.count
        if item.encoding is Encoding.XOR:
            counts.xor_items += 1
        else:
            counts.overwrite_items += 1
    return chunk


def _holder(files: BaselineFiles, group: int) -> Hold:
    return lambda key, words: files.hold(f"{group}/{key}", words)


def _refuse_repeats(names: Sequence[str]) -> None:
    for first, second in zip(sorted(names), sorted(names)[1:], strict=False):
        if first == second:
            raise UnsupportedMapping(first, "SC1", "this owner has it twice; each element needs exactly one task")
