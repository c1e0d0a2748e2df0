"""What must hold in a local cluster after every step, in stored bits.

The oracle loads full canonical words with the same native loader, into storage that this loader filled before; it knows
nothing of deltas. Every parameter and buffer of every rank is compared, changed or not.

Paper: Proposition 1   Spec: CommitExact, CleanExact, BaselineBound, GateSafe   Proofs: joint_commit_binds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nemo_dcr.bits import Words, equal_words
from nemo_dcr.bits.tensors import copied_words, dtype_name, tensor_from_words
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, ReceiverId, Version, instance_of
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.record import Record
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.testing.toy_loader import Rule, ToyModel

if TYPE_CHECKING:
    from nemo_dcr.testing.local_cluster import LocalCluster, LocalOwner, LocalReceiver

StoredBits = dict[str, tuple[str, tuple[int, ...], bytes]]


def stored_bits(model: ToyModel) -> StoredBits:
    """Dtype, shape and bytes of every parameter and buffer by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: (dtype_name(t.dtype), tuple(t.shape), copied_words(t).tobytes()) for name, t in named}


class DenseOracle:
    """Dense loads of candidates, remembered."""

    def __init__(self, source: LocalSource, rules: Mapping[str, Rule]) -> None:
        self._source = source
        self._rules = rules
        self._canonical: dict[CandidateId, dict[str, Words]] = {}
        self._expected: dict[tuple[int, int, CandidateId], StoredBits] = {}

    def canonical(self, candidate: CandidateId) -> dict[str, Words]:
        """Full canonical words of a candidate."""
        if candidate not in self._canonical:
            self._canonical[candidate] = self._source.canonical(candidate)
        return self._canonical[candidate]

    def load(self, model: ToyModel, candidate: CandidateId) -> None:
        """A dense load by the model's own loader."""
        words = self.canonical(candidate)
        model.load_weights(
            (tensor.name, tensor_from_words(words[tensor.name].copy(), tensor.dtype, tensor.shape))
            for tensor in self._source.tensors
        )

    def expected(self, rank: int, ranks: int, candidate: CandidateId) -> StoredBits:
        """Stored bits of a rank after a dense load of version 0 and then of the candidate."""
        key = (rank, ranks, candidate)
        if key not in self._expected:
            model = ToyModel(self._source.tensors, self._rules, rank, ranks)
            self.load(model, NO_CANDIDATE)
            if candidate != NO_CANDIDATE:
                self.load(model, candidate)
            self._expected[key] = stored_bits(model)
        return self._expected[key]


def differences(cluster: LocalCluster, receiver: LocalReceiver, version: Version) -> list[str]:
    """Names of the stored tensors that differ from a dense load of a committed version."""
    if receiver.bits is None:
        receiver.bits = stored_bits(receiver.model)
    model = receiver.model
    wanted = cluster.oracle.expected(model.rank, model.world, cluster.candidate_of(version))
    if receiver.bits == wanted:
        return []
    return sorted(name for name in receiver.bits.keys() | wanted.keys() if receiver.bits.get(name) != wanted.get(name))


def _require(cluster: LocalCluster, receiver: LocalReceiver, version: Version, why: str) -> None:
    wrong = differences(cluster, receiver, version)
    if wrong:
        raise AssertionError(f"{receiver.life.name} {why} version {version}, but {wrong} hold other bits")


def check_receiver(cluster: LocalCluster, receiver: LocalReceiver) -> None:
    """A clean tag, an open gate and a running request mean one committed version. Raises: AssertionError."""
    report = receiver.node.report
    if report.tag.kind is TagKind.CLEAN:
        _require(cluster, receiver, report.tag.version, "claims")
    elif report.gate_open:
        raise AssertionError(f"{receiver.life.name} serves with storage {report.tag}")
    for request, (instance, version) in cluster.requests.items():
        if instance_of(ReceiverId(receiver.life.name)) == instance:
            _require(cluster, receiver, version, f"computes {request} with")


def check_required(cluster: LocalCluster, record: Record) -> None:
    """Every required receiver that lives and was not prepared again holds the new version. Raises: AssertionError."""
    for member in record.required:
        receiver = cluster.receivers.get(member.receiver)
        if receiver is None or not receiver.life.alive or receiver.life.incarnation != member.incarnation:
            continue
        if receiver.node.report.attempt == record.attempt:
            _require(cluster, receiver, record.version, "is required in")


def check_owner(cluster: LocalCluster, owner: LocalOwner) -> None:
    """A baseline at a version is that version, and the record's or the one before it. Raises: AssertionError."""
    report, record = owner.node.report, cluster.record
    if record is None or report.tracker.kind is not TrackerKind.AT:
        return
    version = report.tracker.version
    opened = report.candidate == record.candidate != NO_CANDIDATE
    if version != record.version and not (opened and version == record.version - 1):
        raise AssertionError(f"{owner.life.name} tracks version {version}, committed is {record.version}")
    candidate = cluster.candidate_of(version)
    weights, canonical = cluster.source.weights[candidate], cluster.oracle.canonical(candidate)
    residual = {tensor.name for tensor in cluster.source.scaled}
    for tensor, box, words in owner.node.delta.tracker_words():
        full = canonical if tensor.name in residual else weights
        if not equal_words(box.take(full[tensor.name]), words):
            raise AssertionError(f"{owner.life.name}: the baseline of {box.label} is not version {version}")
