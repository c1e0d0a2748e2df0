"""The request gate in front of a server: held, refused, counted and attributed requests."""

from __future__ import annotations

import asyncio
import json

from nemo_dcr.adapters.vllm.middleware import VERSION_HEADER, RequestGate


class Server:
    """An ASGI application that answers in two parts, the second when it is told to."""

    def __init__(self):
        self.computed: list[str] = []
        self.finish = asyncio.Event()
        self.finish.set()

    async def __call__(self, scope, receive, send):
        self.computed.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        await self.finish.wait()
        await send({"type": "http.response.body", "body": b"last"})


class Front:
    """The gate and its server, and a client of both."""

    def __init__(self, *, controlled=True):
        self.server = Server()
        self.gate = RequestGate(self.server, controlled=controlled)

    async def ask(self, path, method="GET"):
        """Status, headers, body."""
        path, _, query = path.partition("?")
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode()}
        await self.gate(scope, never, send)
        body = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], dict(sent[0]["headers"]), body

    async def post(self, path):
        status, _, body = await self.ask(path, "POST")
        return status, json.loads(body)


async def never():
    """The client sends nothing more."""
    await asyncio.Event().wait()


async def settle():
    """Let every task run until it waits."""
    loop, turns = asyncio.get_running_loop(), 20
    for _ in range(turns):
        turn = loop.create_future()
        loop.call_soon(turn.set_result, None)
        await turn


def test_a_server_without_a_committed_version_refuses_requests():
    async def story():
        front = Front()
        status, headers, _ = await front.ask("/v1/completions")
        assert (status, headers[b"retry-after"], front.server.computed) == (503, b"1", [])
        assert (await front.ask("/health"))[0] == 200

    asyncio.run(story())


def test_a_closed_gate_holds_requests_and_answers_them_by_the_version_it_opens_with():
    async def story():
        front = Front()
        assert await front.post("/nemo_dcr/gate/open?version=3") == (200, {"open": True, "version": "3", "running": 0})
        assert (await front.post("/nemo_dcr/gate/close"))[1]["open"] is False
        held = asyncio.create_task(front.ask("/v1/completions"))
        await settle()
        assert front.server.computed == []
        await front.post("/nemo_dcr/gate/open?version=4")
        status, headers, body = await held
        assert (status, headers[VERSION_HEADER], body) == (200, b"4", b"first last")

    asyncio.run(story())


def test_closing_waits_for_the_last_byte_of_running_responses_and_admits_no_others():
    async def story():
        front = Front()
        await front.post("/nemo_dcr/gate/open?version=3")
        front.server.finish.clear()
        running = asyncio.create_task(front.ask("/v1/completions"))
        await settle()
        closing = asyncio.create_task(front.post("/nemo_dcr/gate/close"))
        late = asyncio.create_task(front.ask("/v1/chat/completions"))
        await settle()
        assert not closing.done()
        assert front.server.computed == ["/v1/completions"]
        assert json.loads((await front.ask("/nemo_dcr/gate"))[2]) == {"open": False, "version": None, "running": 1}
        front.server.finish.set()
        assert (await closing)[1] == {"open": False, "version": None, "running": 0}
        assert (await running)[1][VERSION_HEADER] == b"3"
        await front.post("/nemo_dcr/gate/open?version=4")
        assert (await late)[1][VERSION_HEADER] == b"4"

    asyncio.run(story())


def test_a_request_that_fails_or_is_cancelled_does_not_run_any_more():
    async def story():
        front = Front()
        await front.post("/nemo_dcr/gate/open?version=1")
        front.server.finish.clear()
        running = asyncio.create_task(front.ask("/v1/completions"))
        await settle()
        running.cancel()
        assert (await front.post("/nemo_dcr/gate/close"))[1]["running"] == 0

    asyncio.run(story())


def test_without_control_the_routes_are_the_servers_own():
    async def story():
        front = Front(controlled=False)
        await front.ask("/nemo_dcr/gate/open?version=1", "POST")
        assert front.server.computed == ["/nemo_dcr/gate/open"]
        assert (await front.ask("/v1/completions"))[0] == 503

    asyncio.run(story())


def test_opening_needs_a_version_and_unknown_routes_do_not_exist():
    async def story():
        front = Front()
        assert (await front.post("/nemo_dcr/gate/open"))[0] == 400
        assert (await front.post("/nemo_dcr/gate/shut"))[0] == 404

    asyncio.run(story())
