"""The file object store passes the transport suite; every peer opens the directory anew, as another process would."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_dcr.testing.transport_suite import TransportSuite
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Transport
from nemo_dcr.transport.object_store import FileObjectStore


class TestFileObjectStore(TransportSuite):
    @pytest.fixture
    def transport(self, tmp_path: Path) -> FileObjectStore:
        self.root = tmp_path / "store"
        return FileObjectStore(self.root, run="suite", missing_after_s=0.1)

    def peer(self, transport: Transport) -> FileObjectStore:
        return FileObjectStore(self.root, run="suite", missing_after_s=0.1)

    def alter(self, transport: Transport, announcement: Announcement) -> None:
        key = announcement.key
        owner = self.root / objects.attempt_name(key.attempt) / objects.owner_name(key.owner)
        path = owner / objects.payload_name(key.payload)
        content = bytearray(path.read_bytes())
        content[objects.FRAME_BYTES] ^= 1
        path.write_bytes(content)
