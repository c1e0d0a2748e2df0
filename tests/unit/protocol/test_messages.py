"""Messages survive the wire by type, and the digests in them are those of the other layers."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from nemo_dcr.config import GateMode
from nemo_dcr.ids import AttemptId, CandidateId, Incarnation, Member, OwnerId, PayloadKey, ReceiverId, Version
from nemo_dcr.protocol import endpoint, endpoint_report, owner
from nemo_dcr.protocol.digests import applied_digest, candidate_digest, manifest_digest
from nemo_dcr.protocol.messages import (
    OWNER_CALLS,
    RECEIVER_CALLS,
    OwnerReply,
    PrepareOwner,
    PrepareReceiver,
    ReceiverReply,
    StreamEnd,
)
from nemo_dcr.protocol.tags import TrackerTag
from nemo_dcr.record import AttemptMode
from nemo_dcr.transport.base import Announcement, Manifest

RECEIVER = ReceiverId("e0/1")
ME = Member(RECEIVER, Incarnation(7))


def roundtrip(message: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def test_prepare_calls_survive_the_wire():
    receiver = PrepareReceiver(
        RECEIVER, ME.incarnation, AttemptId(3), AttemptMode.XOR, GateMode.ASYNC, Version(2), AttemptId(2),
        CandidateId("c"), (OwnerId(0), OwnerId(1)), b"\x00\xff",
    )  # fmt: skip
    to_owner = PrepareOwner(
        OwnerId(1), Incarnation(2), AttemptId(3), AttemptMode.DENSE, Version(2), CandidateId("c"), {"a.weight": "xor"}
    )
    assert roundtrip(receiver) == receiver
    assert roundtrip(to_owner) == to_owner


def test_replies_survive_the_wire_with_their_whole_report():
    state, _ = endpoint.start(ME, ranks=3, loaded_digest=b"d")
    reply = ReceiverReply(False, "stale", endpoint_report.report(state))
    assert roundtrip(reply) == reply
    owned, _ = owner.start(OwnerId(1), Incarnation(2), tracker=TrackerTag(), candidate=CandidateId("c"))
    report = dataclasses.replace(owner.report(owned), end=StreamEnd((b"x" * 16,), b"y" * 16), resident=None)
    assert roundtrip(OwnerReply(True, "", report)) == OwnerReply(True, "", report)


@pytest.mark.parametrize("call", RECEIVER_CALLS + OWNER_CALLS, ids=lambda call: call.__name__)
def test_every_call_names_its_endpoint_and_has_a_decoder(call):
    names = {field.name for field in dataclasses.fields(call)}
    assert ("receiver" in names) == (call in RECEIVER_CALLS)
    assert ("owner" in names) == (call in OWNER_CALLS)
    msgspec.msgpack.Decoder(call)


def test_manifest_digest_is_the_one_of_the_transport():
    digests = [bytes([i]) * 16 for i in range(3)]
    for count in range(4):
        listed = tuple(
            Announcement(PayloadKey(AttemptId(1), OwnerId(0), i), digest, 1) for i, digest in enumerate(digests[:count])
        )
        assert manifest_digest(digests[:count]) == Manifest(AttemptId(1), OwnerId(0), listed).digest


def test_candidate_digest_depends_on_the_parent_and_the_set_but_not_on_the_order():
    a, b = b"a" * 16, b"b" * 16
    assert candidate_digest(b"p", [a, b]) == candidate_digest(b"p", [b, a])
    assert len({candidate_digest(p, d) for p in (b"p", b"q") for d in ([], [a], [a, b], [a, a])}) == 8


def test_applied_digest_tells_owners_apart():
    a, b = b"a" * 16, b"b" * 16
    assert applied_digest({OwnerId(0): [a], OwnerId(1): [b]}) != applied_digest({OwnerId(0): [b], OwnerId(1): [a]})
    assert applied_digest({OwnerId(0): [a], OwnerId(1): []}) != applied_digest({OwnerId(0): [a]})
    assert applied_digest({OwnerId(1): [b], OwnerId(0): [a]}) == applied_digest({OwnerId(0): [a], OwnerId(1): [b]})
