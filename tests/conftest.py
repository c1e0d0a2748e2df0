"""Settings that every test shares: Hypothesis profiles, and one compute thread for each process.

`dev` is the default, `ci` is chosen where CI is set and repeats the same examples, `long` is for a night.
Pick one by hand with HYPOTHESIS_PROFILE. The thread limit is set before torch is imported and is inherited by the
processes that tests start. Files with slow tests come first: workers take whole files, and one that begins its longest
file last keeps the others waiting. The servers `seaweedfs`, `moto` and `etcd` start once for each pytest process. A
test that uses the first or the last of them has the marker `servers`, because they are programs of others.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

_SLOW_DATA = (HealthCheck.too_slow, HealthCheck.data_too_large)

settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_SLOW_DATA)
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    suppress_health_check=_SLOW_DATA,
)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_SLOW_DATA)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A real SeaweedFS on loopback, as `tests.object_servers.ObjectServer`."""
    # Imported here: most test runs need neither boto3 nor a server.
    from nemo_dcr.testing.seaweedfs import SeaweedServer
    from tests.object_servers import ObjectServer

    with SeaweedServer(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield ObjectServer(server.endpoint, server.credentials)


@pytest.fixture(scope="session")
def moto() -> Iterator[object]:
    """moto in this process, as `tests.object_servers.ObjectServer`."""
    from tests.object_servers import moto_server

    with moto_server() as server:
        yield server


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Debian's etcd on loopback, as `nemo_dcr.testing.etcd_server.EtcdServer`; without the program tests fail."""
    from nemo_dcr.testing.etcd_server import EtcdServer

    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs a server; bring the files with slow tests to the front; the order stays as it is otherwise."""
    for item in items:
        if {"seaweedfs", "etcd"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.servers)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
