"""The S3 control plane passes the suites on two servers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_dcr.control import s3
from nemo_dcr.control.s3 import S3Control
from nemo_dcr.control.s3_objects import S3RecordConfig
from nemo_dcr.testing.control_calls import STEPS, Step
from nemo_dcr.testing.control_clock_suite import ControlClockSuite
from nemo_dcr.testing.control_process_suite import ControlServerSuite, ServerThatRestarts
from nemo_dcr.testing.seaweedfs import SeaweedServer
from nemo_dcr.transport.s3_client import S3Credentials
from tests.object_servers import BUCKET, ObjectServer, session_of

pytestmark = pytest.mark.slow


class OneClient:
    """A session that makes one client for all handles of a server: each costs more than the calls of most tests."""

    def __init__(self, server: ObjectServer) -> None:
        self._session = session_of(server.credentials)
        self._made: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def client(self, *args: Any, **options: Any) -> Any:
        self._made = self._made or self._session.client(*args, **options)
        return self._made


one_client = cache(OneClient)


def control_at(server: ObjectServer, place: Path, now: Callable[[], float]) -> S3Control:
    config = S3RecordConfig(bucket=BUCKET, prefix=str(place).strip("/"), endpoint=server.endpoint)
    return S3Control(config, one_client(server), now=now)


class RestartedSeaweed:
    """A SeaweedFS of one test's own, that is killed and comes back on its data, port and credentials."""

    def __init__(self, directory: Path, credentials: S3Credentials) -> None:
        self._directory = directory
        self._server = SeaweedServer(directory, credentials=credentials)
        self.endpoint = self._server.endpoint

    def kill(self) -> None:
        os.kill(self._server.pid, signal.SIGKILL)
        self._server.close()

    def restart(self) -> None:
        port = int(self.endpoint.rsplit(":", 1)[1])
        self._server = SeaweedServer(self._directory, port=port, credentials=self._server.credentials)

    def close(self) -> None:
        self._server.close()


class TestOverSeaweedfs(ControlServerSuite):
    rounds, enough = 4, 0

    @pytest.fixture(autouse=True)
    def server(self, seaweedfs: ObjectServer) -> None:
        self.seaweedfs = seaweedfs

    def open(self, place: Path, now: Callable[[], float]) -> S3Control:
        return control_at(self.seaweedfs, place, now)

    def url(self, place: Path) -> str:
        return f"s3://{BUCKET}/{str(place).strip('/')}?endpoint={self.seaweedfs.endpoint}"

    def keys(self) -> tuple[str, ...]:
        return (self.seaweedfs.credentials.access_key, self.seaweedfs.credentials.secret_key)

    @contextmanager
    def own_server(self, directory: Path) -> Iterator[tuple[ServerThatRestarts, str]]:
        with closing(RestartedSeaweed(directory, self.seaweedfs.credentials)) as server:
            yield server, f"s3://{BUCKET}/refits?endpoint={server.endpoint}"

    @given(steps=st.lists(STEPS, min_size=5, max_size=30), tail=st.sampled_from([1, 3, s3.TAIL_EVENTS]))
    @settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_random_calls_equal_the_rules_step_by_step(self, steps: list[Step], tail: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(s3, "TAIL_EVENTS", tail)
            self.compare_with_rules(steps)


class TestOverMoto(ControlClockSuite):
    rounds = 2

    @pytest.fixture(autouse=True)
    def server(self, moto: ObjectServer) -> None:
        self.moto = moto

    def open(self, place: Path, now: Callable[[], float]) -> S3Control:
        return control_at(self.moto, place, now)

    @given(steps=st.lists(STEPS, min_size=5, max_size=30))
    @settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    def test_random_calls_equal_the_rules_step_by_step(self, steps: list[Step]) -> None:
        self.compare_with_rules(steps)
