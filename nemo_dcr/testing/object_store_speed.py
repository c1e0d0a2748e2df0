"""How fast the S3 object store is, as a ratio to plain boto3 calls on the same server in the same minute.

One round uploads and downloads the same number of objects each way: plain `put_object` and `get_object(...).read()`,
one after another, then a publisher and a subscription. Rounds alternate, and the medians of the ratios are printed,
because the speed of a shared machine is not a figure.

    python -m nemo_dcr.testing.object_store_speed [--mib 16] [--count 8] [--rounds 5]

Paper: Section 7 (object storage)
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.testing.seaweedfs import BUCKET, SeaweedServer
from nemo_dcr.transport.base import Announcement, Manifest
from nemo_dcr.transport.s3 import S3ObjectStore
from nemo_dcr.transport.s3_client import MIB, S3Config, open_client

Measured = tuple[float, float]
"""Seconds of the clock and of this process's CPU."""


def measured(work: Callable[[], object]) -> Measured:
    """Do something and say what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def rounds(server: SeaweedServer, nbytes: int, count: int, number: int) -> dict[str, list[Measured]]:
    """What `number` rounds took, by what was done."""
    config = S3Config(bucket=BUCKET, run="speed", endpoint=server.endpoint)
    client, store = open_client(config, server.credentials), S3ObjectStore(config, server.credentials)
    bodies = [os.urandom(nbytes) for _ in range(count)]
    digests = [hashlib.blake2b(body, digest_size=16).digest() for body in bodies]
    found: dict[str, list[Measured]] = {}
    owner = OwnerId(0)
    for round_ in range(number + 1):
        attempt = AttemptId(round_ + 1)
        names = [f"plain/{round_}/{index}" for index in range(count)]

        def put(names: list[str] = names) -> None:
            for name, body in zip(names, bodies, strict=True):
                client.put_object(Bucket=BUCKET, Key=name, Body=body)

        def get(names: list[str] = names) -> None:
            for name in names:
                client.get_object(Bucket=BUCKET, Key=name)["Body"].read()

        def publish(attempt: AttemptId = attempt) -> None:
            publisher = store.publisher(attempt, owner)
            for index, (body, digest) in enumerate(zip(bodies, digests, strict=True)):
                publisher.publish(PayloadKey(attempt, owner, index), body, digest)
            publisher.close_set()

        def fetch(attempt: AttemptId = attempt) -> None:
            subscription = store.subscribe(attempt, [owner])
            while not isinstance(entry := subscription.poll(60.0), Manifest):
                if isinstance(entry, Announcement):
                    subscription.fetch(entry)
            subscription.stop()

        took = {"plain put": measured(put), "publish": measured(publish)}
        took.update({"plain get": measured(get), "fetch": measured(fetch)})
        store.cleanup(attempt)
        for name in names:
            client.delete_object(Bucket=BUCKET, Key=name)
        for what, times in took.items() if round_ else ():  # the first round warms up
            found.setdefault(what, []).append(times)
    store.close()
    client.close()
    return found


def main(arguments: list[str]) -> None:
    """Print MiB/s, CPU and the ratios."""
    parser = argparse.ArgumentParser(prog="python -m nemo_dcr.testing.object_store_speed")
    for name, default in (("mib", 16), ("count", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory, SeaweedServer(Path(directory)) as server:
        found = rounds(server, given.mib * MIB, given.count, given.rounds)
    total = given.mib * given.count
    lines = [f"{given.count} objects of {given.mib} MiB, {given.rounds} rounds"]
    for ours, plain in (("publish", "plain put"), ("fetch", "plain get")):
        for what in (plain, ours):
            wall, cpu = (statistics.median(each) for each in zip(*found[what], strict=True))
            lines.append(f"{what}: {total / wall:.0f} MiB/s, {1000 * cpu / total:.1f} ms CPU a MiB")
        pairs = list(zip(found[ours], found[plain], strict=True))
        speed = statistics.median(theirs[0] / mine[0] for mine, theirs in pairs)
        cpu = statistics.median(mine[1] / theirs[1] for mine, theirs in pairs)
        lines.append(f"{ours} over {plain}: speed x{speed:.2f}, CPU x{cpu:.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
