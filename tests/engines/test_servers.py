"""Two real servers with the real 135M model: one driven over vLLM's own routes, one over the plugin's control socket.

Requests stream through an asynchronous and a synchronous refit. Every answer is attributed to one version, answers of
one version agree, and afterwards every stored bit of both servers is that of a dense load by vLLM, and every answer and
log probability that of a fresh engine.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest

from nemo_dcr.adapters.vllm.control import SocketEngine
from nemo_dcr.adapters.vllm.engine_api import HttpEngine
from nemo_dcr.adapters.vllm.whole_source import WholeTrainer
from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.runtime.addresses import wait_for_address
from nemo_dcr.runtime.methods import DUMP, Nothing
from nemo_dcr.testing.checkpoint import smollm2_checkpoint
from tests.engines import tiny
from tests.engines.fresh import fresh_answers
from tests.engines.servers import START_S, Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000), pytest.mark.filterwarnings("default")]
"""Importing vLLM warns of things that are not ours."""
LONG = [(7 * number) % 4000 + 3 for number in range(140)]
"""Longer than a block of the prefix cache."""
PROMPTS = ([1, 2, 3, 4], LONG)


class Story:
    """Both servers, their trainer and three versions of the model."""

    def __init__(self, directory):
        self.directory = directory
        self.checkpoints = [smollm2_checkpoint(directory / "v")]
        (directory / "control").mkdir()
        settings = json.dumps({"nemo_dcr": {"control": str(directory / "control"), "instance": "locked"}})
        first = self.checkpoints[0]
        self.open = Server(first, directory / "open.log")
        self.locked = Server(first, directory / "locked.log", "--additional-config", settings, control_routes=False)
        self.trainer = WholeTrainer(
            directory / "run", tiny.read(first).items(), refit=RefitConfig(heartbeat_s=0.05, lost_after_s=60)
        )
        self.control: SocketEngine | None = None

    def step(self):
        """Make two later versions."""
        for seed in (1, 2):
            base = tiny.read(self.checkpoints[-1])
            self.checkpoints.append(tiny.stepped(self.checkpoints[0], base, seed, 0.01))

    def stored(self):
        """Bytes of every tensor of every receiver, as dumped over the control sockets."""
        answers = self.trainer.endpoints.call_receivers(DUMP, Nothing(), 600.0)
        return {
            receiver: {
                row.name: (row.dtype, tuple(row.shape), frame)
                for row, frame in zip(storage.tensors, bulk.frames, strict=True)
            }
            for receiver, (storage, bulk) in answers.items()
        }

    def close(self):
        self.trainer.close()
        if self.control is not None:
            self.control.close()
        for server in (self.open, self.locked):
            server.stop()


class Stream:
    """Requests to both servers without a pause, each with what came back."""

    def __init__(self, servers):
        self.answers = []
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(server, name, prompt))
            for name, server in servers.items()
            for prompt in PROMPTS
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server, name, prompt):
        while not self._stopping.is_set():
            status, version, body = server.complete(prompt)
            self.answers.append((name, len(prompt), status, version, body))

    def wait_for(self, version):
        """Until every thread got an answer of this version."""
        turn = threading.Event()
        for _ in range(6000):
            seen = {(name, length) for name, length, _, found, _ in list(self.answers) if found == version}
            if len(seen) == len(self._threads):
                return
            turn.wait(0.1)
        raise AssertionError(f"no answers of version {version}: {self.answers[-4:]}")

    def end(self):
        self._stopping.set()
        for thread in self._threads:
            thread.join(600)


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    found = Story(tmp_path_factory.mktemp("servers"))
    try:
        found.step()  # while the servers start
        found.open.wait()
        found.locked.wait()
        yield found
    finally:
        found.close()


def test_a_server_refuses_requests_before_a_version_is_committed(story):
    for server in (story.open, story.locked):
        assert server.complete([1, 2, 3])[:2] == (503, None)


def test_without_control_routes_nobody_pauses_the_server_through_its_port(story):
    for path in ("pause", "update_weights", "nemo_dcr/gate/close"):
        request = urllib.request.Request(f"{story.locked.url}/{path}", b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        assert refused.value.code == 404
        refused.value.close()
    with pytest.raises(EngineTrouble, match="start the server with VLLM_SERVER_DEV_MODE=1"):
        HttpEngine(story.locked.url).pause()


def test_requests_stream_through_refits_and_every_bit_is_that_of_a_dense_load(story):
    from nemo_dcr.cli.vllm_check import expected_storage

    http = HttpEngine(story.open.url)
    control = story.control = SocketEngine(wait_for_address(Path(story.directory) / "control", "front-locked", START_S))
    story.trainer.add_engine(http, "open", post_apply_check=True)
    story.trainer.add_engine(control, "locked")
    story.trainer.begin()
    stream = Stream({"open": story.open, "locked": story.locked})
    try:
        for number, gate in ((0, None), (1, GateMode.ASYNC), (2, GateMode.SYNC)):
            if gate is not None:
                story.trainer.refit(tiny.read(story.checkpoints[number]).items(), gate, timeout_s=900)
            stream.wait_for(str(number))
    finally:
        stream.end()
    assert {status for _, _, status, _, _ in stream.answers} == {200}
    told = defaultdict(set)
    for _, length, _, version, body in stream.answers:
        told[length, version].add(tuple(body["choices"][0]["token_ids"]))
    assert {version for _, version in told} == {"0", "1", "2"}
    assert {key: len(found) for key, found in told.items() if len(found) != 1} == {}
    assert http.weight_version() == "2"
    wanted = {
        name: (dtype, shape, words.tobytes())
        for name, (dtype, shape, words) in expected_storage(story.checkpoints[2], 0, 1).items()
    }
    stored = story.stored()
    assert set(stored) == {"open/0", "locked/0"}
    for found in stored.values():
        assert sorted(found) == sorted(wanted)
        assert [name for name in wanted if found[name] != wanted[name]] == []


def test_refitted_servers_answer_as_a_fresh_engine_does(story, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    wanted, checksums = fresh_answers(story.checkpoints[2], list(PROMPTS), tokens=8)
    assert HttpEngine(story.open.url).checksums() == checksums
    assert len(checksums) > 100
    for server in (story.open, story.locked):
        for prompt, answer in zip(PROMPTS, wanted, strict=True):
            status, version, body = server.complete(prompt)
            assert (status, version) == (200, "2")
            choice = body["choices"][0]
            assert (tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])) == answer


def test_vllms_own_trainer_api_carries_out_whole_transitions(story):
    from vllm.distributed.weight_transfer.base import WeightSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from nemo_dcr.adapters.vllm.plugin import register
    from nemo_dcr.adapters.vllm.trainer import NemoDcrTrainerInit

    class Checkpoint(WeightSource):
        path = story.checkpoints[0]

        def metadata(self):
            raise AssertionError("whole tensors tell their own shapes")

        def __iter__(self):
            return iter(sorted(tiny.read(self.path).items()))

    register()
    story.trainer.endpoints.remove_engine("open")
    source = Checkpoint()
    (story.directory / "own").mkdir()
    info = NemoDcrTrainerInit(directory=str(story.directory / "own"), rank=0)
    client = HTTPVLLMWeightSyncClient(story.open.url)
    trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    try:
        assert story.open.complete([1, 2, 3])[:2] == (200, "0")
        source.path = story.checkpoints[1]
        trainer.send_weights()
        assert trainer.version == 1
        status, version, _ = story.open.complete([1, 2, 3])
        assert (status, version) == (200, "1")
    finally:
        trainer.shutdown()


def test_a_server_that_is_resumed_behind_the_coordinators_back_computes_nothing_mixed(story):
    """vLLM's open routes let anybody resume: over storage that is not committed, the engine ends instead."""
    engine = HttpEngine(story.open.url)
    story.trainer.endpoints.add_engine(engine, story.trainer.settings("open"), 1)
    engine._post("resume")
    engine._post("nemo_dcr/gate/open?version=forged")
    status, _, _ = story.open.complete([1, 2, 3])
    assert status == 500
    assert "was told to compute tokens with storage" in story.open.log.read_text()
