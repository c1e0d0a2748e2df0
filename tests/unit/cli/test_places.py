"""Where a process of a job stands: loopback and one store, unless the job names addresses, keys and a tree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_dcr.cli.job import DemoJob
from nemo_dcr.cli.places import RELAY, STORE, Choose, ChosenTransport, place_of
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.runtime.rpc import LOOPBACK
from nemo_dcr.transport.memory import MemoryTransport
from nemo_dcr.transport.relay.keys import new_keys
from nemo_dcr.transport.relay.tree import TreeNode, balanced_tree, write_tree

OWNER, ATTEMPT = OwnerId(0), AttemptId(1)


@pytest.fixture
def job(tmp_path: Path) -> DemoJob:
    made = DemoJob(
        run=str(tmp_path / "run"),
        model="model",
        owners=1,
        instances={"r1": 1},
        chunk_target_bytes=1,
        bucket_target_bytes=1,
        name="run-1",
    )
    made.save()
    return made


def test_without_names_a_process_listens_on_loopback_in_plaintext_and_uses_the_store(job: DemoJob) -> None:
    place = place_of(job, "owner-0")
    assert (place.listen, place.key) == (LOOPBACK, "")
    publisher = place.transport.publisher(ATTEMPT, OWNER)
    publisher.publish(PayloadKey(ATTEMPT, OWNER, 0), b"payload", b"digest")
    assert list(job.store.rglob("*0*"))
    assert place.transport.choose(Choose(RELAY)).problem != ""


def test_a_job_across_hosts_gives_every_process_its_address_key_and_node(job: DemoJob, tmp_path: Path) -> None:
    pair = new_keys(tmp_path / "keys" / "r1-0")
    node = new_keys(tmp_path / "keys" / "relay")
    write_tree(tmp_path / "tree.json", balanced_tree([TreeNode("r1", "tcp://198.51.100.1:7500", node.public)]))
    far = replace(
        job,
        listen={"r1/0": "tcp://198.51.100.1:7400"},
        keys=str(tmp_path / "keys"),
        tree=str(tmp_path / "tree.json"),
        relay_nodes={"r1/0": "r1"},
    )
    place = place_of(far, "r1/0")
    assert (place.listen, place.key) == ("tcp://198.51.100.1:7400", pair.public)
    assert place.transport.choose(Choose(RELAY)).problem == ""
    assert "no transport" in place.transport.choose(Choose(STORE)).problem
    with pytest.raises(InvalidConfig, match="has no node"):
        place_of(replace(far, relay_nodes={"r1/0": "r9"}), "r1/0")
    with pytest.raises(InvalidConfig, match="cannot read"):
        place_of(far, "owner-0")


def test_a_chosen_transport_serves_new_attempts_and_all_are_cleaned_up() -> None:
    first, second = MemoryTransport(), MemoryTransport()
    both = ChosenTransport({STORE: first, RELAY: second})
    key = PayloadKey(ATTEMPT, OWNER, 0)
    both.publisher(ATTEMPT, OWNER).publish(key, b"one", b"digest")
    assert both.choose(Choose(RELAY)).problem == ""
    both.publisher(ATTEMPT, OWNER).publish(key, b"two", b"digest")
    for transport, size in ((first, 3), (second, 3)):
        found = transport.subscribe(ATTEMPT, [OWNER]).poll(1.0)
        assert found is not None
        assert found.nbytes == size
    both.cleanup(ATTEMPT)
    assert [each.subscribe(ATTEMPT, [OWNER]).poll(0.0) for each in (first, second)] == [None, None]
