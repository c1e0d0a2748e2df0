"""The simulated cluster over real tensors: real owners, payload bytes, transport, staging and native loaders.

`World` is the scheduler of tests/unit/protocol/cluster.py, in which everything that happens is one chosen step. Here a
stream is `DeltaOwner.stream` over drawn shards, a payload is encoded, published, fetched and verified, a staged one is
decoded by the staging queue, and an item is written by the applier through the engine's loader, alone or in a group.
A baseline is copied tensor by tensor. Between any two steps every other node may act, fail or crash.
Only clock, scheduler and network are the test's.
Not handled: threads, sockets and the driving of nodes (tests/unit/runtime, nemo_dcr/testing/local_cluster.py).

Paper: Sections 5 to 6.3; Appendix B   Spec: DeltaRefit   Proofs: xor_reconstructs, loader_commutes
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import numpy as np

from model_tests.candidates import draw_candidate
from model_tests.contents import Contents, Faces, item_name
from model_tests.engines import POOL, Engine, tables
from model_tests.nodes import Draw, Rank, RealOwner, RealPayload, RealReceiver
from nemo_dcr.codec.buckets import Bucket
from nemo_dcr.codec.payload import VerifiedPayload, encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.errors import AttemptFailed, AttemptStopped, InternalError
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Member, OwnerId, PayloadKey, ReceiverId, Version
from nemo_dcr.protocol import endpoint, owner
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol import owner_state as os_
from nemo_dcr.protocol.tags import TrackerTag
from nemo_dcr.source.baseline import BaselineState
from nemo_dcr.testing.local_network import on_the_wire
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.source_cases import random_words
from nemo_dcr.trace import Action, Emit
from nemo_dcr.transport.base import Manifest
from nemo_dcr.transport.memory import MemoryPublisher, MemoryTransport
from tests.unit.protocol.cluster import CHECKPOINT, Cluster


class World(Cluster):
    """A cluster of real parts; `close` gives its engines back."""

    candidates: dict[str, Contents]  # type: ignore[assignment]
    owners: dict[OwnerId, RealOwner]  # type: ignore[assignment]

    def __init__(self, draw: Draw) -> None:
        self.table = tables()[draw.table]
        self.source = LocalSource(
            self.table.tensors, seed=draw.seed, owners=draw.owners, residual=draw.residual, chunk=draw.chunk
        )
        self.ranks_of = {o: Rank(self.source, o, self.source._boxes[o]) for o in self.source.owners}
        self.faces = Faces(self.source, self.table, draw.ranks)
        self.transport = MemoryTransport(window=1 << 20)
        self.announced: dict[PayloadKey, Any] = {}
        self.closed: dict[tuple[AttemptId, OwnerId], Manifest] = {}
        self.lent: list[Engine] = []
        self.admitted: dict[tuple[Member, str], int] = {}
        """The version under which a request was admitted."""
        self.ends_checked: set[tuple[AttemptId, OwnerId]] = set()
        self.draw = draw
        self._arriving: VerifiedPayload | None = None
        self.rng = np.random.default_rng(draw.seed)
        super().__init__(
            instances=draw.instances, ranks=draw.ranks, owners=draw.owners, gate=draw.gate, loaded=draw.loaded
        )
        self.items = {
            o: tuple(item for item, (owned_by, _, _) in self.faces.owned.items() if owned_by == o)
            for o in self.source.owners
        }
        self.groups = {o: tuple((item,) for item in items) for o, items in self.items.items()}
        self.all_items = tuple(self.faces.owned)
        self.candidates = {NO_CANDIDATE: self.faces.contents(NO_CANDIDATE)}
        for o, old in list(self.owners.items()):
            self.owners[o] = self._own_life(old.state)
            self.owners[o].delta.capture(Version(0))

    def close(self) -> None:
        """The engines may be lent again."""
        for own in self.owners.values():
            own.close()
        for engine in self.lent:
            POOL.take_back(self.draw.table, engine)
        self.lent = []

    def _own_life(self, state: os_.OwnerState) -> RealOwner:
        return RealOwner(state, self.ranks_of[state.owner], self.items[state.owner], self.candidates)

    # ------------------------------------------------------------------------------------------------ environment

    def start_receiver(self, name: ReceiverId, *, loaded: bool = False) -> None:
        """A new process; its engine loaded the first weights, or some that nobody knows."""
        rank = int(name.rsplit("/", 1)[1])
        old = self.receivers.get(name)
        if isinstance(old, RealReceiver):
            engine = old.engine
            engine.blank()
        else:
            engine = POOL.lend(self.draw.table, rank, self.ranks)
            self.lent.append(engine)
        words = self.faces.oracle.canonical(NO_CANDIDATE)
        if not loaded:
            words = {meta.name: random_words(self.rng, meta.dtype, meta.numel) for meta in self.table.tensors}
        engine.load(self.table.tensors, words)
        digest = CHECKPOINT if loaded else b""
        state, effects = endpoint.start(Member(name, self._incarnation()), ranks=self.ranks, loaded_digest=digest)
        self.receivers[name] = RealReceiver(state, engine, self.faces)
        self._note(name, effects)

    def kill_instance(self, name: str) -> None:
        """Every rank dies and stays away."""
        super().kill_instance(name)
        for r in self.receivers.values():
            if not r.up and isinstance(r, RealReceiver):
                r.decoded, r.ingest = {}, None

    def lose_baseline(self, o: OwnerId) -> None:
        """The tracker's memory is lost and no stream reads it any more; the process lives on."""
        own = self.owners[o]
        own.close()
        own.copying = None
        own.delta.lose_baseline()
        own.touched()
        self._own(o, os_.BaselineLost("bad memory"))

    def crash_owner(self, o: OwnerId) -> None:
        """The tracker is lost; weights and frozen candidate come back from a replica."""
        old = self.owners[o]
        old.close()
        self._forget(o)
        state, effects = owner.start(
            o,
            self._incarnation(),
            tracker=TrackerTag(),
            candidate=old.state.candidate,
            resident=old.state.resident,
        )
        self.owners[o] = self._own_life(state)
        self._note(f"owner {o}", effects)

    def train(self, seed: int) -> CandidateId:
        """One optimizer step on every owner, then freeze. The seed chooses what changes."""
        name, record = CandidateId(f"c{len(self.candidates)}"), self.record()
        draw_candidate(self.source, name, record.candidate if record else NO_CANDIDATE, seed)
        self.candidates[name] = self.faces.contents(name)
        for o, own in self.owners.items():
            self._own(o, os_.WeightsChanged())
            own.rank.load(name)
            self._own(o, os_.CandidateFrozen(name))
            if own.state.candidate == name:
                own.rank.frozen = name
        return name

    # ----------------------------------------------------------------------------------------------------- steps

    def progress(self) -> list[tuple[Any, ...]]:
        """As of the cluster, in an order that is the same in each process. An owner streams after it copied."""
        steps = [step for step in super().progress() if step[0] != "emit" or self.owners[step[1]].copying is None]
        return sorted(steps, key=repr)

    def _do_call(self, message: tuple[int, Any], *, keep: bool = False) -> None:
        """A call arrives as the bytes that a socket carries."""
        c, call = message
        if not keep:
            self.net.pop(message, None)
        super()._do_call((c, on_the_wire(call)), keep=True)

    def _do_emit(self, o: OwnerId) -> None:
        own = self.owners[o]
        start, publisher = own.started, own.publisher
        assert own.stream is not None
        assert start is not None
        assert publisher is not None
        try:
            self._stream(own, own.stream, start.attempt, publisher)
        except AttemptStopped:
            own.close()  # asked for; StreamStopped follows
        except AttemptFailed as problem:
            own.close()
            self._own(o, os_.StreamFailed(start.attempt, f"{type(problem).__name__}: {problem}"))

    def _stream(
        self, own: RealOwner, stream: Generator[Bucket, None, None], attempt: AttemptId, publisher: MemoryPublisher
    ) -> None:
        """Publish the next payload, or the manifest."""
        o = own.state.owner
        bucket = next(stream, None)
        if bucket is None:
            manifest = publisher.close_set()
            own.close()
            self.closed[attempt, o] = manifest
            self.manifests[attempt, o] = tuple(each.digest for each in manifest.payloads)
            self._own(o, os_.StreamEnded(attempt, manifest.digest))
            return
        key = PayloadKey(attempt, o, len(own.state.published))
        encoded = encode_payload(key, bucket.items, zstd_level=self.source.codec.zstd_level)
        names = tuple(item.tensor.name for item in bucket.items)
        masks = sum(item.encoding is Encoding.XOR for item in bucket.items)
        self._own(o, os_.PayloadFormed(attempt, key.payload, names, masks))
        payload = RealPayload(key, bucket, encoded.data)
        try:
            self.announced[key] = publisher.publish(key, encoded.data, encoded.digest)
        except AttemptFailed:
            self.unsent[key] = payload
            raise
        self.payloads[key] = payload
        self._own(o, os_.PayloadPublished(attempt, key.payload, encoded.digest))

    def _do_stopped(self, o: OwnerId) -> None:
        own = self.owners[o]
        attempt, own.stopping = own.stopping, None
        own.close()
        self._own(o, os_.StreamStopped(attempt))

    def _do_copy(self, o: OwnerId) -> None:
        own, version = self.owners[o], self.owners[o].copy_version
        try:
            name = own.copy_next()
        except AttemptFailed as problem:
            own.copying = None
            own.delta.lose_baseline()
            self._own(o, os_.BaselineLost(str(problem)))
            return
        if name:
            self._own(o, os_.ItemCopied(version, name))
            return
        own.copying = None
        self._own(o, os_.BaselineFilled(version))
        if not os_.holds_version(own.state.tracker, version):
            own.delta.lose_baseline()  # the weights changed under the copy
            own.touched()

    def _do_payload(self, name: ReceiverId, key: PayloadKey, damage: int | None = None) -> None:
        """A payload arrives; `damage` is the bit of it that is wrong."""
        r = self.receivers[name]
        if not r.up:
            return
        announced, attempt = self.announced[key], r.state.attempt
        known = r.state.seen.get(key.owner, {}).get(key.payload)
        if key.attempt != attempt or known == announced.digest:
            self._receive(name, es.PayloadStaged(key, announced.digest))  # stale or a duplicate: not fetched
            return
        data = bytearray(self.transport.subscribe(attempt, (key.owner,)).fetch(announced))
        if damage is not None:
            data[damage // 8 % len(data)] ^= 1 << damage % 8
        try:
            verified = verify_payload(data, limits=self.source.codec)
        except AttemptFailed as problem:
            self._receive(name, es.PayloadRejected(attempt, str(problem)))
            return
        if (verified.key, verified.digest) != (key, announced.digest):
            self._receive(name, es.PayloadRejected(attempt, f"payload {key} holds another one"))
            return
        self._stage(name, verified)

    def _stage(self, name: ReceiverId, verified: VerifiedPayload) -> None:
        self._arriving = verified
        self._receive(name, es.PayloadStaged(verified.key, verified.digest))
        self._arriving = None

    def foreign_payload(self, name: ReceiverId, key: PayloadKey) -> None:
        """A whole payload under this identifier arrives that is not the one that was announced."""
        r = self.receivers[name]
        foreign = encode_payload(key, self.payloads[key].bucket.items, zstd_level=3)  # type: ignore[attr-defined]
        if r.up and r.ingest is not None:
            self._stage(name, verify_payload(foreign.data, limits=self.source.codec))

    def _do_manifest(self, name: ReceiverId, which: tuple[AttemptId, OwnerId]) -> None:
        manifest = self.closed[which]
        if self.receivers[name].up:
            self._receive(name, es.ManifestSeen(*which, len(manifest.payloads), manifest.digest))

    def _do_apply(self, name: ReceiverId) -> None:
        """The applying thread takes the next group, decodes it and asks."""
        r = self.receivers[name]
        assert isinstance(r, RealReceiver)
        assert r.ingest is not None
        attempt = r.state.attempt
        try:
            group = r.ingest.take_group(0.0)
        except AttemptFailed as problem:
            self._receive(name, es.ApplyFailed(attempt, str(problem)))
            return
        for each in group:
            items = [(i.tensor.name, i.encoding is Encoding.XOR, i) for i in each.items]
            items += [(skipped, False, None) for skipped in each.skipped]
            r.decoded[each.key] = [(each.key, item_name(each.key.owner, tensor), xor, i) for tensor, xor, i in items]
        if group:
            self._receive(name, es.ApplyRequested(attempt, tuple(each.key for each in group)))
        self._report_applied(name)

    def _report_applied(self, name: ReceiverId) -> None:
        """Tell the machine of every permitted payload that is written whole."""
        r = self.receivers[name]
        assert isinstance(r, RealReceiver)
        for key in sorted(r.state.writing):
            if not any(issued[0] == key for issued in r.issued):
                self._receive(name, es.PayloadsApplied(key.attempt, (key,)))

    def _do_write(self, name: ReceiverId, count: int = 1) -> None:
        """The loader takes so many permitted items in one call."""
        r = self.receivers[name]
        assert isinstance(r, RealReceiver)
        taken, r.issued = r.issued[:count], r.issued[count:]
        attempt = taken[0][0].attempt
        held = {id(item): key for key, _, _, item in taken if item is not None}

        def applied(item: Item) -> None:
            r.wrote()
            self._receive(name, es.ItemApplied(attempt, held[id(item)], item.tensor.name))

        try:
            r.engine.applier.apply([item for *_, item in taken if item is not None], attempt=attempt, on_item=applied)
        except AttemptFailed as problem:
            r.wrote()
            r.issued = []
            self._receive(name, es.ApplyFailed(attempt, f"{type(problem).__name__}: {problem}"))
            return
        for key, item, _, real in taken:
            if real is None:  # this rank holds no element of it
                self._receive(name, es.ItemApplied(attempt, key, self.faces.owned[item][1].name))
        self._report_applied(name)

    # ------------------------------------------------------------------------------------------- effects of machines

    def _note(self, node: str, effects: Any) -> list[Any]:
        """Keep the lines and do what real parts have to do; what is left is the cluster's."""
        told = [effect for effect in effects if not (isinstance(effect, Emit) and self._is_of_no_item(node, effect))]
        return [effect for effect in super()._note(node, told) if not self._perform(node, effect)]

    def _is_of_no_item(self, node: str, line: Emit) -> bool:
        """A tensor of which an owner has no element is no item, and the copy of it no step."""
        copied = line.action is Action.COPY_ITEM
        return copied and item_name(OwnerId(int(node.split()[1])), str(line.args["name"])) not in self.faces.owned

    def _perform(self, node: str, effect: Any) -> bool:
        """Do what a real part has to do; False leaves the effect to the cluster too."""
        match effect:
            case es.StartIntake(attempt, _):
                self._receiver(node).begin_intake(attempt, self.table.metas, self.source.codec)
            case es.Stage(key):
                if self._arriving is None or self._arriving.key != key:
                    raise InternalError(f"payload {key} was accepted but did not arrive")
                self._receiver(node).ingest.stage(self._arriving)
                return False
            case es.WakeApply() if self._receiver(node).ingest is not None:
                self._receiver(node).ingest.release()
                return False
            case es.Drain() if self._receiver(node).ingest is not None:
                self._receiver(node).ingest.stop()
                return False
            case es.AdmitRequest(request):
                r = self._receiver(node)
                self.admitted[r.state.member, request] = r.state.tag.version
            case es.PermitApply(_, keys):
                r = self._receiver(node)
                for key in keys:
                    r.staged.pop(key)
                    r.issued += r.decoded.pop(key)
            case os_.StartStream():
                own = self._owner(node)
                own.started = effect
                own.publisher = self.transport.publisher(effect.attempt, own.state.owner)
                own.stream = self._buckets(own, effect)
            case os_.StopStream():
                own = self._owner(node)
                if own.publisher is not None:
                    own.publisher.stop()
                return False
            case os_.CopyCandidate(_, version, _) | os_.RefillBaseline(_, version, _):
                own = self._owner(node)
                own.copy_effect, own.copy_version, own.copying = effect, version, []
                tag = own.delta.tag
                own.rebuilds = tag is not None and tag.state is BaselineState.LOST
            case os_.ThawCandidate(candidate):
                self._owner(node).rank.end_transition(candidate)
            case os_.ReloadCommitted():
                own = self._owner(node)
                self._own(own.state.owner, os_.WeightsReloaded(own.rank.reload(own.delta)))
            case _:
                return False
        return True

    def _buckets(self, own: RealOwner, start: os_.StartStream) -> Generator[Bucket, None, None]:
        buckets = own.delta.stream(
            start.mode,
            self.table.classes,
            attempt=start.attempt,
            base=start.version,
            stopped=lambda: own.stopping == start.attempt,
        )
        with contextlib.closing(buckets):  # type: ignore[type-var]
            yield from buckets

    def _receiver(self, node: str) -> RealReceiver:
        r = self.receivers[ReceiverId(node)]
        assert isinstance(r, RealReceiver)
        return r

    def _owner(self, node: str) -> RealOwner:
        return self.owners[OwnerId(int(node.split()[1]))]
