"""Whole refits over S3 object storage: real nodes and sockets, a real SeaweedFS, and faults in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from nemo_dcr.protocol.coordinator_events import AttemptEnded, Ready, TransitionEnded
from nemo_dcr.testing.http_faults import Fault, FaultyProxy
from nemo_dcr.trace import Action
from nemo_dcr.transport.s3 import S3ObjectStore
from tests.e2e.socket_cluster import SocketCluster
from tests.object_servers import BUCKET, ObjectServer

pytestmark = pytest.mark.slow


@pytest.fixture
def refits(seaweedfs: ObjectServer, tmp_path: Path) -> Iterator[tuple[SocketCluster, FaultyProxy, str]]:
    """Two instances, one of two ranks; every node has a client of its own."""
    with ExitStack() as stack:
        proxy, server = stack.enter_context(seaweedfs.faulty())
        config = server.config(missing_after_s=5.0, attempts=3)

        def opened() -> S3ObjectStore:
            return stack.enter_context(server.store(config))

        cluster = SocketCluster(tmp_path, {"e0": 1, "e1": 2}, processes=False, transport=opened)
        stack.callback(cluster.close)
        yield cluster, proxy, config.root


def modes(cluster: SocketCluster) -> list[str]:
    journal = [entry for entry in cluster.control.journal() if entry.action == Action.PREPARE]
    return [entry.args["mode"] for entry in journal if entry.args["candidate"]]


def test_a_retry_over_object_storage_ends_without_a_mismatched_bit(
    refits: tuple[SocketCluster, FaultyProxy, str], seaweedfs: ObjectServer
) -> None:
    cluster, proxy, root = refits
    cluster.train()
    cluster.until(TransitionEnded)
    cluster.until(Ready)
    assert cluster.stored() == cluster.expected()

    gone = proxy.plant(
        Fault(
            lambda r: r.method == "GET" and r.path.endswith("payload-00000001") and not r.range,
            1000,
            403,
            "AccessDenied",
        )
    )
    cluster.train()
    failed = cluster.until(AttemptEnded)
    assert "grant this operation" in failed.reason
    gone.times = 0
    cluster.until(TransitionEnded)
    cluster.until(Ready)
    assert modes(cluster) == ["xor", "xor", "overwrite"]
    assert cluster.stored() == cluster.expected()
    assert cluster.control.history()[-1].version == 2

    client = seaweedfs.client()
    left = client.list_objects_v2(Bucket=BUCKET, Prefix=f"{root}attempt-").get("Contents", [])
    client.close()
    assert left == []


def test_faults_that_retries_of_requests_repair_fail_no_attempt(
    refits: tuple[SocketCluster, FaultyProxy, str],
) -> None:
    cluster, proxy, _ = refits
    proxy.plant(Fault(lambda r: r.method == "PUT" and "/payload-" in r.path, 1, 503, "SlowDown"))
    proxy.plant(Fault(lambda r: r.method == "PUT" and "/payload-" in r.path, lose_answer=True))
    proxy.plant(Fault(lambda r: r.method == "GET" and "/payload-" in r.path and not r.range, keep_bytes=150))
    proxy.plant(Fault(lambda r: r.method == "GET" and "/payload-" in r.path and not r.range, 2, 404, "NoSuchKey"))
    cluster.train()
    cluster.until(TransitionEnded)
    cluster.until(Ready)
    assert modes(cluster) == ["xor"]
    assert cluster.stored() == cluster.expected()
    assert not any(fault.times for fault in proxy.faults)
