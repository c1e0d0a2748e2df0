"""Assemble the parts of one canonical tensor, and carry parts as bytes.

The parts must jointly cover every element, and where they overlap they must agree bit for bit; anything else is a fault
of the conversion and fails the attempt before a record is made. A message holds the parts of several tensors for one
rank: a MessagePack list of their boxes, then their words.

Paper: Section 5 (residual conversion); Figure A.4   Proofs: residual_changes_complete   Conditions: SC6
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from nemo_dcr.bits import Words, unsigned, words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.tasks import Part

_LENGTH_BYTES = 8
_BOXES = msgspec.msgpack.Decoder(list[BoxMap])


def assemble(tensor: TensorMeta, parts: Iterable[Part]) -> Words:
    """All words of `tensor` in canonical order; a new array.

    Raises: ConditionViolated (SC6) when a part belongs to another tensor, two parts disagree in an overlap, or an
    element is not covered.
    """
    assembled = np.zeros(tensor.numel, dtype=unsigned(tensor.dtype))
    covered = np.zeros(tensor.numel, dtype=np.bool_)
    for part in parts:
        if part.map.tensor != tensor:
            raise ConditionViolated("SC6", tensor.name, f"a part describes {part.map.tensor} instead of {tensor}")
        target, done = part.map.cut(assembled), part.map.cut(covered)
        new = part.words.reshape(part.map.source_shape)
        clash = int(np.count_nonzero(done & (target != new)))
        if clash:
            raise ConditionViolated("SC6", tensor.name, f"{part.map.label}: {clash} elements differ from another part")
        target[...] = new
        done[...] = True
    gaps = tensor.numel - int(np.count_nonzero(covered))
    if gaps:
        raise ConditionViolated("SC6", tensor.name, f"its parts leave {gaps} of {tensor.numel} elements uncovered")
    return assembled


def pack_parts(parts: Sequence[Part]) -> bytes:
    """One message with all of `parts`; the empty message for none."""
    if not parts:
        return b""
    head = msgspec.msgpack.encode([part.map for part in parts])
    pieces = [len(head).to_bytes(_LENGTH_BYTES, "little"), head]
    pieces += [np.ascontiguousarray(part.words).tobytes() for part in parts]
    return b"".join(pieces)


def unpack_parts(message: bytes) -> list[Part]:
    """The parts of a message, over its bytes without a copy.

    Raises: ConditionViolated (SC6) when the message is not whole.
    """
    if not message:
        return []
    body = memoryview(message)
    begin = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    try:
        boxes = _BOXES.decode(body[_LENGTH_BYTES:begin])
        parts = []
        for box in boxes:
            end = begin + box.domain * box.tensor.width
            if end > len(body):
                raise ValueError(f"{end} bytes are announced, {len(body)} arrived")
            parts.append(Part(box, words(body[begin:end], box.tensor.dtype)))
            begin = end
    except (msgspec.MsgspecError, UnsupportedMapping, ValueError) as error:
        raise ConditionViolated("SC6", "residual parts", f"a message of a trainer rank is damaged: {error}") from error
    if begin != len(body):
        raise ConditionViolated("SC6", "residual parts", f"a message has {len(body)} bytes instead of {begin}")
    return parts
