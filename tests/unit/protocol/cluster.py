"""A whole cluster in memory: real machines, real words, and a network that loses, repeats, reorders and delays.

Nothing runs by itself. `progress()` lists every step that could happen now without a fault, `do(step)` performs one.
Faults are methods. Storage is real: XOR flips words, overwrites set them, a wrong base shows as wrong words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.control.memory import MemoryControl
from nemo_dcr.ids import (
    AttemptId,
    CandidateId,
    Incarnation,
    InstanceId,
    Member,
    OwnerId,
    PayloadKey,
    ReceiverId,
    Version,
    instance_of,
    receiver_id,
)
from nemo_dcr.protocol import coordinator_events as ce
from nemo_dcr.protocol import endpoint, endpoint_report, owner, transition
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol import owner_state as os_
from nemo_dcr.protocol.digests import manifest_digest
from nemo_dcr.protocol.tags import TrackerKind, TrackerTag
from nemo_dcr.protocol.transition_state import CoordinatorConfig, CoordinatorState, Phase
from nemo_dcr.record import AttemptEntry, AttemptMode, CommitRequest, Committed, Record
from nemo_dcr.trace import Emit

Words = dict[str, int]
Step = tuple[Any, ...]

# NaN with payload, -0.0, a subnormal, zero, an ordinary value: words that floating-point code likes to change.
SPECIAL = (0x7FC1, 0x8000, 0x0001, 0x0000, 0x3F80, 0xFFFF)


@dataclass(frozen=True)
class Payload:
    """Content of one payload: item name, XOR or overwrite, word."""

    key: PayloadKey
    records: tuple[tuple[str, bool, int], ...]

    @property
    def digest(self) -> bytes:
        return manifest_digest([repr((self.key, self.records)).encode()])


@dataclass
class Receiver:
    state: es.EndpointState
    storage: Words
    up: bool = True
    staged: dict[PayloadKey, Payload] = field(default_factory=dict)
    issued: list[tuple[PayloadKey, str, bool, int]] = field(default_factory=list)
    flushing: AttemptId | None = None
    draining: AttemptId | None = None
    awake: bool = False
    forged: set[PayloadKey] = field(default_factory=set)
    """Payloads that are applied with bytes that no owner sent under that key."""
    foreign: set[str] = field(default_factory=set)
    """Items whose words were made by such bytes."""


@dataclass
class Owner:
    state: os_.OwnerState
    baseline: Words
    weights: Words
    up: bool = True
    stream: list[tuple[str, ...]] | None = None
    started: os_.StartStream | None = None
    stopping: AttemptId | None = None
    copying: list[str] | None = None
    copy_version: Version | None = None


@dataclass
class Coordinator:
    state: CoordinatorState
    up: bool = True
    calls: dict[Any, None] = field(default_factory=dict)
    survey: ce.Surveyed | None = None
    control: Any = None
    control_reply: Any = None
    waits: AttemptId | None = None
    polled: dict[str, tuple[int, int]] = field(default_factory=dict)


def _fork_control(control: MemoryControl, now: Callable[[], float]) -> MemoryControl:
    other = MemoryControl(now=now)
    other._epoch, other._clock = control._epoch, control._clock
    other._attempts, other._records = list(control._attempts), list(control._records)
    other._dead, other._journal = set(control._dead), list(control._journal)
    return other


CHECKPOINT = b"checkpoint"
"""Digest of what every process loads when the cluster starts loaded."""


class Cluster:
    """2 coordinators, `instances` engine instances of `ranks` ranks, `owners` owners with 3 items each.

    `groups` names the items of each owner instead, payload by payload. A cluster that starts `loaded` holds the first
    weights everywhere; its baselines are known to be the checkpoint that the receivers loaded, when it `proves`.
    """

    def __init__(
        self,
        *,
        instances: int = 2,
        ranks: int = 1,
        owners: int = 1,
        gate: GateMode = GateMode.SYNC,
        groups: Mapping[OwnerId, tuple[tuple[str, ...], ...]] | None = None,
        coordinators: int = 2,
        bootstrap_instances: int | None = None,
        loaded: bool = False,
        proves: bool = True,
    ) -> None:
        self.now = 1000.0
        self.control = MemoryControl(now=lambda: self.now)
        self.groups = dict(groups or {OwnerId(o): ((f"o{o}.a", f"o{o}.b"), (f"o{o}.c",)) for o in range(owners)})
        self.items = {o: tuple(i for group in groups for i in group) for o, groups in self.groups.items()}
        self.all_items = tuple(i for items in self.items.values() for i in items)
        self.candidates: dict[str, Words] = {"": {item: SPECIAL[n % 6] for n, item in enumerate(self.all_items)}}
        self.versions: list[Words] = []
        self.refit = RefitConfig(gate=gate, max_attempts=4)
        self.ranks = ranks
        self.incarnations = 0
        self.next_call = 0
        self.asked: dict[int, tuple[int | None, Any]] = {}
        self.net: dict[tuple[int, Any], None] = {}
        self.replies: list[tuple[int, Any, Any]] = []
        self.pushes: list[Any] = []
        self.late_control: list[Any] = []
        self.payloads: dict[PayloadKey, Payload] = {}
        self.unsent: dict[PayloadKey, Payload] = {}
        """Told by a line, and then their stream was stopped before they went out."""
        self.manifests: dict[tuple[AttemptId, OwnerId], tuple[bytes, ...]] = {}
        self.acks: set[tuple[AttemptId, Member]] = set()
        self.emits: list[Emit] = []
        self.lines: list[tuple[str, Emit]] = []
        """The same with the name of the node that traced it."""
        self.outcomes: list[Any] = []
        self.commits: list[CommitRequest] = []
        self.attempts_seen: dict[Member, AttemptId] = {}
        self.checked: set[PayloadKey] = set()
        self.last_version = -1
        self.acknowledged: dict[Member, AttemptId] = {}
        self.killed: frozenset[CandidateId] = frozenset()
        self.service: tuple[int, dict[ReceiverId, tuple[Words, bool, bool]]] = (0, {})
        """What step properties saw last: count of versions; storage and gate of each receiver, bound by the record."""
        self.sent: list[tuple[int, Any]] = []
        self.receivers: dict[ReceiverId, Receiver] = {}
        self.owners: dict[OwnerId, Owner] = {}
        for i in range(instances):
            for rank in range(ranks):
                self.start_receiver(receiver_id(InstanceId(f"e{i}"), rank), loaded=loaded)
        for o in self.groups:
            words = {item: self.candidates[""][item] for item in self.items[o]}
            kept = TrackerTag(TrackerKind.AT)
            digest = CHECKPOINT if loaded and proves else b""
            state, effects = owner.start(
                o, self._incarnation(), tracker=kept, resident=CandidateId(""), baseline_digest=digest
            )
            self._note(f"owner {o}", effects)
            self.owners[o] = Owner(state, dict(words), dict(words))
        first = instances if bootstrap_instances is None else bootstrap_instances
        config = CoordinatorConfig(refit=self.refit, owners=tuple(self.owners), bootstrap_instances=first)
        self.coordinators = [Coordinator(transition.start(config)) for _ in range(coordinators)]

    def fork(self) -> Cluster:
        """A copy that goes its own way. States of machines are frozen and shared, containers are copied."""
        other = object.__new__(type(self))
        other.__dict__.update(
            {
                name: value.copy() if isinstance(value, (dict, list, set)) else value
                for name, value in self.__dict__.items()
            }
        )
        other.control = _fork_control(self.control, lambda: other.now)
        for name, r in self.receivers.items():
            storage, staged, issued = dict(r.storage), dict(r.staged), list(r.issued)
            other.receivers[name] = Receiver(
                r.state, storage, r.up, staged, issued, r.flushing, r.draining, r.awake, set(r.forged), set(r.foreign)
            )
        for o, own in self.owners.items():
            stream = None if own.stream is None else list(own.stream)
            copying = None if own.copying is None else list(own.copying)
            baseline, weights = dict(own.baseline), dict(own.weights)
            other.owners[o] = Owner(
                own.state, baseline, weights, own.up, stream, own.started, own.stopping, copying, own.copy_version
            )
        other.coordinators = [
            Coordinator(n.state, n.up, dict(n.calls), n.survey, n.control, n.control_reply, n.waits, dict(n.polled))
            for n in self.coordinators
        ]
        return other

    def stored_as(self, name: ReceiverId, item: str) -> frozenset[str]:
        """The candidates whose words the receiver stores for one item; all of them for one that it does not hold."""
        word = self.receivers[name].storage[item]
        return frozenset(cand for cand, words in self.candidates.items() if words[item] == word)

    def items_of(self, key: PayloadKey) -> tuple[str, ...]:
        """The items that a payload carries records of."""
        return tuple(item for item, _, _ in self.payloads[key].records)

    def unwritten(self, name: ReceiverId) -> set[tuple[PayloadKey, str]]:
        """Items that the receiver accepted and whose words it has not written yet."""
        r = self.receivers[name]
        waiting = r.state.pending - r.state.writing
        return {(key, item) for key in waiting for item in self.items_of(key)} | {(i[0], i[1]) for i in r.issued}

    def based_as(self, o: OwnerId, item: str) -> frozenset[str]:
        """The candidates whose words the owner's baseline holds for one of its items."""
        word = self.owners[o].baseline[item]
        return frozenset(cand for cand, words in self.candidates.items() if words[item] == word)

    # ------------------------------------------------------------------------------------------------ environment

    def _incarnation(self) -> Incarnation:
        self.incarnations += 1
        return Incarnation(self.incarnations)

    def start_receiver(self, name: ReceiverId, *, loaded: bool = False) -> None:
        digest = CHECKPOINT if loaded else b""
        state, effects = endpoint.start(Member(name, self._incarnation()), ranks=self.ranks, loaded_digest=digest)
        garbage = {item: 0xDEAD ^ n for n, item in enumerate(self.all_items)}
        self.receivers[name] = Receiver(state, dict(self.candidates[""]) if loaded else garbage)
        self._note(name, effects)

    def kill_instance(self, name: str) -> None:
        """Every rank dies and stays away."""
        for receiver, r in self.receivers.items():
            if instance_of(receiver) == name:
                r.up, r.issued, r.staged, r.flushing, r.draining = False, [], {}, None, None
                self._forget(receiver)

    def restart_instance(self, name: str) -> None:
        """Every rank starts again, with a new incarnation and raw storage."""
        for receiver in [receiver for receiver in self.receivers if instance_of(receiver) == name]:
            self._forget(receiver)
            self.start_receiver(receiver)

    def _forget(self, endpoint_name: Any) -> None:
        """Calls that a dead process took in are never answered."""
        dead = [
            i
            for i, (_, call) in self.asked.items()
            if getattr(call, "receiver", getattr(call, "owner", None)) == endpoint_name
        ]
        for i in dead:
            del self.asked[i]

    def lose_baseline(self, o: OwnerId) -> None:
        """The tracker's memory is lost and no stream reads it any more; the process lives on."""
        self.owners[o].stream = None
        self.owners[o].baseline = dict.fromkeys(self.items[o], 2989)
        self.owners[o].copying = None
        self._own(o, os_.BaselineLost("bad memory"))

    def crash_owner(self, o: OwnerId) -> None:
        """The tracker is lost; weights and frozen candidate come back from a replica."""
        old = self.owners[o]
        self._forget(o)
        state, effects = owner.start(
            o,
            self._incarnation(),
            tracker=TrackerTag(),
            candidate=old.state.candidate,
            resident=old.state.resident,
        )
        self.owners[o] = Owner(state, dict.fromkeys(self.items[o], 2989), old.weights)
        self._note(f"owner {o}", effects)

    def become(self, c: int) -> None:
        """Coordinator `c` (re)starts and takes over; the other one becomes a zombie."""
        node = self.coordinators[c]
        self.coordinators[c] = Coordinator(transition.start(node.state.config))
        self._coordinate(c, ce.BecomeCoordinator())

    def train(self, seed: int) -> CandidateId:
        """One optimizer step on every owner, then freeze."""
        name = CandidateId(f"c{len(self.candidates)}")
        words = self.current_words()
        for n, item in enumerate(self.all_items):
            if (seed >> n) & 1 or n == seed % len(self.all_items):
                words[item] ^= 1 << ((seed + 3 * n) % 16)
        self.candidates[name] = words
        for o in self.owners:
            self._own(o, os_.WeightsChanged())
            self.owners[o].weights = {item: words[item] for item in self.items[o]}
            self._own(o, os_.CandidateFrozen(name))
        return name

    def current_words(self) -> Words:
        return {item: word for o in self.owners.values() for item, word in o.weights.items()}

    def can_train(self) -> bool:
        idle = all(
            o.state.candidate == "" and o.state.tracker.kind is not TrackerKind.UPDATING for o in self.owners.values()
        )
        return idle and bool(self.versions)

    def words_of(self, version: int) -> Words:
        return self.versions[version]

    def payloads_of(self, attempt: int) -> list[PayloadKey]:
        return [key for key in self.payloads if key.attempt == attempt]

    def record(self) -> Record | None:
        return self.control.history()[-1] if self.control.history() else None

    def entry(self, attempt: AttemptId) -> AttemptEntry:
        return self.control._attempts[attempt - 1]

    # ----------------------------------------------------------------------------------------------------- steps

    def progress(self) -> list[Step]:
        """Every fault-free step that is possible now and changes something."""
        steps: list[Step] = []
        for c, node in enumerate(self.coordinators):
            if not node.up:
                continue
            away = [name for name, r in self.receivers.items() if not r.up]
            for call in node.calls:
                if (
                    getattr(call, "receiver", None) not in away
                    and (c, call) not in self.net
                    and not self._replied(c, call)
                ):
                    steps.append(("send", c, call))
            steps += [("lost", c, name) for name in away if self._misses(node, name)]
            if node.survey is not None:
                steps.append(("survey", c))
            if node.control is not None:
                steps.append(("control", c))
            if node.control_reply is not None:
                steps.append(("control_reply", c))
            if node.waits is not None:
                steps.append(("wait", c))
            if node.state.phase not in (Phase.OUT, Phase.READY, Phase.SURVEYING):
                for name, receiver in self.receivers.items():
                    if receiver.up and self._fresh(
                        node, name, receiver.state.member.incarnation, receiver.state.revision
                    ):
                        steps.append(("poll", c, name))
                for o, own in self.owners.items():
                    if own.up and self._fresh(node, f"owner {o}", own.state.incarnation, own.state.revision):
                        steps.append(("poll_owner", c, o))
            if node.state.phase is Phase.READY and self._wants_look(c):
                steps.append(("look", c))
        steps += [("call", message) for message in self.net]
        steps += [("reply", i) for i in range(len(self.replies))]
        steps += [("push", i) for i in range(len(self.pushes))]
        for name, r in self.receivers.items():
            if not r.up:
                continue
            state = r.state
            for key in self.payloads:
                running = key.attempt == state.attempt and not state.stopped and not state.acked
                if running and key.payload not in state.seen.get(key.owner, {}):
                    steps.append(("payload", name, key))
            for attempt, o in self.manifests:
                if attempt == state.attempt and not state.stopped and o not in state.manifests and not state.acked:
                    steps.append(("manifest", name, (attempt, o)))
            if r.staged and r.awake and not r.issued:
                steps.append(("apply", name))
            if r.issued:
                steps.append(("write", name))
            if r.flushing is not None:
                steps.append(("flush", name))
            if r.draining is not None and not r.issued:
                steps.append(("drain", name))
        for o, own in self.owners.items():
            if own.stream is not None:
                steps.append(("emit", o))
            if own.stopping is not None:
                steps.append(("stopped", o))
            if own.copying is not None:
                steps.append(("copy", o))
        return steps

    def _replied(self, c: int, call: Any) -> bool:
        return any(reply[0] == c and reply[1] == call for reply in self.replies) or any(
            asked == (c, call) for asked in self.asked.values()
        )

    def _misses(self, node: Coordinator, name: ReceiverId) -> bool:
        """The coordinator waits for a dead receiver and was not told yet."""
        if any(getattr(call, "receiver", None) == name for call in node.calls):
            return True
        attempt = node.state.attempt
        return (
            node.state.phase is Phase.RUNNING
            and attempt is not None
            and name in {member.receiver for member in attempt.plan.required} - attempt.gone
        )

    def _fresh(self, node: Coordinator, name: str, incarnation: int, revision: int) -> bool:
        return node.polled.get(name, (0, -1)) < (incarnation, revision)

    def _wants_look(self, c: int) -> bool:
        """The runtime of a ready coordinator looks again when an endpoint is not where it should be."""
        record = self.record()
        if self.coordinators[c].state.record != record:
            return True
        frozen = any(o.state.candidate for o in self.owners.values())
        lost = any(
            o.state.tracker.kind is TrackerKind.LOST and o.state.resident is not None for o in self.owners.values()
        )
        away = any(not r.state.gate_open for r in self.receivers.values() if r.up)
        if record is None or all(not r.up for r in self.receivers.values()):
            return False
        return frozen or lost or away

    def do(self, step: Step) -> None:
        """Perform one step of `progress`, or one of `replay`."""
        getattr(self, f"_do_{step[0]}")(*step[1:])

    def _do_send(self, c: int, call: Any) -> None:
        self.net[(c, call)] = None
        self.sent.append((c, call))

    def _do_lost(self, c: int, name: ReceiverId) -> None:
        self.lose_receiver(c, name)

    def _do_call(self, message: tuple[int, Any], *, keep: bool = False) -> None:
        c, call = message
        if not keep:
            self.net.pop(message, None)
        self.next_call += 1
        if hasattr(call, "receiver"):
            if self.receivers[call.receiver].up:
                self.asked[self.next_call] = (c, call)
                self._receive(call.receiver, es.Called(self.next_call, call))
        elif self.owners[call.owner].up:
            self.asked[self.next_call] = (c, call)
            self._own(call.owner, os_.OwnerCalled(self.next_call, call))

    def _do_reply(self, i: int) -> None:
        c, call, reply = self.replies.pop(i)
        node = self.coordinators[c]
        if not node.up or call not in node.calls:
            return
        del node.calls[call]
        kind = ce.ReceiverAnswered if hasattr(call, "receiver") else ce.OwnerAnswered
        self._coordinate(c, kind(call, reply))

    def _do_push(self, i: int) -> None:
        report = self.pushes.pop(i)
        for c, node in enumerate(self.coordinators):
            if node.up:
                kind = ce.ReceiverReported if hasattr(report, "receiver") else ce.OwnerReported
                self._coordinate(c, kind(report))

    def _do_survey(self, c: int) -> None:
        survey, self.coordinators[c].survey = self.coordinators[c].survey, None
        self._coordinate(c, survey)

    def _do_control(self, c: int) -> None:
        node = self.coordinators[c]
        ask, node.control = node.control, None
        node.control_reply = self._execute(ask)

    def _do_late_control(self, i: int) -> None:
        self._execute(self.late_control.pop(i))

    def _do_control_reply(self, c: int) -> None:
        node = self.coordinators[c]
        reply, node.control_reply = node.control_reply, None
        self._coordinate(c, ce.ControlReplied(reply))

    def _do_wait(self, c: int) -> None:
        node = self.coordinators[c]
        attempt, node.waits = node.waits, None
        self.now += self.refit.commit_deadline_s + self.refit.clock_skew_s + 1
        self._coordinate(c, ce.CommitDeadlinePassed(attempt))

    def _do_look(self, c: int) -> None:
        self._coordinate(c, ce.LookAgain())

    def _do_poll(self, c: int, name: ReceiverId) -> None:
        state = self.receivers[name].state
        self.coordinators[c].polled[name] = (state.member.incarnation, state.revision)
        self._coordinate(c, ce.ReceiverReported(endpoint_report.report(state)))

    def _do_poll_owner(self, c: int, o: OwnerId) -> None:
        state = self.owners[o].state
        self.coordinators[c].polled[f"owner {o}"] = (state.incarnation, state.revision)
        self._coordinate(c, ce.OwnerReported(owner.report(state)))

    def _do_payload(self, name: ReceiverId, key: PayloadKey) -> None:
        if self.receivers[name].up:
            self._receive(name, es.PayloadStaged(key, self.payloads[key].digest))

    def _do_manifest(self, name: ReceiverId, which: tuple[AttemptId, OwnerId]) -> None:
        digests = self.manifests[which]
        if self.receivers[name].up:
            self._receive(name, es.ManifestSeen(*which, len(digests), manifest_digest(digests)))

    def _do_apply(self, name: ReceiverId) -> None:
        r = self.receivers[name]
        keys = tuple(sorted(r.staged)[:2])
        self._receive(name, es.ApplyRequested(keys[0].attempt, keys))

    def _do_write(self, name: ReceiverId) -> None:
        r = self.receivers[name]
        key, item, xor, word = r.issued.pop(0)
        r.storage[item] = r.storage[item] ^ word if xor else word
        if key in r.forged:
            r.foreign.add(item)
        elif not xor:
            r.foreign.discard(item)
        self._receive(name, es.ItemApplied(key.attempt, key, item))
        if not any(issued[0] == key for issued in r.issued):
            self._receive(name, es.PayloadsApplied(key.attempt, (key,)))

    def _do_flush(self, name: ReceiverId) -> None:
        r = self.receivers[name]
        attempt, r.flushing = r.flushing, None
        before = r.state.acked
        self._receive(name, es.Flushed(attempt))
        if r.state.acked and not before:
            self.acks.add((attempt, r.state.member))

    def _do_drain(self, name: ReceiverId) -> None:
        r = self.receivers[name]
        attempt, r.draining = r.draining, None
        r.staged.clear()
        r.awake = False
        self._receive(name, es.Drained(attempt))

    def _do_emit(self, o: OwnerId) -> None:
        own = self.owners[o]
        started = own.started
        if own.stream:
            group = own.stream.pop(0)
            records = self._records(own, started, group)
            if not records:
                return
            key = PayloadKey(started.attempt, o, len(own.state.published))
            self.payloads[key] = Payload(key, records)
            names = tuple(record[0] for record in records)
            self._own(o, os_.PayloadFormed(key.attempt, key.payload, names, sum(record[1] for record in records)))
            self._own(o, os_.PayloadPublished(key.attempt, key.payload, self.payloads[key].digest))
            return
        own.stream = None
        self.manifests[(started.attempt, o)] = own.state.published
        self._own(o, os_.StreamEnded(started.attempt, manifest_digest(own.state.published)))

    def _records(self, own: Owner, started: os_.StartStream, group: Iterable[str]) -> tuple[tuple[str, bool, int], ...]:
        records = []
        for item in group:
            new, old = own.weights[item], own.baseline[item]
            if started.mode is AttemptMode.RESTORE:
                records.append((item, False, old))
            elif started.every_element:
                records.append((item, False, new))
            elif new != old:
                xor = started.mode is AttemptMode.XOR and not item.endswith(".c")
                records.append((item, xor, new ^ old if xor else new))
        return tuple(records)

    def _do_stopped(self, o: OwnerId) -> None:
        own = self.owners[o]
        attempt, own.stopping, own.stream = own.stopping, None, None
        self._own(o, os_.StreamStopped(attempt))

    def _do_copy(self, o: OwnerId) -> None:
        own = self.owners[o]
        if own.copying:
            item = own.copying.pop(0)
            own.baseline[item] = own.weights[item]
            self._own(o, os_.ItemCopied(own.copy_version, item))
            return
        own.copying = None
        self._own(o, os_.BaselineFilled(own.copy_version))

    # ---------------------------------------------------------------------------------------------------- faults

    def lose_receiver(self, c: int, name: ReceiverId) -> None:
        """The coordinator believes that the receiver is lost, rightly or not."""
        node = self.coordinators[c]
        node.calls = {call: None for call in node.calls if getattr(call, "receiver", None) != name}
        self._coordinate(c, ce.ReceiverLost(name, Incarnation(0), "no answer"))

    def lose_owner(self, c: int, o: OwnerId) -> None:
        node = self.coordinators[c]
        node.calls = {call: None for call in node.calls if getattr(call, "owner", None) != o}
        self._coordinate(c, ce.OwnerLost(o, "no answer"))

    def expire(self, c: int) -> None:
        """The attempt's deadline passes."""
        state = self.coordinators[c].state
        if state.attempt is not None and state.phase is Phase.RUNNING:
            self._coordinate(c, ce.DeadlinePassed(state.attempt.plan.attempt))

    def unknown(self, c: int) -> None:
        """The reply of the outstanding control-plane call never comes; the call itself may still arrive."""
        node = self.coordinators[c]
        if node.control is not None:
            self.late_control.append(node.control)
        elif node.control_reply is None:
            return
        node.control = node.control_reply = None
        self._coordinate(c, ce.ControlUnknown())

    def abort(self, c: int) -> None:
        self._coordinate(c, ce.AbortRequested())

    def request(self, name: ReceiverId) -> None:
        self._receive(name, es.RequestArrived("q"))

    def finish_request(self, name: ReceiverId) -> None:
        self._receive(name, es.RequestDone("q"))

    # ------------------------------------------------------------------------------------------- effects of machines

    def _note(self, node: str, effects: Iterable[Any]) -> list[Any]:
        rest = []
        for effect in effects:
            if isinstance(effect, Emit):
                self.emits.append(effect)
                self.lines.append((node, effect))
            else:
                rest.append(effect)
        return rest

    def _receive(self, name: ReceiverId, event: Any) -> None:
        r = self.receivers[name]
        r.state, effects = endpoint.step(r.state, event)
        for effect in self._note(name, effects):
            match effect:
                case es.Reply(call_id, reply):
                    c, call = self.asked.pop(call_id)
                    self.replies.append((c, call, reply))
                case es.PushReport(report):
                    self.pushes.append(report)
                case es.Stage(key):
                    r.staged[key] = self.payloads[key]
                case es.PermitApply(_, keys):
                    for key in keys:
                        payload = r.staged.pop(key)
                        if payload != self.payloads[key]:
                            r.forged.add(key)
                        r.issued += [(key, *record) for record in payload.records]
                case es.WakeApply():
                    r.awake = True
                case es.DenyApply():
                    r.awake = False
                case es.Flush(attempt):
                    r.flushing = attempt
                case es.Drain(attempt):
                    r.draining = attempt

    def _own(self, o: OwnerId, event: Any) -> None:
        own = self.owners[o]
        own.state, effects = owner.step(own.state, event)
        for effect in self._note(f"owner {o}", effects):
            match effect:
                case os_.OwnerAnswer(call_id, reply):
                    c, call = self.asked.pop(call_id)
                    self.replies.append((c, call, reply))
                case os_.PushOwnerReport(report):
                    self.pushes.append(report)
                case os_.StartStream():
                    own.started, own.stream = effect, list(self.groups[o])
                case os_.StopStream(attempt):
                    own.stopping = attempt
                case os_.CopyCandidate(_, version, _) | os_.RefillBaseline(_, version, _):
                    own.copying, own.copy_version = list(self.items[o]), version
                case os_.ReloadCommitted():
                    record = self.record()
                    words = self.candidates[record.candidate]
                    own.weights = {item: words[item] for item in self.items[o]}
                    self._own(o, os_.WeightsReloaded(record.candidate))

    def _coordinate(self, c: int, event: Any) -> None:
        node = self.coordinators[c]
        node.state, effects = transition.step(node.state, event)
        for effect in self._note(f"coordinator {c}", effects):
            match effect:
                case ce.CallReceiver(call) | ce.CallOwner(call):
                    node.calls[call] = None
                case ce.Survey():
                    node.calls.clear()
                    node.survey = ce.Surveyed(
                        tuple(endpoint_report.report(r.state) for r in self.receivers.values() if r.up),
                        tuple(owner.report(o.state) for o in self.owners.values() if o.up),
                    )
                case ce.AskCommit():
                    deadline = self.now + effect.within_s
                    node.control = CommitRequest(effect.epoch, effect.attempt, effect.expect, effect.new, deadline)
                case ce.AcquireEpoch() | ce.ReadRecord() | ce.AskPrepare() | ce.AskKill() | ce.AskBootstrap():
                    node.control = effect
                case ce.WaitCommitDeadline(attempt):
                    node.waits = attempt
                case (
                    ce.AttemptEnded()
                    | ce.VersionCommitted()
                    | ce.TransitionEnded()
                    | ce.TransitionAborted()
                    | ce.Ready()
                    | ce.Held()
                    | ce.SteppedDown()
                ):
                    self.outcomes.append(effect)

    def _execute(self, ask: Any) -> Any:
        match ask:
            case ce.AcquireEpoch():
                return self.control.acquire_epoch()
            case ce.ReadRecord(candidate):
                return self.control.read(candidate)
            case ce.AskPrepare(request):
                return self.control.prepare(request)
            case ce.AskKill(epoch, candidate):
                return self.control.kill(epoch, candidate)
            case ce.AskBootstrap(epoch, record):
                reply = self.control.bootstrap(epoch, record)
            case CommitRequest():
                reply = self.control.commit(ask)
                if isinstance(reply, Committed):
                    self.commits.append(ask)
        if isinstance(reply, Committed):
            self.versions.append(self.candidates[reply.record.candidate])
        return reply

    # --------------------------------------------------------------------------------------------------- schedules

    def run(self, limit: int = 2000) -> None:
        """Perform fault-free steps, oldest first, until nothing is left to do."""
        for _ in range(limit):
            steps = self.progress()
            if not steps:
                return
            self.do(steps[0])
        raise AssertionError(f"still busy after {limit} steps: {self.progress()[:5]}")

    def run_until(self, wanted: Any, limit: int = 2000) -> None:
        """Perform fault-free steps until `wanted()` holds."""
        for _ in range(limit):
            if wanted():
                return
            steps = self.progress()
            if not steps:
                break
            self.do(steps[0])
        raise AssertionError("never happened")

    def settled(self) -> bool:
        """Everybody serves the committed version and no transition is open."""
        record = self.record()
        serving = all(r.state.gate_open and r.storage == self.versions[-1] for r in self.receivers.values())
        return record is not None and serving and all(not o.state.candidate for o in self.owners.values())
