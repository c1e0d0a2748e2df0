"""The in-memory transport, without and with faults that cost only time, passes the transport suite."""

from __future__ import annotations

import pytest

from nemo_dcr.testing.transport_suite import TransportSuite
from nemo_dcr.transport.base import Announcement, Transport
from nemo_dcr.transport.faults import FaultPlan
from nemo_dcr.transport.memory import MemoryTransport


class TestMemoryTransport(TransportSuite):
    @pytest.fixture
    def transport(self) -> MemoryTransport:
        return MemoryTransport()

    def alter(self, transport: Transport, announcement: Announcement) -> None:
        assert isinstance(transport, MemoryTransport)
        key = announcement.key
        bodies = transport._sets[key.attempt][key.owner].bodies
        bodies[key.payload] = bytes([bodies[key.payload][0] ^ 1]) + bodies[key.payload][1:]


class TestMemoryTransportWithFaults(TestMemoryTransport):
    manifest_last = False
    own_attempt_only = False

    @pytest.fixture(params=[1, 2])
    def transport(self, request: pytest.FixtureRequest) -> MemoryTransport:
        faults = FaultPlan(seed=request.param, lose=0.3, repeat=0.3, reorder=0.5, late=0.2, stale=0.3)
        return MemoryTransport(faults)
