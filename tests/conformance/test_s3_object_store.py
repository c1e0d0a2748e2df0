"""The S3 object store passes the transport suite on two servers; every peer is a client of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_dcr.ids import AttemptId
from nemo_dcr.testing.transport_suite import TransportSuite
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Transport
from nemo_dcr.transport.s3 import S3ObjectStore
from tests.object_servers import BUCKET, ObjectServer, name_of

pytestmark = pytest.mark.slow


class S3Suite(TransportSuite):
    many, page_keys = 110, 50
    """A page of a listing is less than a set; test_s3_faults.py has more keys than a server lists at once."""

    def open(self, server: ObjectServer, share: Path | None = None) -> Iterator[S3ObjectStore]:
        shared = None if share is None else str(share)
        self.server, self.config = server, server.config(page_keys=self.page_keys, share=shared)
        with ExitStack() as self.stack:
            yield self.stack.enter_context(server.store(self.config))

    def peer(self, transport: Transport) -> S3ObjectStore:
        return self.stack.enter_context(self.server.store(self.config))

    def alter(self, transport: Transport, announcement: Announcement) -> None:
        name, client = name_of(self.config, announcement.key), self.server.client()
        content = bytearray(client.get_object(Bucket=BUCKET, Key=name)["Body"].read())
        content[objects.FRAME_BYTES] ^= 1
        client.put_object(Bucket=BUCKET, Key=name, Body=bytes(content))
        client.close()


class TestOverSeaweedfs(S3Suite):
    @pytest.fixture
    def transport(self, seaweedfs: ObjectServer) -> Iterator[S3ObjectStore]:
        yield from self.open(seaweedfs)


class TestOverMoto(S3Suite):
    @pytest.fixture
    def transport(self, moto: ObjectServer) -> Iterator[S3ObjectStore]:
        yield from self.open(moto)


class TestOverMotoWithSharedDownloads(S3Suite):
    """All peers are receivers of one node, and one more is there all the time."""

    many = 60

    @pytest.fixture
    def transport(self, moto: ObjectServer, tmp_path: Path) -> Iterator[S3ObjectStore]:
        for store in self.open(moto, tmp_path):
            self.peer(store).subscribe(AttemptId(0), []).stop()
            yield store
