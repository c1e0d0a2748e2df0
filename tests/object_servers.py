"""What tests need of an S3 server: stores of one run each, plain clients, and a proxy that is at fault."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from nemo_dcr.ids import PayloadKey
from nemo_dcr.testing.http_faults import FaultyProxy
from nemo_dcr.transport import objects
from nemo_dcr.transport.s3 import S3ObjectStore
from nemo_dcr.transport.s3_client import S3Config, S3Credentials, open_client
from nemo_dcr.transport.s3_object import set_name

BUCKET = "nemo-dcr"
RUNS = itertools.count()


@dataclass(frozen=True)
class ObjectServer:
    """A server that runs, and what opens its bucket."""

    endpoint: str
    credentials: S3Credentials

    def config(self, **fields: Any) -> S3Config:
        """A run of its own in the bucket, with short waits."""
        known = {"bucket": BUCKET, "run": f"run-{next(RUNS)}", "prefix": "a/b", "endpoint": self.endpoint}
        return S3Config(**{**known, "missing_after_s": 0.1, **fields})

    @contextmanager
    def store(self, config: S3Config | None = None, **fields: Any) -> Iterator[S3ObjectStore]:
        """A store of a run, closed in the end."""
        store = S3ObjectStore(config or self.config(**fields), session_of(self.credentials))
        try:
            yield store
        finally:
            store.close()

    def client(self, config: S3Config | None = None) -> Any:
        """A plain client, to look at objects and to damage them; close it."""
        return open_client(config or self.config(), session_of(self.credentials))

    @contextmanager
    def faulty(self) -> Iterator[tuple[FaultyProxy, ObjectServer]]:
        """A proxy in front of this server, and the server as it is reached through it."""
        with FaultyProxy(self.endpoint) as proxy:
            yield proxy, ObjectServer(proxy.endpoint, self.credentials)


@cache
def session_of(credentials: S3Credentials) -> boto3.session.Session:
    """One session for all clients: each new one reads the description of S3 anew, a tenth of a second."""
    return boto3.session.Session(credentials.access_key, credentials.secret_key)


def name_of(config: S3Config, key: PayloadKey) -> str:
    """The whole key of a payload in the bucket."""
    return f"{config.root}{set_name(key.attempt, key.owner)}/{objects.payload_name(key.payload)}"


@contextmanager
def moto_server() -> Iterator[ObjectServer]:
    """An in-process server; it accepts any credentials."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = ObjectServer(f"http://{host}:{port}", S3Credentials(access_key="moto", secret_key=secrets.token_hex()))
        client = found.client()
        client.create_bucket(Bucket=BUCKET)
        client.close()
        yield found
    finally:
        server.stop()
