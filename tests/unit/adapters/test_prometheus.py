"""The endpoint over a real socket: what a scrape returns, where it listens, and what is refused."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_dcr.adapters.prometheus import LOOPBACK_HOST, MetricsEndpoint, open_metrics
from nemo_dcr.adapters.vllm.rank import RankReceiver
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.ids import AttemptId, CandidateId, Version
from nemo_dcr.runtime.chronicle import GateMoved, LifeBegan, TransitionOver, read_life
from nemo_dcr.testing.toy_loader import Slice, ToyModel
from tests.unit.runtime.test_metrics import began, measured


def scrape(endpoint: MetricsEndpoint) -> dict[tuple[str, tuple[str, ...]], float]:
    with urlopen(f"http://{LOOPBACK_HOST}:{endpoint.port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_has_the_values_and_a_hostile_name_stays_a_label() -> None:
    endpoint = open_metrics("0")
    try:
        hostile = 'e"0\n}\\/0'
        endpoint.metrics.tell(began(1, "c", 1.0))
        endpoint.metrics.tell(measured(1, hostile, {"apply": 1.5}, {"payload_bytes": 3}))
        endpoint.metrics.tell(TransitionOver(at=2.0, version=Version(1), candidate=CandidateId("c")))
        gate = GateMoved(at=1.0, attempt=AttemptId(1), is_open=True, tag="clean(1)", version=Version(1))
        endpoint.metrics.teller(hostile)(gate)
        endpoint.metrics.watch(hostile, lambda: {"staged": 4})
        found = scrape(endpoint)
        assert found["nemo_dcr_stage_seconds_total", (hostile, "apply")] == 1.5
        assert found["nemo_dcr_payload_bytes_total", ("received", hostile)] == 3
        assert found["nemo_dcr_queue_depth", (hostile, "staged")] == 4
        assert found["nemo_dcr_served_version", (hostile,)] == 1
        assert found["nemo_dcr_transition_seconds_count", ()] == 1
        assert found["nemo_dcr_transition_seconds_sum", ()] == 1.0
        assert found["nemo_dcr_transition_seconds_bucket", ("1",)] == 1
        assert found["nemo_dcr_transition_seconds_bucket", ("0.5",)] == 0
    finally:
        endpoint.close()
    with pytest.raises(OSError, match="refused"):
        scrape(endpoint)


def test_a_port_alone_is_on_loopback_and_ranks_take_the_ports_after_it() -> None:
    with socket.create_server((LOOPBACK_HOST, 0)) as free:
        port = free.getsockname()[1]
    endpoint = open_metrics(str(port - 1), rank=1)
    try:
        assert endpoint.port == port
        assert endpoint._server.server_address[0] == LOOPBACK_HOST
        with pytest.raises(InvalidConfig, match=r"cannot be bound .*; name another port"):
            open_metrics(f"{LOOPBACK_HOST}:{port}")
    finally:
        endpoint.close()


@pytest.mark.parametrize("listen", ["", "metrics", "localhost:", ":9400", "localhost:http", "-1", "70000", "²"])
def test_what_is_no_address_is_refused(listen: str) -> None:
    with pytest.raises(InvalidConfig, match="metrics"):
        open_metrics(listen)


def test_a_rank_of_vllm_answers_with_its_queues_until_it_is_closed(tmp_path: Path) -> None:
    for folder in ("addresses", "store"):
        (tmp_path / folder).mkdir()
    model = ToyModel((TensorMeta("a", (4,), "F32"),), {"a": Slice(0)}, 0, 1)
    places = {"directory": str(tmp_path), "store": str(tmp_path / "store")}
    rank = RankReceiver(Settings(instance="engine", run="here", metrics="0", **places), 0, 1, model)
    endpoint = rank._endpoint
    assert endpoint is not None
    assert scrape(endpoint)["nemo_dcr_queue_depth", ("engine/0", "staged")] == 0
    rank.close()
    rank.close()
    with pytest.raises(OSError, match="refused"):
        scrape(endpoint)
    (life,) = (tmp_path / "chronicle").iterdir()
    assert [type(entry) for entry in read_life(life)] == [LifeBegan]


def test_without_the_package_an_operator_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OperatorNeeded, match=r"pip install 'nemo-dcr\[metrics\]'"):
        open_metrics("0")


def test_a_process_without_an_endpoint_does_not_load_the_package() -> None:
    code = (
        "import sys, nemo_dcr.adapters.prometheus, nemo_dcr.cli.coordinator; print('prometheus_client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
