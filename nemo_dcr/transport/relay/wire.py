"""Messages of the relay tree: a MessagePack header, checked against its schema, and at most one frame of bytes.

Who connects speaks `ToNode`, the listening node answers `FromNode`. Numbers named `upload`, `call`, `fetch` and
`session` are drawn by the side that connects and come back in the answers. Sizes are limited before anything is
decoded or allocated: ZeroMQ closes a connection that sends a larger part than `MAX_PART_BYTES`. Errors travel as a kind
of the package's tree with its fields, and are built anew on the other side.
Not handled: bodies; they are opaque.

Paper: Section 7 (relay tree); Appendix B (transports)   Spec: Channel
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from nemo_dcr.errors import (
    AttemptFailed,
    AttemptStopped,
    EndpointLost,
    InvalidConfig,
    PayloadConflict,
    PayloadCorrupt,
    PayloadMissing,
    TransportFailed,
)
from nemo_dcr.transport.objects import MAX_DIGEST_BYTES
from nemo_dcr.transport.relay.counters import NodeCounters
from nemo_dcr.transport.relay.settings import FRAME_BYTES
from nemo_dcr.transport.relay.tree import RelayTree

RELAY_VERSION = 1
MAX_PART_BYTES = FRAME_BYTES + 4096
"""A larger part closes the connection."""
MAX_ENTRIES = 256
"""Entries of one answer to `Next`."""

Number = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=300)]
Digest = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_DIGEST_BYTES)]


class Fault(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An error on its way."""

    kind: Name
    subject: Name
    detail: Annotated[str, msgspec.Meta(max_length=2000)]


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    pass


# ------------------------------------------------------------------------------------------- from those who connect


class Hello(_Message, frozen=True, tag=1):
    """First message of a connection."""

    version: Number
    run: Name


class Open(_Message, frozen=True, tag=2):
    """An owner will stream in this attempt, over this tree, whose root is the node addressed."""

    attempt: Number
    owner: Number
    tree: RelayTree
    cleaned: Number
    """Attempts up to this one were cleaned up."""


class Put(_Message, frozen=True, tag=3):
    """Offer a payload; its frames follow as they are granted. A short one is the second part of this message."""

    attempt: Number
    owner: Number
    payload: Number
    upload: Number
    nbytes: Number
    digest: Digest
    checksum: Digest
    """BLAKE2b-128 of all its bytes: the same payload again, or other bytes under its number."""


class Data(_Message, frozen=True, tag=4):
    """One frame of a payload; its bytes are the second part."""

    attempt: Number
    owner: Number
    payload: Number
    upload: Number
    offset: Number


class Withdraw(_Message, frozen=True, tag=5):
    """Its publisher was stopped: drop the payload unless it is complete."""

    attempt: Number
    owner: Number
    payload: Number
    upload: Number


class End(_Message, frozen=True, tag=6):
    """END of one owner's stream: how many payloads, and the manifest's digest."""

    attempt: Number
    owner: Number
    call: Number
    count: Number
    digest: Digest


class Abandon(_Message, frozen=True, tag=7):
    """The attempt failed above."""

    attempt: Number
    fault: Fault


class Next(_Message, frozen=True, tag=8):
    """What was published by these owners after place `index`."""

    attempt: Number
    session: Number
    owners: tuple[Number, ...]
    index: Number
    wait: bool
    """Answer once there is something; otherwise at once."""


class Fetch(_Message, frozen=True, tag=9):
    """Send the bytes of a payload from `offset` up to `upto`."""

    attempt: Number
    owner: Number
    payload: Number
    fetch: Number
    nbytes: Number
    digest: Digest
    offset: Number
    upto: Number


class Fetched(_Message, frozen=True, tag=10):
    """One subscription has all bytes of a payload."""

    attempt: Number
    owner: Number
    payload: Number
    session: Number


class Clean(_Message, frozen=True, tag=11):
    """Drop every attempt up to and including `through`, here and below."""

    call: Number
    through: Number


class Ask(_Message, frozen=True, tag=12):
    """Ask for the counters."""

    call: Number


class Bye(_Message, frozen=True, tag=13):
    """Last message of a connection."""


# ----------------------------------------------------------------------------------------------- from the node


class Welcome(_Message, frozen=True, tag=31):
    """Answer to `Hello`."""

    version: Number
    node: Name
    incarnation: Number
    """New on every start: a node that was restarted holds nothing of what it had."""


class Rejected(_Message, frozen=True, tag=32):
    """A message was not taken; nothing else changed."""

    fault: Fault


class Grant(_Message, frozen=True, tag=33):
    """Frames of an upload may be sent from `offset` (where it stands) up to `upto`."""

    upload: Number
    offset: Number
    upto: Number


class Acked(_Message, frozen=True, tag=34):
    """The payload is queued at this node and at every node below it."""

    upload: Number


class Refused(_Message, frozen=True, tag=35):
    """An upload or call is refused."""

    number: Number
    fault: Fault


class Ended(_Message, frozen=True, tag=36):
    """The set of an owner is closed at this node and at every node below it."""

    call: Number


class Failed(_Message, frozen=True, tag=37):
    """The attempt failed at this node or below it."""

    attempt: Number
    fault: Fault


class Told(_Message, frozen=True, tag=51):
    """An announcement, in an answer to `Next`."""

    owner: Number
    payload: Number
    digest: Digest
    nbytes: Number


class Closed(_Message, frozen=True, tag=52):
    """An owner's END, in an answer to `Next`."""

    owner: Number
    count: Number
    digest: Digest


class Entries(_Message, frozen=True, tag=38):
    """Answer to `Next`."""

    attempt: Number
    session: Number
    index: Number
    """Where the next `Next` goes on."""
    entries: tuple[Told | Closed, ...]


class Gone(_Message, frozen=True, tag=39):
    """The attempt was cleaned up: nothing more will come."""

    attempt: Number
    session: Number


class Piece(_Message, frozen=True, tag=40):
    """One frame of a fetched payload; its bytes are the second part."""

    fetch: Number
    offset: Number


class Missing(_Message, frozen=True, tag=41):
    """The node does not hold the payload."""

    fetch: Number
    detail: Annotated[str, msgspec.Meta(max_length=2000)]


class Cleaned(_Message, frozen=True, tag=42):
    """Answer to `Clean`, once every reachable node below has answered."""

    call: Number


class Counted(_Message, frozen=True, tag=43):
    """Answer to `Ask`."""

    call: Number
    counters: NodeCounters


ToNode = Hello | Open | Put | Data | Withdraw | End | Abandon | Next | Fetch | Fetched | Clean | Ask | Bye
FromNode = (
    Welcome | Rejected | Grant | Acked | Refused | Ended | Failed | Entries | Gone | Piece | Missing | Cleaned | Counted
)
_TO_NODE: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
_FROM_NODE: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_FAULTS: dict[str, type[AttemptFailed]] = {
    kind.__name__: kind
    for kind in (EndpointLost, PayloadConflict, PayloadCorrupt, PayloadMissing, AttemptStopped, TransportFailed)
}


def encode(message: ToNode | FromNode) -> bytes:
    """A header as it is sent."""
    return msgspec.msgpack.encode(message)


def decode_to_node(header: Any) -> ToNode:
    """Read a header that a client sent. Raises: TransportFailed when it is not one."""
    try:
        return _TO_NODE.decode(header)
    except (msgspec.MsgspecError, InvalidConfig) as problem:
        raise TransportFailed("relay", f"unreadable header: {problem}") from None


def decode_from_node(header: Any) -> FromNode:
    """Read a header that a node sent. Raises: TransportFailed when it is not one."""
    try:
        return _FROM_NODE.decode(header)
    except (msgspec.MsgspecError, InvalidConfig) as problem:
        raise TransportFailed("relay", f"unreadable header: {problem}") from None


def fault_of(error: AttemptFailed) -> Fault:
    """An error as it travels; a kind that is not listed travels as TransportFailed with its message."""
    kind = type(error).__name__
    if kind not in _FAULTS:
        return Fault("TransportFailed", "relay", str(error)[:2000])
    fields = [str(value) for value in vars(error).values()]
    return Fault(kind, fields[0][:300], fields[1][:2000])


def error_of(fault: Fault) -> AttemptFailed:
    """A new error of the kind that was sent."""
    if fault.kind == "AttemptStopped" and fault.subject.isdecimal():
        return AttemptStopped(int(fault.subject), fault.detail)
    build: Any = _FAULTS.get(fault.kind, TransportFailed)
    error: AttemptFailed = build(fault.subject, fault.detail)
    return error
