"""Drivers, ranks and the protocol around an engine with a main loop of its own, which computes whenever it may."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from nemo_dcr.adapters.vllm import rank
from nemo_dcr.adapters.vllm.rank import Loan, RankReceiver
from nemo_dcr.adapters.vllm.whole_source import WholeTrainer
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import CodecConfig, GateMode, RefitConfig
from nemo_dcr.errors import EndpointLost, EngineTrouble, InvalidConfig, OperatorNeeded
from nemo_dcr.ids import ReceiverId
from nemo_dcr.protocol.coordinator_events import AttemptEnded
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.runtime.addresses import read_addresses
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import DUMP, Nothing
from nemo_dcr.runtime.rpc import PLAINTEXT
from nemo_dcr.runtime.trace_file import read_trace
from nemo_dcr.testing.local_oracle import stored_bits
from nemo_dcr.testing.source_cases import changed_words, random_words
from nemo_dcr.testing.toy_loader import Composed, PadRows, Slice, ToyModel
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.relay.keys import Security, new_keys

TENSORS = (
    TensorMeta("a.w", (8, 4), "BF16"),
    TensorMeta("b.w", (5, 6), "F32"),
    TensorMeta("c.w", (9, 5), "F16"),
    TensorMeta("d.w", (4, 4), "I64"),
)
RULES = {"a.w": Slice(0), "b.w": Composed(), "c.w": PadRows(4), "d.w": Slice(1)}
REFIT = RefitConfig(heartbeat_s=0.02, call_timeout_s=2.0, lost_after_s=3.0)
CODEC = CodecConfig(chunk_target_bytes=64, bucket_target_bytes=128)


class LoopEngine:
    """Ranks with one main loop that computes on all of them whenever it is not paused, as `vllm serve` does."""

    def __init__(self, ranks, weights):
        self.models = [ToyModel(TENSORS, RULES, rank, ranks) for rank in range(ranks)]
        for model in self.models:
            model.load_weights(weights)
        self.receivers: list[RankReceiver] = []
        self.paused = False
        self.version = None
        self.computed: list[tuple[str, tuple]] = []
        """Version label and stored bits of every rank at each forward pass after the first resume."""
        self.reset_refusals = 0
        self.session = [False] * ranks
        self._commands: queue.SimpleQueue = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self):
        while not self._stopping.is_set():
            try:
                command, done = self._commands.get(timeout=0.002)
            except queue.Empty:
                if not self.paused:
                    self._forward()
                continue
            try:
                done.set_result(command())
            except Exception as problem:
                done.set_exception(problem)

    def _forward(self):
        for receiver in self.receivers:
            receiver.fence()
        if self.receivers:
            self.computed.append((str(self.version), tuple(map(repr, map(stored_bits, self.models)))))

    def on_loop(self, command):
        done: Future = Future()
        self._commands.put((command, done))
        return done.result(30)

    def attach(self, settings):
        self.pause()
        self.on_loop(lambda: self._open(settings))

    def _open(self, settings):
        ranks = len(self.models)
        self.receivers = [RankReceiver(settings, rank, ranks, self.models[rank]) for rank in range(ranks)]

    def pause(self):
        self.on_loop(lambda: setattr(self, "paused", True))
        if self.reset_refusals:
            self.reset_refusals -= 1
            raise EngineTrouble("toy", "reset the prefix cache", "it answered {'success': False}")

    def lend(self, loan):
        self.on_loop(lambda: [receiver.lend(loan) for receiver in self.receivers])

    def resume(self, version):
        self.version = version
        self.on_loop(lambda: setattr(self, "paused", False))

    def kill(self):
        self._stopping.set()
        self._thread.join(10)
        for receiver in self.receivers:
            receiver.close()


class Story:
    """A trainer, engines and what each version's storage must be."""

    def __init__(self, directory, **options):
        self.rng = np.random.default_rng(3)
        self.words = {meta.name: random_words(self.rng, meta.dtype, meta.numel) for meta in TENSORS}
        self.first = self.tensors()
        self.dense: dict[str, dict[int, tuple]] = {}
        self.engines: list[LoopEngine] = []
        self.trainer = WholeTrainer(directory, self.first, refit=REFIT, codec=CODEC, **options)

    def tensors(self):
        return [(m.name, tensor_from_words(self.words[m.name].copy(), m.dtype, m.shape)) for m in TENSORS]

    def step(self):
        self.words = {m.name: changed_words(self.rng, m.dtype, self.words[m.name], 0.4) for m in TENSORS}
        return self.tensors()

    def engine(self, ranks):
        self.engines.append(LoopEngine(ranks, self.first))
        return self.engines[-1]

    def expected(self, ranks):
        """What a dense load of the present words leaves in every rank."""
        models = [ToyModel(TENSORS, RULES, rank, ranks) for rank in range(ranks)]
        for model in models:
            model.load_weights(self.first)
            model.load_weights(self.tensors())
        return tuple(map(repr, map(stored_bits, models)))

    def stored(self, engine):
        return engine.on_loop(lambda: tuple(map(repr, map(stored_bits, engine.models))))

    def settle(self, engine, passes=3):
        """Wait until the engine computed some more."""
        before, waited = len(engine.computed), threading.Event()
        for _ in range(1000):
            if len(engine.computed) >= before + passes:
                return
            waited.wait(0.01)
        raise AssertionError("the engine computes nothing")

    def close(self):
        self.trainer.close()
        for engine in self.engines:
            engine.kill()


@pytest.fixture
def story(tmp_path):
    found = Story(tmp_path)
    yield found
    found.close()


def test_every_forward_pass_around_refits_computes_with_one_committed_version(story):
    one, two = story.engine(1), story.engine(2)
    story.trainer.add_engine(one, "one")
    story.trainer.add_engine(two, "two", 2)
    story.trainer.begin()
    dense = {("1", "0"): story.expected(1), ("2", "0"): story.expected(2)}
    for number in range(1, 5):
        story.settle(one)
        story.settle(two)
        gate = GateMode.ASYNC if number % 2 else GateMode.SYNC
        assert story.trainer.refit(story.step(), gate) == number
        dense |= {("1", str(number)): story.expected(1), ("2", str(number)): story.expected(2)}
    story.settle(one)
    story.settle(two)
    for engine, ranks in ((one, "1"), (two, "2")):
        assert {version for version, _ in engine.computed} == {"0", "1", "2", "3", "4"}
        assert [v for v, bits in engine.computed if bits != dense[ranks, v]] == []
        assert [receiver.forwards_refused for receiver in engine.receivers] == [0] * len(engine.receivers)


def test_an_engine_that_cannot_drop_its_caches_fails_the_attempt_before_any_write(story):
    engine = story.engine(1)
    story.trainer.add_engine(engine, "one")
    story.trainer.begin()
    story.settle(engine)
    engine.reset_refusals = 2
    assert story.trainer.refit(story.step()) == 1
    assert story.stored(engine) == story.expected(1)
    reasons = [effect.reason for effect in story.trainer.outcomes if isinstance(effect, AttemptEnded) and effect.reason]
    assert len(reasons) >= 1
    assert all("reset the prefix cache" in reason for reason in reasons)
    events = read_trace(next((story.trainer.directory / "traces").glob("one-0-*.ndjson")))
    failed = {event.attempt for event in events if event.action == "FailReceiver"}
    assert failed
    assert not failed & {event.attempt for event in events if event.action in ("StartApply", "ApplyItem")}


def test_an_engine_that_was_killed_comes_back_fenced_and_is_restored(story):
    steady, victim = story.engine(1), story.engine(2)
    story.trainer.add_engine(steady, "steady")
    story.trainer.add_engine(victim, "victim", 2)
    story.trainer.begin()
    story.trainer.refit(story.step())
    victim.kill()
    assert story.trainer.refit(story.step()) == 2
    again = story.engine(2)
    story.trainer.add_engine(again, "victim", 2)
    assert again.paused
    assert {receiver.node.report.tag.kind for receiver in again.receivers} == {TagKind.NONE}
    with pytest.raises(OperatorNeeded, match="was told to compute tokens with storage"):
        again.receivers[0].fence()
    story.trainer.run()
    assert story.stored(again) == story.expected(2)
    story.settle(again)
    assert story.trainer.refit(story.step()) == 3
    assert story.stored(steady) == story.expected(1)
    assert story.stored(again) == story.expected(2)


def test_a_driver_that_takes_over_finds_the_engine_serving_and_pauses_it_before_the_next_write(story):
    engine = story.engine(1)
    story.trainer.add_engine(engine, "one")
    story.trainer.begin()
    story.settle(engine)
    driver = story.trainer.endpoints._drivers["one"]
    driver.close()
    later = type(driver)(engine, driver.ranks, story.trainer.endpoints._shared_clock)
    story.trainer.endpoints._drivers["one"] = later
    later.start()
    assert story.trainer.refit(story.step()) == 1
    assert story.stored(engine) == story.expected(1)
    assert engine.receivers[0].forwards_refused == 0


def test_a_fault_on_the_lent_thread_ends_the_receiver_and_not_the_engine(story, monkeypatch):
    engine = story.engine(1)
    story.trainer.add_engine(engine, "one")
    story.trainer.begin()

    def fault(timeout_s):
        raise KeyError("a fault of this package")

    monkeypatch.setattr(engine.receivers[0].node, "work", fault)
    engine.lend(Loan(0.01, 1.0))
    assert not engine.receivers[0].alive


def test_engines_with_keys_are_refitted_by_who_is_listed_and_by_nobody_else(tmp_path):
    """On an address beyond loopback, where plaintext is not served."""
    server, driver, stranger = (new_keys(tmp_path / name) for name in ("server", "driver", "stranger"))
    (tmp_path / "server" / "allowed.keys").write_text(f"{driver.public}\n")
    (tmp_path / "driver" / "allowed.keys").write_text(f"{server.public}\n")
    story = Story(tmp_path / "run", security=Security(keys=driver))
    listening = {"listen": "tcp://0.0.0.0:*", "keys": str(tmp_path / "server")}
    try:
        engine = story.engine(1)
        story.trainer.add_engine(engine, "a", 1, **listening)
        story.trainer.begin()
        story.trainer.refit(story.step())
        assert story.stored(engine) == story.expected(1)
        (address,) = [each for each in read_addresses(tmp_path / "run" / "addresses") if each.name == "a/0"]
        assert address.key == server.public
        endpoints = SocketEndpoints(LamportClock(), Security(keys=stranger))
        endpoints.add_receiver(ReceiverId("a/0"), address)
        with pytest.raises(EndpointLost, match="does not admit this key"):
            endpoints.call_receivers(DUMP, Nothing(), 5.0)
        endpoints.close()
        endpoints = SocketEndpoints(LamportClock(), PLAINTEXT)
        with pytest.raises(InvalidConfig, match="no key pair"):
            endpoints.add_receiver(ReceiverId("a/0"), address)
        endpoints.close()
    finally:
        story.close()


def test_an_engine_does_not_listen_beyond_loopback_without_keys(tmp_path):
    story = Story(tmp_path / "run")
    try:
        engine = story.engine(1)
        with pytest.raises(InvalidConfig, match="not a loopback address"):
            story.trainer.add_engine(engine, "a", 1, listen="tcp://0.0.0.0:*")
    finally:
        story.close()


def test_a_receiver_lets_go_of_its_transport_when_it_closes_and_when_it_cannot_open(tmp_path, monkeypatch):
    closed = []

    class Watched(FileObjectStore):
        def close(self):
            closed.append(self)
            super().close()

    monkeypatch.setattr(rank, "open_transport", lambda url, run: Watched(tmp_path / "run" / "store", run=run))
    story = Story(tmp_path / "run")
    try:
        story.trainer.add_engine(story.engine(2), "a", 2)
        with pytest.raises(InvalidConfig, match="not a loopback address"):
            story.trainer.add_engine(story.engine(1), "b", 1, listen="tcp://0.0.0.0:*")
        assert len(closed) == 1
    finally:
        story.close()
    assert len(closed) == 3
