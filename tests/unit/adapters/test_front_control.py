"""The plugin's own control socket, over a real socket, in front of an engine client that keeps a record."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from nemo_dcr.adapters.vllm.admission import Admission
from nemo_dcr.adapters.vllm.control import EngineCall, FrontControl, SocketEngine
from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.errors import EngineTrouble, InvalidConfig
from nemo_dcr.ids import Version
from nemo_dcr.runtime.addresses import wait_for_address
from nemo_dcr.runtime.rpc import PLAINTEXT
from nemo_dcr.transport.relay.keys import Security, new_keys


class Client:
    """What vLLM's engine client offers, as a record of calls; a session may be open, and a cache may refuse."""

    def __init__(self):
        self.calls: list = []
        self.resets = True
        self.session = False

    async def pause_generation(self, *, mode, clear_cache):
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self):
        self.calls.append("resume")

    async def reset_prefix_cache(self, running, connector):
        self.calls.append("reset_prefix_cache")
        return self.resets

    async def reset_mm_cache(self):
        self.calls.append("reset_mm_cache")

    async def reset_encoder_cache(self):
        self.calls.append("reset_encoder_cache")

    async def update_weight_version(self, version):
        self.calls.append(("version", version))

    async def init_weight_transfer_engine(self, request):
        self.calls.append(("init", request.init_info))

    async def start_weight_update(self):
        if self.session:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.session = True

    async def update_weights(self, request):
        assert self.session
        self.calls.append(("update", request.update_info))

    async def finish_weight_update(self):
        if not self.session:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.session = False


@pytest.fixture
def requests(monkeypatch):
    """vLLM's two request classes, where it is not installed."""
    try:
        import vllm.distributed.weight_transfer.base  # noqa: F401
    except ImportError:
        base = types.ModuleType("vllm.distributed.weight_transfer.base")
        base.WeightTransferInitRequest = lambda init_info: types.SimpleNamespace(init_info=init_info)
        base.WeightTransferUpdateRequest = lambda update_info: types.SimpleNamespace(update_info=update_info)
        for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)


def drive(directory, story, *, served=None, driven=PLAINTEXT):
    """Run `story(engine)` on a thread of its own against a front on this one; returns the client and the gate."""
    client = Client()

    async def front():
        gate = Admission()
        control = FrontControl(client, gate, directory, "e", **(served or {}))
        try:
            await asyncio.to_thread(on_thread)
        finally:
            control.close()
        return gate

    def on_thread():
        engine = SocketEngine(wait_for_address(directory, "front-e", 10), driven)
        try:
            story(engine, client)
        finally:
            engine.close()

    return client, asyncio.run(front())


def test_the_four_calls_reach_the_engine_in_order(tmp_path, requests):
    settings = Settings(instance="e", directory=str(tmp_path), store=str(tmp_path), run="r")

    def story(engine, client):
        engine.attach(settings)
        engine.lend(Loan(0.1, 1.0))
        engine.resume(Version(7))

    client, gate = drive(tmp_path, story)
    resets = ["reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"]
    assert client.calls == [
        ("pause", "wait", True),
        *resets,
        ("init", settings.init_info()),
        ("update", {"idle_s": 0.1, "at_most_s": 1.0}),
        ("version", "7"),
        "resume",
    ]
    assert gate.version == "7"


def test_a_cache_that_is_not_reset_is_trouble(tmp_path, requests):
    def story(engine, client):
        client.resets = False
        with pytest.raises(EngineTrouble, match="reset the prefix cache"):
            engine.pause()

    drive(tmp_path, story)


def test_a_session_that_another_driver_left_open_is_closed_first(tmp_path, requests):
    def story(engine, client):
        client.session = True
        engine.lend(Loan(0.1, 1.0))
        assert not client.session

    client, _ = drive(tmp_path, story)
    assert client.calls == [("update", {"idle_s": 0.1, "at_most_s": 1.0})]


def test_an_unknown_call_is_answered_and_changes_nothing(tmp_path, requests):
    def story(engine, client):
        with pytest.raises(EngineTrouble, match="KeyError"):
            engine._call(EngineCall("sleep"), 5.0)

    client, _ = drive(tmp_path, story)
    assert client.calls == []


def test_beyond_loopback_the_front_answers_who_is_listed_and_nobody_else(tmp_path, requests):
    server, driver, stranger = (new_keys(tmp_path / name) for name in ("server", "driver", "stranger"))
    served = {"listen": "tcp://0.0.0.0:*", "security": Security(keys=server, allowed=frozenset({driver.public}))}
    client, _ = drive(tmp_path, lambda engine, _: engine.pause(), served=served, driven=Security(keys=driver))
    assert client.calls[0] == ("pause", "wait", True)

    def refused(engine, client):
        with pytest.raises(EngineTrouble, match="does not admit this key"):
            engine.pause()
        assert client.calls == []

    drive(tmp_path, refused, served=served, driven=Security(keys=stranger))
    with pytest.raises(InvalidConfig, match="no key pair"):
        drive(tmp_path, refused, served=served)
    with pytest.raises(InvalidConfig, match="not a loopback address"):
        drive(tmp_path, refused, served={"listen": "tcp://0.0.0.0:*"})
