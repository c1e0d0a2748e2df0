"""What must hold in a local cluster after every step, in stored bits.

Every parameter and buffer of every rank is compared with a dense load, changed or not.

Paper: Proposition 1   Spec: CommitExact, CleanExact, BaselineBound, GateSafe   Proofs: joint_commit_binds
"""

from __future__ import annotations

from typing import Protocol

from nemo_dcr.bits import equal_words
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, InstanceId, ReceiverId, Version, instance_of
from nemo_dcr.protocol.tags import TagKind, TrackerKind
from nemo_dcr.record import Record
from nemo_dcr.testing.local_nodes import LocalOwner, LocalReceiver
from nemo_dcr.testing.local_oracle import DenseOracle, stored_bits
from nemo_dcr.testing.local_source import LocalSource


class Observed(Protocol):
    """What the checks look at."""

    source: LocalSource
    oracle: DenseOracle
    receivers: dict[ReceiverId, LocalReceiver]
    requests: dict[str, tuple[InstanceId, Version]]
    """Running requests: where, and the version at their admission."""

    @property
    def record(self) -> Record | None:
        """The commit record."""
        ...

    def candidate_of(self, version: Version) -> CandidateId:
        """The candidate that a committed version is."""
        ...


def differences(cluster: Observed, receiver: LocalReceiver, version: Version) -> list[str]:
    """Names of the stored tensors that differ from a dense load of a committed version."""
    if receiver.bits is None:
        receiver.bits = stored_bits(receiver.model)
    model = receiver.model
    wanted = cluster.oracle.expected(model.rank, model.world, cluster.candidate_of(version))
    if receiver.bits == wanted:
        return []
    return sorted(name for name in receiver.bits.keys() | wanted.keys() if receiver.bits.get(name) != wanted.get(name))


def _require(cluster: Observed, receiver: LocalReceiver, version: Version, why: str) -> None:
    wrong = differences(cluster, receiver, version)
    if wrong:
        raise AssertionError(f"{receiver.life.name} {why} version {version}, but {wrong} hold other bits")


def check_receiver(cluster: Observed, receiver: LocalReceiver) -> None:
    """A clean tag, an open gate and a running request mean one committed version. Raises: AssertionError."""
    report = receiver.node.report
    if report.tag.kind is TagKind.CLEAN:
        _require(cluster, receiver, report.tag.version, "claims")
    elif report.gate_open:
        raise AssertionError(f"{receiver.life.name} serves with storage {report.tag}")
    for request, (instance, version) in cluster.requests.items():
        if instance_of(ReceiverId(receiver.life.name)) == instance:
            _require(cluster, receiver, version, f"computes {request} with")


def check_required(cluster: Observed, record: Record) -> None:
    """Every required receiver that lives and was not prepared again holds the new version. Raises: AssertionError."""
    for member in record.required:
        receiver = cluster.receivers.get(member.receiver)
        if receiver is None or not receiver.life.alive or receiver.life.incarnation != member.incarnation:
            continue
        if receiver.node.report.attempt == record.attempt:
            _require(cluster, receiver, record.version, "is required in")


def check_owner(cluster: Observed, owner: LocalOwner) -> None:
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
