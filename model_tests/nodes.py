"""The nodes of a `World`: a receiver over an engine, an owner over a `DeltaOwner`, payloads of real bytes.

Each stands in for its twin in tests/unit/protocol/cluster.py and has the same attributes. Where the twin keeps words,
this one reads them from what really holds them.
Not handled: what makes them act (world).

Paper: Sections 5 to 6.1   Spec: rcv, store, own, base
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model_tests.contents import Contents, Faces, Held, ItemName, item_name
from model_tests.engines import Engine
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.buckets import Bucket
from nemo_dcr.codec.records import Encoding
from nemo_dcr.config import CodecConfig, GateMode, QueueConfig
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, PayloadKey, Version
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol import owner_state as os_
from nemo_dcr.receiver.ingest import Ingest
from nemo_dcr.source.baseline import Baseline
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.testing.local_oracle import StoredBits, stored_bits
from nemo_dcr.testing.local_source import LocalRank
from nemo_dcr.transport.memory import MemoryPublisher
from tests.unit.protocol.cluster import Payload, Receiver

Issued = tuple[PayloadKey, str, bool, Any]


class RealReceiver(Receiver):
    """One life of one rank: its storage is the engine's."""

    def __init__(self, state: es.EndpointState, engine: Engine, faces: Faces) -> None:
        self.engine = engine
        self.ingest: Ingest | None = None
        self.decoded: dict[PayloadKey, list[Issued]] = {}
        self._faces = faces
        self._bits: StoredBits | None = None
        self._held: dict[ItemName, Held] = {}
        super().__init__(state, {})

    @property
    def bits(self) -> StoredBits:
        """Every stored bit."""
        if self._bits is None:
            self._bits = stored_bits(self.engine.model)
            self._held = self._faces.held(self.engine.model.rank, self._bits)
        return self._bits

    @property
    def storage(self) -> dict[ItemName, Held]:  # type: ignore[override]
        """What the rank holds for each item."""
        assert self.bits
        return self._held

    @storage.setter
    def storage(self, words: object) -> None:
        """Storage is read from the engine."""

    def begin_intake(self, attempt: AttemptId, metas: Mapping[str, TensorMeta], codec: CodecConfig) -> None:
        """An empty staging queue for an attempt; items that the loader skips on this rank are not decoded."""
        skipped, queue = self.engine.table.skipped, QueueConfig(group_payloads=2)
        self.decoded = {}
        self.ingest = Ingest(attempt, metas, skipped=skipped, codec=codec, queue=queue, held=True)

    def wrote(self) -> None:
        """Storage may be another now."""
        self._bits = None


class Rank(LocalRank):
    """A trainer rank that knows which candidate its live weights are."""

    live = NO_CANDIDATE

    def load(self, candidate: CandidateId) -> None:
        """Take this rank's shards of a candidate's weights."""
        self.live = candidate
        super().load(candidate)


class RealOwner:
    """One life of one owner: its baseline and weights are those of a `DeltaOwner`. Attributes as of `cluster.Owner`."""

    def __init__(
        self, state: os_.OwnerState, rank: Rank, items: Sequence[ItemName], candidates: Mapping[str, Contents]
    ) -> None:
        self.state = state
        self.delta = rank.new_delta()
        self.rank = rank
        self.up = True
        self.stream: Generator[Bucket, None, None] | None = None
        self.started: os_.StartStream | None = None
        self.publisher: MemoryPublisher | None = None
        self.stopping: AttemptId | None = None
        self.copying: list[str] | None = None
        """The names that were copied."""
        self.copy_version: Version | None = None
        self.copy_effect: os_.CopyCandidate | os_.RefillBaseline | None = None
        self.rebuilds = False
        self._items = items
        self._candidates = candidates
        self._keys = _tracker_keys(self.delta, items)
        self._baseline: dict[ItemName, Held] | None = None

    @property
    def weights(self) -> Contents:
        """The candidate that the live weights are, by item."""
        live = self._candidates[self.rank.live]
        return {item: live[item] for item in self._items}

    @property
    def baseline(self) -> dict[ItemName, Held]:
        """The baseline tensor by tensor, also in the middle of an update; an item that is lost is no content."""
        if self._baseline is None:
            found: dict[ItemName, Held] = {}
            for item, keys in self._keys.items():
                words = [trackers._words[key].tobytes() for trackers, key in keys if key in trackers._words]
                found[item] = Held(b"".join(words))
            self._baseline = found
        return self._baseline

    def copy_next(self) -> str:
        """Copy one tensor more into the baseline, by a copy that breaks off behind it; empty when all are copied.

        Raises: AttemptFailed when the baseline can not become that version.
        """
        effect, version, before = self.copy_effect, self.copy_version, self.copying or []
        names: list[str] = []

        def copied(name: str) -> None:
            names.append(name)
            if len(names) > len(before):
                raise Paused

        self.touched()
        committed = effect.candidate if effect is not None else NO_CANDIDATE
        try:
            if isinstance(effect, os_.RefillBaseline):
                opened = self.state.candidate
                self.delta.rebuild(version, copied, open_candidate=opened, committed_candidate=committed)
            elif self.rebuilds:
                self.delta.rebuild(version, copied, open_candidate=committed, committed_candidate=committed)
            else:
                self.delta.update_baseline(version, copied)
        except Paused:
            self.copying = names
            return names[-1]
        return ""

    def touched(self) -> None:
        """The baseline may be another now."""
        self._baseline = None

    def close(self) -> None:
        """No stream runs any more."""
        if self.publisher is not None:
            self.publisher.stop()
        if self.stream is not None:
            self.stream.close()
        self.stream = self.publisher = None


class Paused(Exception):
    """Breaks a copy into the baseline off behind one tensor; the copy is repeatable."""


@dataclass(frozen=True)
class Draw:
    """What one example is made of."""

    table: int = 0
    seed: int = 0
    instances: int = 2
    ranks: int = 1
    owners: int = 1
    gate: GateMode = GateMode.SYNC
    residual: bool = False
    chunk: int = 64
    """Input bytes at which a chunk is full; a payload holds up to two chunks."""
    loaded: bool = False
    """Every process starts with the first weights, and can prove it."""


@dataclass(frozen=True)
class RealPayload(Payload):
    """The items of one payload and its bytes."""

    bucket: Bucket
    data: bytes

    def __init__(self, key: PayloadKey, bucket: Bucket, data: bytes) -> None:
        records = tuple(
            (item_name(key.owner, item.tensor.name), item.encoding is Encoding.XOR, 0) for item in bucket.items
        )
        for name, value in (("key", key), ("records", records), ("bucket", bucket), ("data", data)):
            object.__setattr__(self, name, value)


def _tracker_keys(delta: DeltaOwner, items: Sequence[ItemName]) -> dict[ItemName, list[tuple[Baseline, str]]]:
    """Where the baseline of each item is kept: its trackers, or its residual baseline, in the order of its content."""
    keys: dict[ItemName, list[tuple[Baseline, str]]] = {item: [] for item in items}
    for task in delta._tasks:
        item = item_name(delta.owner, task.tensor.name)
        if item in keys:
            keys[item].append((delta._trackers, task.key))
    if delta._residual is not None:
        for tensor in delta._residual.tensors:
            item = item_name(delta.owner, tensor.name)
            if item in keys:
                keys[item].append((delta._residual.outputs, tensor.name))
    return keys
