"""Hostile payloads by the million: `python -m nemo_dcr.testing.wire_fuzz --count N --seed S`.

Each case changes a valid payload: bits, bytes, cuts, splices, header fields, metadata rows, location and value planes,
frames that lie about their size, bombs. Most cases get a right digest again, so that the decoder behind it is reached.
A case may be refused with a typed error or decode to items that obey every rule; any other exception, a case that takes
longer than its limit, and memory beyond the declared limit are findings. A case is a function of (seed, number), so
that `--only NUMBER` repeats it.

Paper: Appendix D (payload format)
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import resource
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import zstandard

from nemo_dcr import bits
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.codec.wire import HEADER_BYTES
from nemo_dcr.config import MIB, CodecConfig
from nemo_dcr.errors import PayloadCorrupt
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey

LIMITS = CodecConfig(max_payload_bytes=MIB, max_metadata_bytes=64 << 10)
"""What the reader under test accepts."""
MEMORY_BYTES = 64 * MIB
"""Growth of the process that a whole run may cause: ten bodies of LIMITS, and slack for the allocator."""
CASE_SECONDS = 2.0
EDGES = (0, 1, 2, 3, 7, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 48, (1 << 63) - 1, (1 << 64) - 1)
DTYPES = ("BF16", "F32", "F64", "U8", "BOOL", "I64", "C64", "F8_E4M3")


@dataclass(frozen=True)
class Base:
    """A valid payload in parts."""

    header: bytes
    body: bytes
    rows: list[list[Any]]
    metadata_bytes: int
    data: bytes


def corpus() -> list[Base]:
    """Every location type, both encodings, several widths; an empty payload, and one that compresses well."""
    rng = np.random.default_rng(1)
    spread = ([0], [3, 4, 5], [10, 15, 315], [0, 2, 3, 9], [1, 900], [0, 65536], [0, 1 << 32], [5, 1 << 40])
    bases = [_base(0, []), _base(1, [_item("zeros", "F32", Encoding.XOR, np.arange(0, 90000, 3), None)])]
    for number in range(2, 12):
        items = []
        for place, at in enumerate(spread):
            dtype, encoding = DTYPES[(number + place) % len(DTYPES)], Encoding((number + place) % 2)
            items.append(_item(f"t{place}", dtype, encoding, np.array(at), rng))
        bases.append(_base(number, items[: 1 + number % len(items)]))
    return bases


def _item(name: str, dtype: str, encoding: Encoding, at: Any, rng: np.random.Generator | None) -> Item:
    kind = bits.unsigned(dtype)
    values = np.zeros(len(at), kind) if rng is None else np.frombuffer(rng.bytes(len(at) * kind.itemsize), kind)
    return Item.of(TensorMeta(name, (int(at[-1]) + 3,), dtype), encoding, at.astype(np.int64), values)


def _base(number: int, items: Sequence[Item]) -> Base:
    data = encode_payload(PayloadKey(AttemptId(7), OwnerId(3), number), items).data
    metadata_bytes = struct.unpack_from("<I", data, 36)[0]
    body = zstandard.ZstdDecompressor().decompress(data[HEADER_BYTES:-16])
    rows = [list(row) for row in msgspec.msgpack.decode(body[:metadata_bytes])]
    return Base(data[:HEADER_BYTES], body, rows, metadata_bytes, data)


def seal(data: bytes) -> bytes:
    """Append the digest that belongs to these bytes."""
    return data + hashlib.blake2b(data, digest_size=16).digest()


def _whole(base: Base, body: bytes, metadata_bytes: int, items: int, frame: bytes | None = None) -> bytes:
    """A payload whose header, frame and digest fit any body."""
    frame = zstandard.ZstdCompressor(level=1).compress(body) if frame is None else frame
    sizes = (items, metadata_bytes, len(body), len(frame))
    masked = [size & mask for size, mask in zip(sizes, (0xFFFFFFFF, 0xFFFFFFFF, -1, -1), strict=True)]
    return seal(base.header[:32] + struct.pack("<IIQQ", *masked) + frame)


def _edit(rng: random.Random, data: bytes) -> bytes:
    """One to eight small edits anywhere: bits, bytes, cuts, insertions, moved blocks."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at = rng.randrange(len(changed)) if changed else 0
        match rng.randrange(7):
            case 0 | 1 if changed:
                changed[at] ^= 1 << rng.randrange(8)
            case 2 if changed:
                changed[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 3:
                del changed[at : at + rng.choice((1, 2, 8, 64))]
            case 4:
                changed[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 5:
                size, other = rng.choice((1, 4, 8)), rng.randrange(len(changed) or 1)
                one, two = changed[at : at + size], changed[other : other + size]
                if len(one) == len(two) == size and abs(at - other) >= size:
                    changed[at : at + size], changed[other : other + size] = two, one
            case _:
                del changed[at:]
    return bytes(changed)


def _raw(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    return _edit(rng, base.data)


def _sealed(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    return seal(_edit(rng, base.data[:-16]))


def _spliced(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    other = rng.choice(bases).data
    data = base.data[: rng.randrange(len(base.data))] + other[rng.randrange(len(other)) :]
    return seal(data[:-16]) if rng.random() < 0.7 else data


def _header(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    data = bytearray(base.data[:-16])
    for _ in range(rng.choice((1, 1, 2))):
        offset, size = rng.choice(((0, 4), (4, 2), (6, 1), (7, 1), (8, 4), (12, 4), (16, 8), (24, 4), (28, 4), (32, 4)))
        if rng.random() < 0.5:
            offset, size = rng.choice(((36, 4), (40, 8), (48, 8)))
        value = rng.choice((*EDGES, rng.getrandbits(64), int.from_bytes(data[offset : offset + size], "little") ^ 1))
        data[offset : offset + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return seal(bytes(data))


def _planes(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    body = _edit(rng, base.body)
    return _whole(base, body, min(base.metadata_bytes, len(body)), len(base.rows))


def _field(rng: random.Random) -> Any:
    return rng.choice(
        (
            rng.choice(EDGES),
            rng.randrange(400),
            -rng.randrange(1, 5),
            rng.choice((None, True, 0.5, float("nan"), "", "w", "BF16", "F64", "C128", b"x")),
            [rng.choice(EDGES) for _ in range(rng.randrange(4))],
            [2] * rng.choice((1, 63, 64, 65)),
        )
    )


def _metadata(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    rows = [list(row) for row in (base.rows or rng.choice(bases).rows)]
    for _ in range(rng.choice((1, 1, 2, 4))):
        if rows:
            row = rng.choice(rows)
            row[rng.randrange(len(row))] = _field(rng)
    if rows and rng.random() < 0.2:
        rows[rng.randrange(len(rows))] = rng.choice(([], rows[0] * 2, rows[0][:-1], [*rows[0], 0]))
    if rng.random() < 0.2:
        rng.shuffle(rows)
        rows += rows[: rng.randrange(3)]
    metadata = msgspec.msgpack.encode(rows)
    items = len(rows) if rng.random() < 0.8 else rng.choice(EDGES)
    body = metadata + base.body[base.metadata_bytes :] + rng.randbytes(rng.choice((0, 0, 1, 9)))
    return _whole(base, body, len(metadata), items)


def _frame(rng: random.Random, base: Base, bases: Sequence[Base]) -> bytes:
    """Frames that lie: another content size, none, two frames, a dictionary, blocks of one repeated byte (a bomb)."""
    declared = rng.choice((len(base.body), *EDGES))
    magic, block = b"\x28\xb5\x2f\xfd", rng.choice((1 << 10, 1 << 17))
    repeats = rng.choice((1, 8, 64))
    bomb = b"".join(
        (block << 3 | 1 << 1 | int(last == repeats - 1)).to_bytes(3, "little") + b"\0" for last in range(repeats)
    )
    plain = zstandard.ZstdCompressor(level=1).compress(base.body)
    frame = rng.choice(
        (
            magic + b"\xe0" + struct.pack("<Q", declared) + bomb,
            magic + b"\xc0" + bytes([rng.randrange(256)]) + struct.pack("<Q", declared) + bomb,
            zstandard.ZstdCompressor(level=1, write_content_size=False).compress(base.body),
            plain + plain,
            plain + b"\0",
            _edit(rng, plain),
            b"",
        )
    )
    size = rng.choice((len(base.body), declared, min(declared, MIB)))
    header = struct.pack("<IIQQ", len(base.rows), base.metadata_bytes, size & ((1 << 64) - 1), len(frame))
    return seal(base.header[:32] + header + frame)


MUTATIONS: tuple[Callable[[random.Random, Base, Sequence[Base]], bytes], ...] = (
    _raw,
    _sealed,
    _spliced,
    _header,
    _planes,
    _metadata,
    _frame,
)


def mutated(seed: int, number: int, bases: Sequence[Base]) -> tuple[str, bytes]:
    """Kind and bytes of one case."""
    rng = random.Random(f"{seed}/{number}")
    make = MUTATIONS[number % len(MUTATIONS)]
    return make.__name__.strip("_"), make(rng, rng.choice(bases), bases)


def outcome(data: bytes) -> str:
    """`valid`, or the name of the typed refusal.

    Raises: AssertionError when a decoded item breaks a rule; whatever else the decoder raises.
    """
    try:
        items = verify_payload(data, limits=LIMITS).decode()
    except PayloadCorrupt as refusal:
        return type(refusal).__name__
    assert len({item.tensor.name for item in items}) == len(items)
    for item in items:
        indices = item.flat_indices()
        assert 0 < item.count == len(indices) == len(item.values)
        assert 0 <= int(indices[0]) == item.start
        assert int(indices[-1]) < item.tensor.numel
        assert bool(np.all(indices[1:] > indices[:-1]))
        assert item.values.dtype == bits.unsigned(item.tensor.dtype)
    return "valid"


@dataclass
class Report:
    """What a run found."""

    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    seconds: float = 0.0
    grown_bytes: int = 0
    findings: list[str] = field(default_factory=list)


def run(count: int, seed: int, *, first: int = 0, most_findings: int = 5) -> Report:
    """Play `count` cases; stops after `most_findings` findings."""
    bases = corpus()
    report = Report()
    begin, peak = time.monotonic(), _peak_bytes()
    for number in range(first, first + count):
        kind, data = mutated(seed, number, bases)
        before = time.monotonic()
        try:
            report.outcomes[outcome(data)] += 1
        except Exception as error:
            report.findings.append(f"case {number} ({kind}): {type(error).__name__}: {error}")
        took = time.monotonic() - before
        report.slowest_s = max(report.slowest_s, took)
        if took > CASE_SECONDS:
            report.findings.append(f"case {number} ({kind}): {took:.1f} s")
        report.cases += 1
        if len(report.findings) >= most_findings:
            break
    report.seconds = time.monotonic() - begin
    report.grown_bytes = _peak_bytes() - peak
    if report.grown_bytes > MEMORY_BYTES:
        report.findings.append(f"the process grew by {report.grown_bytes} bytes, more than {MEMORY_BYTES}")
    return report


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _bound_address_space() -> None:
    """Refuse reservations far over the limit, touched or not: they end as a MemoryError, which is a finding."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[0])
    limit = pages * resource.getpagesize() + 4 * MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 for a finding."""
    parser = argparse.ArgumentParser(description="Decode mutated payloads and look for anything but typed errors.")
    parser.add_argument("--count", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat this one case")
    options = parser.parse_args(arguments)
    _bound_address_space()
    # A decoder that hangs inside a library is ended with a traceback.
    faulthandler.dump_traceback_later(60 + options.count * CASE_SECONDS, exit=True)
    if options.only is None:
        report = run(options.count, options.seed)
    else:
        report = run(1, options.seed, first=options.only)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.write(
        json.dumps(
            {
                "cases": report.cases,
                "seed": options.seed,
                "outcomes": dict(sorted(report.outcomes.items())),
                "seconds": round(report.seconds, 1),
                "slowest_ms": round(report.slowest_s * 1000, 1),
                "grown_mib": round(report.grown_bytes / MIB, 1),
                "findings": report.findings,
            }
        )
        + "\n"
    )
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
