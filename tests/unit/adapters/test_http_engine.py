"""The HTTP driver against a server that answers as vLLM's routes do, and as they do when something is wrong."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from nemo_dcr.adapters.vllm.engine_api import HttpEngine
from nemo_dcr.adapters.vllm.rank import Loan
from nemo_dcr.errors import EngineTrouble
from nemo_dcr.ids import Version

OK = (200, {})
GATE = {"open": False, "version": None, "running": 0}
GOOD = {
    "GET /nemo_dcr/gate": (200, GATE),
    "POST /nemo_dcr/gate/close": (200, GATE),
    "POST /pause?mode=wait": OK,
    "POST /reset_prefix_cache?reset_external=true": (200, {"success": True}),
    "POST /reset_mm_cache": OK,
    "POST /reset_encoder_cache": OK,
    "POST /update_weight_version": OK,
    "POST /resume": OK,
    "POST /nemo_dcr/gate/open?version=4": OK,
    "POST /update_weights": OK,
}


class Routes:
    """Answers by route, every request in order, and one update session as vLLM keeps it."""

    def __init__(self):
        self.answers = dict(GOOD)
        self.asked = []
        self.session = False
        routes = self

        class Handler(BaseHTTPRequestHandler):
            def _serve(self):
                self.rfile.read(int(self.headers.get("content-length") or 0))
                route = f"{self.command} {self.path}"
                routes.asked.append(route)
                status, body = routes.answer(route)
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _serve  # noqa: N815 the names that the base class calls

            def log_message(self, *arguments):
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.engine = HttpEngine(f"http://127.0.0.1:{self._server.server_address[1]}/")

    def answer(self, route):
        wanted = {"POST /start_weight_update": False, "POST /finish_weight_update": True}.get(route)
        if wanted is None:
            return self.answers.get(route, (404, {"detail": "Not Found"}))
        if self.session is not wanted:
            return 500, {"error": "start_weight_update called while a weight update is already active"}
        self.session = not self.session
        return OK

    def close(self):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def routes():
    found = Routes()
    yield found
    found.close()


def test_a_pause_closes_the_gate_waits_and_empties_every_cache(routes):
    routes.engine.pause()
    assert routes.asked == [
        "GET /nemo_dcr/gate",
        "POST /nemo_dcr/gate/close",
        "POST /pause?mode=wait",
        "POST /reset_prefix_cache?reset_external=true",
        "POST /reset_mm_cache",
        "POST /reset_encoder_cache",
    ]


def test_a_resume_names_the_version_before_anything_computes_and_opens_the_gate_last(routes):
    routes.engine.resume(Version(4))
    assert [route for route in routes.asked if route.startswith("POST")] == [
        "POST /update_weight_version",
        "POST /resume",
        "POST /nemo_dcr/gate/open?version=4",
    ]


@pytest.mark.parametrize(
    ("route", "answer", "told"),
    [
        ("POST /reset_prefix_cache?reset_external=true", (200, {"success": False}), "reset the prefix cache"),
        ("POST /reset_prefix_cache?reset_external=true", (200, {}), "reset the prefix cache"),
        ("POST /reset_encoder_cache", (501, {"error": "not supported"}), "not supported"),
        ("POST /reset_mm_cache", (500, {}), "status 500"),
        ("POST /pause?mode=wait", (500, {"error": "Failed to reset the KV connector cache."}), "KV connector"),
        ("POST /nemo_dcr/gate/close", (200, GATE | {"running": 2}), "close the gate"),
    ],
)
def test_an_engine_that_is_not_quiet_and_empty_is_trouble(routes, route, answer, told):
    routes.answers[route] = answer
    with pytest.raises(EngineTrouble, match=told):
        routes.engine.pause()


def test_a_server_without_control_routes_says_how_to_open_them(routes):
    routes.answers.clear()
    with pytest.raises(EngineTrouble, match="VLLM_SERVER_DEV_MODE=1"):
        routes.engine.pause()


def test_a_session_that_another_driver_left_open_is_closed_first(routes):
    routes.session = True
    routes.engine.lend(Loan(0.1, 1.0))
    assert routes.session is False
    assert routes.asked.count("POST /update_weights") == 1


def test_a_server_that_is_gone_is_trouble():
    routes = Routes()
    routes.close()
    with pytest.raises(EngineTrouble, match="no answer"):
        routes.engine.pause()
