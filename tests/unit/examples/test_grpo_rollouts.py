"""Requests of a rollout against a server that plays vLLM's routes: pinned batches, seeds, attribution, shares."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.grpo.asynchronous import lags
from examples.grpo.records import Sample
from examples.grpo.rollouts import RolloutServer, sample_all
from nemo_dcr.errors import ConditionViolated, EngineTrouble

WAIT_S = 20


class Played:
    """What a vLLM server does with these routes; a paused one keeps completions until it is resumed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.asked: list[dict] = []
        self.version, self.drop = "7", 0
        self.running, self.resumed = 0, threading.Event()
        self.resumed.set()
        played = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.answer(*played.get(self.path))

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"] or 0))
                self.answer(*played.post(self.path, json.loads(body) if body else None))

            def answer(self, status, found, version=""):
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                if version:
                    self.send_header("x-nemo-dcr-version", version)
                self.end_headers()
                self.wfile.write(content)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def get(self, path):
        self.calls.append(path)
        if path == "/nemo_dcr/gate":
            return 200, {"running": self.running}
        return 200, {"is_paused": not self.resumed.is_set()}

    def post(self, path, body):
        self.calls.append(path)
        if path == "/tokenize":
            return 200, {"tokens": [198] if body["prompt"] == "\n" else [len(body["prompt"]), 1]}
        if path.startswith("/pause"):
            self.resumed.clear()
        if path == "/resume":
            self.resumed.set()
        if path != "/v1/completions":
            return 200, {}
        self.asked.append(body)
        self.running += 1
        if not self.resumed.wait(WAIT_S):
            return 500, {}
        self.running -= 1
        choices = [
            {"index": number, "text": f" {number}", "token_ids": [number], "logprobs": {"token_logprobs": [-0.5]}}
            for number in reversed(range(body["n"] - self.drop))
        ]
        return 200, {"choices": choices}, self.version


@pytest.fixture
def played():
    server = Played()
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_a_pinned_batch_is_queued_before_the_scheduler_is_resumed(played):
    samples = RolloutServer("left", played.url).sample(
        [(1, 2), (3,)], members=2, max_tokens=8, seeds=[40, 42], pinned=True
    )
    assert played.calls[1].startswith("/pause?mode=wait")
    calls = [call for call in played.calls if call != "/nemo_dcr/gate"]
    queued = ["/v1/completions", *["/is_paused"] * 3]
    assert calls[2:] == [*queued, *queued, "/resume"]
    assert [(body["prompt"], body["n"], body["seed"]) for body in played.asked] == [([1, 2], 2, 40), ([3], 2, 42)]
    assert {(tuple(body["stop_token_ids"]), body["max_tokens"]) for body in played.asked} == {((198,), 8)}
    assert [sample.tokens for sample in samples] == [(0,), (1,), (0,), (1,)]
    assert [sample.prompt for sample in samples] == [(1, 2), (1, 2), (3,), (3,)]
    assert {(sample.instance, sample.version) for sample in samples} == {("left", 7)}


def test_an_answer_for_something_else_is_refused_with_the_scheduler_resumed(played):
    played.drop = 1
    with pytest.raises(EngineTrouble, match="1 choices"):
        RolloutServer("left", played.url).sample([(1,), (3,)], members=2, max_tokens=8, seeds=[0, 2], pinned=True)
    assert played.calls[-1] == "/resume"


def test_an_unattributed_answer_is_refused(played):
    played.version = ""
    with pytest.raises(EngineTrouble, match="of version ''"):
        RolloutServer("left", played.url).sample([(1,)], members=1, max_tokens=8, seeds=[0], pinned=False)


def test_a_server_that_is_gone_is_named():
    with pytest.raises(EngineTrouble, match="no answer"):
        RolloutServer("left", "http://127.0.0.1:1")


def test_every_server_computes_its_share_and_samples_come_back_in_order(played):
    other = Played()
    servers = [RolloutServer("left", played.url), RolloutServer("right", other.url)]
    prompts = [servers[0].tokenize("x" * number) for number in range(3)]
    shares = {"left": (0, 1), "right": (2, 3, 4, 5)}
    found = sample_all(servers, prompts, shares, members=2, max_tokens=4, seed=1, pinned=True)
    other.http.shutdown()
    other.http.server_close()
    assert [sample.prompt for sample in found] == [(0, 1), (0, 1), (1, 1), (1, 1), (2, 1), (2, 1)]
    assert [sample.instance for sample in found] == ["left"] * 2 + ["right"] * 4
    assert [[body["seed"] for body in each.asked] for each in (played, other)] == [[1], [3, 5]]


def sample(version: int) -> Sample:
    return Sample((1,), (2,), (-0.1,), "", "left", version)


def test_a_lag_is_counted_in_committed_versions():
    assert lags((sample(3), sample(5), sample(4)), 5) == (2, 0, 1)
    with pytest.raises(ConditionViolated, match="not committed"):
        lags((sample(3), sample(6)), 5)
