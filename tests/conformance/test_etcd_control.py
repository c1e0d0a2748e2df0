"""The etcd control plane passes the suites, on Debian's etcd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_dcr.control import open_control
from nemo_dcr.record import WatchedControlPlane
from nemo_dcr.testing.control_calls import STEPS, Step
from nemo_dcr.testing.control_process_suite import ControlServerSuite
from nemo_dcr.testing.etcd_server import EtcdServer

pytestmark = pytest.mark.slow


class TestEtcdControl(ControlServerSuite):
    rounds, enough = 6, 0

    @pytest.fixture(autouse=True)
    def server(self, etcd: EtcdServer) -> None:
        self.etcd = etcd

    def open(self, place: Path, now: Callable[[], float]) -> WatchedControlPlane:
        return open_control(self.url(place), now=now)

    def url(self, place: Path) -> str:
        return f"etcd://{self.etcd.address}/{str(place).strip('/')}"

    @contextmanager
    def own_server(self, directory: Path) -> Iterator[tuple[EtcdServer, str]]:
        with EtcdServer(directory) as server:
            yield server, f"etcd://{server.address}/refits"

    @given(steps=st.lists(STEPS, min_size=5, max_size=30))
    @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_random_calls_equal_the_rules_step_by_step(self, steps: list[Step]) -> None:
        self.compare_with_rules(steps)
