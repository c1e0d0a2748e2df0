"""Nodes behind sockets: prewarm, tables, timings and dumps over a call; faults end a service instead of muting it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_dcr.bits import words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import EndpointLost, InternalError
from nemo_dcr.ids import Incarnation, Member, OwnerId, ReceiverId
from nemo_dcr.protocol.coordinator_events import Ready, TransitionEnded
from nemo_dcr.runtime.addresses import Address
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import DUMP, PREWARM, STOP, TABLE, TIMINGS, Nothing, Prewarm, TensorRow
from nemo_dcr.runtime.receiver_node import ReceiverNode
from nemo_dcr.runtime.serve import ReceiverService, metas, rows
from nemo_dcr.runtime.timings import TimingsOf
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.testing.toy_loader import Replicate, ScriptedModel, ToyModel
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.memory import MemoryTransport
from tests.e2e.socket_cluster import TENSORS, SocketCluster

LIMIT_S = 20.0
META = TensorMeta("w", (4,), "BF16")
RECEIVER, LIFE = ReceiverId("e0/0"), Incarnation(1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SocketCluster]:
    """An owner and an engine of two ranks, behind sockets, serving version 1."""
    made = SocketCluster(tmp_path, {"e0": 2}, processes=False)
    try:
        made.train()
        made.until(TransitionEnded)
        made.until(Ready)
        yield made
    finally:
        made.close()


def test_prewarm_table_timings_and_dumps_travel_over_sockets(cluster: SocketCluster) -> None:
    """One session, because it starts many threads: everything that a driver asks of running nodes."""
    endpoints = cluster.endpoints
    ((table, _),) = endpoints.call_owners(TABLE, Nothing(), LIMIT_S).values()
    assert metas(table.tensors) == tuple(sorted(TENSORS))
    assert rows(metas(table.tensors)) == table.tensors
    assert table.source_elements == cluster.node.delta.source_elements
    assert table.baseline_bytes == cluster.node.delta.baseline_bytes

    answers = endpoints.call_receivers(PREWARM, Prewarm(table.tensors), LIMIT_S)
    assert {answer.problem for answer, _ in answers.values()} == {""}
    assert all(set(answer.classes) == {tensor.name for tensor in TENSORS} for answer, _ in answers.values())

    assert cluster.stored() == cluster.expected()

    ((storage, bulk),) = endpoints.call_owners(DUMP, Nothing(), LIMIT_S).values()
    held = [(tensor.name, box.label, word.tolist()) for tensor, box, word in cluster.node.delta.tracker_words()]
    sent = []
    for row, box, frame in zip(storage.tensors, storage.boxes, bulk.frames, strict=True):
        meta = TensorMeta(row.name, row.shape, row.dtype)
        label = BoxMap(meta, box.view, box.start, box.extent, box.axes).label
        sent.append((row.name, label, frame))
    assert [(name, label) for name, label, _ in sent] == [(name, label) for name, label, _ in held]
    sources = {tensor.name: cluster.source.projection(tensor).source for tensor in TENSORS}
    assert [words(frame, sources[name]).tolist() for name, _, frame in sent] == [
        held_words for _, _, held_words in held
    ]

    attempt = cluster.control.history()[-1].attempt
    ((measured, _),) = endpoints.call_owners(TIMINGS, TimingsOf(attempt), LIMIT_S).values()
    assert measured.counts["payloads"] > 0
    for timings, _ in endpoints.call_receivers(TIMINGS, TimingsOf(attempt), LIMIT_S).values():
        assert {"intake_began", "apply_began", "flushed"} <= set(timings.marks)
        assert timings.counts["payload_bytes"] == measured.counts["payload_bytes"]

    cluster.node.delta.lose_baseline()
    with pytest.raises(EndpointLost, match="the tracker is lost; finish the update or rebuild it"):
        endpoints.call_owners(DUMP, Nothing(), LIMIT_S)

    endpoints.call_receivers(STOP, Nothing(), LIMIT_S)
    for thread in cluster.threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in cluster.threads)


def served(node: ReceiverNode) -> tuple[ReceiverService, SocketEndpoints]:
    """A started service, and endpoints that know it."""
    service = ReceiverService(node, LamportClock())
    service.start()
    endpoints = SocketEndpoints(LamportClock())
    endpoints.add_receiver(RECEIVER, Address(RECEIVER, service.address, LIFE, 1))
    return service, endpoints


def node_of(model: ToyModel | ScriptedModel) -> ReceiverNode:
    return ReceiverNode(member=Member(RECEIVER, LIFE), ranks=1, model=model, transport=MemoryTransport())


def test_an_engine_that_cannot_be_prewarmed_says_why_in_its_answer() -> None:
    """The loader raises on a known tensor; the answer is a value, and the engine's thread lives on."""

    def load(tensors: object, weights: object) -> None:
        raise RuntimeError("no such layer")

    service, endpoints = served(node_of(ScriptedModel({}, load)))
    worker = threading.Thread(target=lambda: [service.work(0.05) for _ in iter(service.stopping.is_set, True)])
    worker.start()
    try:
        ((answer, _),) = endpoints.call_receivers(PREWARM, Prewarm(rows([META])), LIMIT_S).values()
        assert "no such layer" in answer.problem or "no such layer" in str(answer.reasons)
        ((again, _),) = endpoints.call_receivers(PREWARM, Prewarm((TensorRow("w", (4,), "BF16"),)), LIMIT_S).values()
        assert again == answer
    finally:
        service.stopping.set()
        worker.join(LIMIT_S)
        endpoints.close()
        service.close()


def test_a_fault_in_the_background_thread_ends_the_service_and_is_raised_by_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A mute process would be waited for until the attempt's deadline; an ended one is named at once."""
    node = node_of(ToyModel((META,), {"w": Replicate()}))

    def broken(timeout_s: float) -> bool:
        raise InternalError("a lemma does not hold")

    monkeypatch.setattr(node, "intake", broken)
    service, endpoints = served(node)
    assert service.stopping.wait(LIMIT_S)
    with pytest.raises(InternalError, match="a lemma does not hold"):
        service.close()
    with pytest.raises(EndpointLost, match="e0/0"):
        endpoints.call_receivers(PREWARM, Prewarm(()), LIMIT_S)
    endpoints.close()


def test_a_forgotten_receiver_is_not_asked_and_a_replaced_one_is_known_by_its_new_life() -> None:
    service, endpoints = served(node_of(ToyModel((META,), {"w": Replicate()})))
    try:
        endpoints.add_receiver(RECEIVER, Address(RECEIVER, service.address, Incarnation(2), 1))
        assert endpoints.receivers() == {RECEIVER: 2}
        endpoints.remove_receiver(RECEIVER)
        endpoints.remove_receiver(RECEIVER)
        assert (endpoints.receivers(), endpoints.owners()) == ({}, ())
        assert endpoints.ask({}, {}, 0.1) == ({}, {})
        endpoints.add_owner(OwnerId(1), Address("owner-1", service.address, LIFE, 1))
        endpoints.add_owner(OwnerId(1), Address("owner-1", service.address, LIFE, 1))
        assert endpoints.owners() == (1,)
    finally:
        endpoints.close()
        service.close()
