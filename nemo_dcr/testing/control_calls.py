"""Calls to a control plane as tests make them: requests with fixed members, checks of the history, and random calls.

Paper: Section 6.3; Appendix B (control plane)   Spec: Prepare, Commit, KillCandidate, Bootstrap, AcquireEpoch
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, Epoch, Incarnation, Member, OwnerId, ReceiverId, Version
from nemo_dcr.record import (
    AttemptMode,
    CommitRequest,
    Committed,
    ControlPlane,
    ControlView,
    Prepared,
    PrepareRequest,
    Record,
    Refusal,
    Refused,
)

MEMBERS = (Member(ReceiverId("a/0"), Incarnation(2**62 + 1)), Member(ReceiverId("b/0"), Incarnation(1)))
OWNERS = (OwnerId(0), OwnerId(1))
LIFETIME_S = 100.0


class ManualClock:
    """A control-plane clock that moves only when told."""

    def __init__(self, value: float = 1000.0) -> None:
        self.value = value

    def __call__(self) -> float:
        """The time in seconds."""
        return self.value


def prepare(
    control: ControlPlane,
    epoch: Epoch,
    expect: Record | None,
    candidate: str = "c1",
    mode: AttemptMode = AttemptMode.OVERWRITE,
) -> Prepared | Refused:
    """Ask for an attempt of the two members and two owners."""
    return control.prepare(PrepareRequest(epoch, expect, CandidateId(candidate), mode, MEMBERS, OWNERS, LIFETIME_S))


def successor(expect: Record, epoch: Epoch, attempt: AttemptId, candidate: str = "c1") -> Record:
    """The record that commits `attempt` on `expect`; its digest holds every byte value."""
    version = Version(expect.version + 1)
    digest = bytes((byte + version) % 256 for byte in range(256))
    return Record(version, CandidateId(candidate), digest, attempt, MEMBERS, expect.version, epoch)


def commit(
    control: ControlPlane,
    epoch: Epoch,
    expect: Record,
    attempt: AttemptId,
    candidate: str = "c1",
    deadline: float = float("inf"),
) -> Committed | Refused:
    """Ask to commit `attempt` on `expect`."""
    new = successor(expect, epoch, attempt, candidate)
    return control.commit(CommitRequest(epoch, attempt, expect, new, deadline))


def bootstrap(control: ControlPlane) -> tuple[Epoch, Record]:
    """Acquire an epoch and write the first record after a restore attempt."""
    epoch = control.acquire_epoch().epoch
    prepared = prepare(control, epoch, None, NO_CANDIDATE, AttemptMode.RESTORE)
    assert isinstance(prepared, Prepared)
    first = Record(Version(0), NO_CANDIDATE, b"\x00base", prepared.attempt, MEMBERS, Version(0), epoch)
    assert isinstance(control.bootstrap(epoch, first), Committed)
    return epoch, first


def granted(reply: Prepared | Refused) -> AttemptId:
    """The attempt of a prepare that must succeed."""
    assert isinstance(reply, Prepared), reply
    return reply.attempt


def refusal(reply: object) -> Refusal:
    """The reason of a reply that must be a refusal."""
    assert isinstance(reply, Refused), reply
    return reply.reason


def check_chain(control: ControlPlane) -> tuple[Record, ...]:
    """Every version is there once, each on the one before, and the last one is the record."""
    records = control.history()
    assert [record.version for record in records] == list(range(len(records)))
    assert all(after.baseline == before.version for before, after in itertools.pairwise(records))
    assert len({record.attempt for record in records}) == len(records)
    assert control.read().record == (records[-1] if records else None)
    return records


def check_journal(control: ControlPlane) -> None:
    """The journal has no gap and its clocks increase."""
    lines = control.journal()
    assert [line.seq for line in lines] == list(range(len(lines)))
    clocks = [line.clock for line in lines]
    assert clocks == sorted(set(clocks))
    assert control.journal(len(lines) // 2) == lines[len(lines) // 2 :]


def commit_once(control: ControlPlane, epoch: Epoch | None) -> tuple[Epoch, AttemptId | None]:
    """Try to add one version, with a new epoch when `epoch` is None or was replaced; returns the committed attempt."""
    epoch = control.acquire_epoch().epoch if epoch is None else epoch
    record = control.read().record
    assert record is not None
    candidate = f"c{record.version + 1}-{epoch}"
    prepared = prepare(control, epoch, record, candidate)
    reply = prepared if isinstance(prepared, Refused) else commit(control, epoch, record, prepared.attempt, candidate)
    if isinstance(reply, Committed):
        return epoch, reply.record.attempt
    return (control.acquire_epoch().epoch if reply.reason is Refusal.STALE_EPOCH else epoch), None


@dataclass(frozen=True)
class Step:
    """One random call. Offsets are relative to what the record says when the call is made."""

    call: str
    epoch: int
    expect: int
    """0 the record, 1 the one before, 2 none, 3 the record with another digest."""
    attempt: int
    candidate: int
    """0 names the candidate of the next version, -1 the committed one, 9 none."""
    mode: AttemptMode
    wait_s: float
    clock: int

    def candidate_on(self, records: tuple[Record, ...]) -> CandidateId:
        """The candidate of the call."""
        return NO_CANDIDATE if self.candidate == 9 else CandidateId(f"c{len(records) + self.candidate}")

    def apply(self, control: ControlPlane, view: ControlView, records: tuple[Record, ...]) -> object:
        """Make the call; `view` and `records` say what the offsets refer to."""
        epoch = Epoch(view.epoch + self.epoch)
        attempt = AttemptId(view.last_attempt + self.attempt)
        candidate = self.candidate_on(records)
        current = records[-1] if records else None
        other = None if current is None else dataclasses.replace(current, digest=b"other")
        expect = [current, records[-2] if len(records) > 1 else None, None, other][self.expect]
        if self.call == "acquire":
            return control.acquire_epoch(clock=self.clock)
        if self.call == "read":
            return control.read(candidate, clock=self.clock)
        if self.call == "kill":
            return control.kill(epoch, candidate, clock=self.clock)
        if self.call == "prepare":
            request = PrepareRequest(epoch, expect, candidate, self.mode, MEMBERS, OWNERS, LIFETIME_S)
            return control.prepare(request, clock=self.clock)
        if self.call == "bootstrap" or expect is None:
            first = Record(Version(0), NO_CANDIDATE, b"base", attempt, MEMBERS, Version(0), epoch)
            return control.bootstrap(epoch, first, clock=self.clock)
        new = successor(expect, epoch, attempt, candidate)
        return control.commit(CommitRequest(epoch, attempt, expect, new, 1150.0), clock=self.clock)


_MOSTLY_ZERO = st.sampled_from([0] * 12 + [-1, 1])
STEPS = st.builds(
    Step,
    call=st.sampled_from(["prepare"] * 5 + ["commit"] * 5 + ["acquire", "read", "kill", "bootstrap"]),
    epoch=_MOSTLY_ZERO,
    expect=st.sampled_from([0] * 12 + [1, 2, 3]),
    attempt=_MOSTLY_ZERO,
    candidate=st.sampled_from([0] * 8 + [-1, 1, 9]),
    mode=st.sampled_from([AttemptMode.OVERWRITE] * 4 + list(AttemptMode)),
    wait_s=st.sampled_from([0.0] * 8 + [10.0, 40.0]),
    clock=st.integers(0, 50),
)
