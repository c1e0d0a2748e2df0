"""A plan adds up, moves the right way with each input, and refuses what cannot be planned."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from nemo_dcr.adapters.huggingface import count_elements
from nemo_dcr.cli.main import app
from nemo_dcr.cli.plan import fraction
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.planner.calibration import read_calibration
from nemo_dcr.planner.coding import BYTES_PER_CHANGE, Coding, bytes_per_change
from nemo_dcr.planner.models import GB, ModelSize, read_model
from nemo_dcr.planner.pipeline import Load, run
from nemo_dcr.planner.plan import Delivery, Deployment, make_plan

PAPER = read_calibration("paper")
LOAD = Load(
    owners=1,
    training_nodes=1,
    owner_bytes=1000,
    bucket_bytes=100,
    payload_bytes=100,
    construct_bytes_s=1000,
    construct_fixed_s=0,
    uplink_bytes_s=10,
    downlink_bytes_s=10,
    store=False,
    round_trip_s=0,
    apply_bytes_s=1e12,
)


def never(config: Path) -> int:
    raise AssertionError(f"{config} was counted")


def near(found: float, wanted: float, share: float = 1e-9) -> bool:
    """Seconds and bytes of a prediction, not bits of a weight."""
    return abs(found - wanted) <= share * abs(wanted)


def test_construction_hides_behind_a_slow_link() -> None:
    """Ten buckets of 0.1 s each, ten payloads of 1 s each: one bucket, then the link."""
    course = run(LOAD)
    assert course.payloads == 10
    assert near(course.constructed_s, 1.0)
    assert near(course.transport_s, 10.0)
    assert near(course.applied_s, 10.1)


def test_a_fast_link_hides_behind_construction() -> None:
    course = run(replace(LOAD, uplink_bytes_s=1000, downlink_bytes_s=1000))
    assert near(course.applied_s, 1.0 + 0.01)
    assert near(course.transport_s, 10 * 0.01)


def test_the_store_passes_a_payload_on_when_it_has_all_of_it_and_the_relay_tree_while_it_comes() -> None:
    relay, store = run(LOAD), run(replace(LOAD, store=True))
    assert near(store.applied_s, relay.applied_s + 1.0)


def test_owners_of_one_node_share_its_uplink_and_all_nodes_the_root() -> None:
    two = replace(LOAD, owners=2, payload_bytes=200)
    assert near(run(two).applied_s, 20.1)
    assert near(run(replace(two, training_nodes=2)).applied_s, 20.1)
    assert near(run(replace(two, training_nodes=2, downlink_bytes_s=20)).applied_s, 10.1, 0.06)


@given(
    owners=st.integers(1, 9),
    nodes=st.integers(1, 3),
    buckets=st.integers(1, 12),
    payload=st.floats(1, 1e4),
    up=st.floats(1, 1e3),
    down=st.floats(1, 1e3),
    store=st.booleans(),
)
def test_no_refit_is_faster_than_its_bounds_or_its_links(
    owners: int, nodes: int, buckets: int, payload: float, up: float, down: float, store: bool
) -> None:
    nodes = min(nodes, owners)
    load = replace(
        LOAD,
        owners=owners,
        training_nodes=nodes,
        bucket_bytes=1000 / buckets,
        payload_bytes=payload,
        uplink_bytes_s=up,
        downlink_bytes_s=down,
        store=store,
    )
    course = run(load)
    assert course.applied_s >= max(course.constructed_s, course.transport_s, payload / down) * (1 - 1e-9)
    assert course.applied_s >= payload / nodes / up * (1 - 1e-9)


@pytest.mark.parametrize("coding", Coding)
def test_payloads_are_as_measured_and_between_the_measurements_between_them(coding: Coding) -> None:
    points = sorted(BYTES_PER_CHANGE[coding].items())
    assert all(near(bytes_per_change(change, coding), measured) for change, measured in points)
    for (low, at_low), (high, at_high) in itertools.pairwise(points):
        assert at_high < bytes_per_change((low + high) / 2, coding) < at_low
    assert bytes_per_change(1e-6, coding) == points[0][1]


def test_every_further_node_and_gigabit_helps_and_every_change_costs() -> None:
    base = Deployment(model=ModelSize("m", 100 * GB), change=0.01)
    latency = make_plan(base, PAPER).latency_s
    assert make_plan(replace(base, gbps=10), PAPER).latency_s < latency
    assert make_plan(replace(base, owners=64, training_nodes=16), PAPER).latency_s < latency
    assert make_plan(replace(base, change=0.02), PAPER).latency_s > latency
    assert make_plan(replace(base, coding=Coding.paper), PAPER).latency_s > latency


def test_traffic_and_memory_follow_the_paper() -> None:
    base = Deployment(model=ModelSize("m", 1121 * GB), change=0.03, coding=Coding.paper)
    relay, store = make_plan(base, PAPER), make_plan(replace(base, delivery=Delivery.s3), PAPER)
    assert relay.v_cross == relay.v_payload
    assert near(store.v_cross, 9 * store.v_payload)
    assert near(relay.owner_bytes / GB, 36, 0.02)  # Section 5: about 36 GB on each of 32 ranks


def test_from_its_crossover_on_the_full_checkpoint_is_there_first() -> None:
    base = Deployment(model=ModelSize("m", 100 * GB), change=0.01)
    plan = make_plan(base, PAPER)
    assert plan.speedup > 1
    assert plan.crossover_gbps is not None
    for factor, ahead in ((0.99, True), (1.01, False)):
        assert (make_plan(replace(base, gbps=plan.crossover_gbps * factor), PAPER).speedup > 1) is ahead


@pytest.mark.parametrize(
    ("text", "found"), [("1.2%", 0.012), ("0.012", 0.012), ("100%", 1.0), (" 3 % ".replace(" ", ""), 0.03)]
)
def test_a_change_rate_is_a_share_or_a_percentage(text: str, found: float) -> None:
    assert near(fraction(text), found)


@pytest.mark.parametrize("text", ["", "%", "-1%", "1.2 percent", "1,2%", "nan", "1e-2"])
def test_any_other_change_rate_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="--change"):
        fraction(text)


def test_the_size_of_a_model_comes_from_its_name_index_files_or_configuration(tmp_path: Path) -> None:
    assert read_model("1T", never).nbytes == 2242 * GB
    assert read_model("500GB", never).nbytes == 500 * GB
    (tmp_path / "one.safetensors").write_bytes(bytes(100))
    assert read_model(str(tmp_path), never).nbytes == 100
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 12345}, "weight_map": {}}))
    assert read_model(str(tmp_path), never).nbytes == read_model(str(index), never).nbytes == 12345
    config = tmp_path / "config.json"
    fields = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    fields |= {"num_key_value_heads": 2, "vocab_size": 128, "tie_word_embeddings": False}
    config.write_text(json.dumps({"model_type": "llama", **fields}))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert read_model(str(config), count_elements).nbytes == 2 * (2 * layer + 2 * 128 * 64 + 64)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "no such model"}', '{"architectures": ["x"]}'])
def test_a_file_that_is_no_model_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(InvalidConfig, match="--model"):
        read_model(str(file), count_elements)


@pytest.mark.parametrize("text", ["2B", "GB", "-5GB", "nowhere", ""])
def test_any_other_model_is_refused_with_the_forms_that_it_may_have(text: str) -> None:
    with pytest.raises(InvalidConfig, match="500GB"):
        read_model(text, never)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("relay_share = 0.5386", "relay_share is missing"),
        ("", "surprise is unknown"),
        ("relay_share", "no TOML"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused(tmp_path: Path, change: str, message: str) -> None:
    text = (Path(__file__).parents[3] / "nemo_dcr" / "planner" / "paper.toml").read_text(encoding="utf-8")
    changed = {"relay_share = 0.5386": text.replace(change, ""), "": text + "surprise = 1\n"}
    file = tmp_path / "rates.toml"
    file.write_text(changed.get(change, text + change))
    with pytest.raises(InvalidConfig, match=message):
        read_calibration(str(file))


@pytest.mark.parametrize("value", ["0", "-1", '"fast"', "true", "nan"])
def test_a_rate_out_of_range_is_refused(tmp_path: Path, value: str) -> None:
    text = (Path(__file__).parents[3] / "nemo_dcr" / "planner" / "paper.toml").read_text(encoding="utf-8")
    file = tmp_path / "rates.toml"
    file.write_text(text.replace("apply_bytes_s = 20e9", f"apply_bytes_s = {value}"))
    with pytest.raises(InvalidConfig, match="apply_bytes_s"):
        read_calibration(str(file))


def test_the_command_prints_a_plan_with_where_its_rates_come_from() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "1T", "--change", "3%", "--codec", "paper"])
    assert done.exit_code == 0, done.output
    assert "179.9 s, 37.8 times the speed of the full checkpoint" in done.stdout
    assert done.stdout.rstrip().endswith(PAPER.provenance)
    done = CliRunner().invoke(app, ["plan", "--model", "1T", "--transport", "s3", "--json"])
    found = json.loads(done.stdout)
    assert near(found["v_cross"], 9 * found["v_payload"])
    assert found["provenance"] == PAPER.provenance


def test_on_a_fast_fabric_the_command_says_to_send_the_full_checkpoint() -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "30B", "--gbps", "900"])
    assert done.exit_code == 0, done.output
    assert "already: send the full checkpoint" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--gbps", "0"], ["--change", "0%"], ["--train-nodes", "9", "--owners", "8"], ["--calibration", "x"]]
)
def test_a_deployment_that_cannot_be_is_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["plan", "--model", "30B", *arguments])
    assert isinstance(done.exception, InvalidConfig)
