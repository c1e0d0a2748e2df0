"""Half of the full-checkpoint reference: one host uploads its share of a file to the store, or downloads all of it.

Says `ready`, waits for a line on standard input, copies, and prints the seconds that it took. Parts go through a few
connections at a time; a downloaded part is dropped, so neither saving nor loading a checkpoint counts.

    python -m nemo_dcr.cli.checkpoint_copy put|get STORE_URL FILE BEGIN END

Paper: Section 8.1 (transport-only full-checkpoint reference)
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from nemo_dcr.transport.s3_client import S3Config, open_client

PART_BYTES = 8 << 20
CONNECTIONS = 4
_RUN = "full-checkpoint"


def parts_of(begin: int, end: int) -> list[tuple[int, int]]:
    """The parts of the bytes from `begin` to `end`."""
    return [(at, min(at + PART_BYTES, end)) for at in range(begin, end, PART_BYTES)]


def _put(client: Any, config: S3Config, file: Path, part: tuple[int, int]) -> int:
    with file.open("rb") as handle:
        handle.seek(part[0])
        body = handle.read(part[1] - part[0])
    client.put_object(Bucket=config.bucket, Key=f"{config.root}{part[0]}", Body=body)
    return len(body)


def _get(client: Any, config: S3Config, file: Path, part: tuple[int, int]) -> int:
    body = client.get_object(Bucket=config.bucket, Key=f"{config.root}{part[0]}")["Body"]
    return sum(len(block) for block in body.iter_chunks(1 << 20))


def copy(action: str, url: str, file: Path, parts: Iterable[tuple[int, int]]) -> int:
    """Move every part; returns the bytes moved."""
    at = urlsplit(url)
    config = S3Config(bucket=at.netloc, run=_RUN, endpoint=dict(parse_qsl(at.query))["endpoint"])
    client = open_client(config)
    move = {"put": _put, "get": _get}[action]
    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        moved = sum(pool.map(lambda part: move(client, config, file, part), parts))
    print(time.monotonic() - begin, flush=True)
    return moved


def main(action: str, url: str, file: str, *ranges: str) -> None:
    """Copy the byte ranges, given as pairs of begin and end; ends with an error when bytes are missing."""
    numbers = [int(number) for number in ranges]
    parts = [part for pair in zip(numbers[::2], numbers[1::2], strict=True) for part in parts_of(*pair)]
    moved = copy(action, url, Path(file), parts)
    if moved != sum(end - begin for begin, end in parts):
        sys.exit(f"moved {moved} bytes, which is not all")


if __name__ == "__main__":
    main(*sys.argv[1:])
