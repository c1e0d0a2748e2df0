"""Control calls: values both ways, named failures, no blocking on a dead or stopped peer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import zmq

from nemo_dcr.errors import EndpointLost, InternalError, InvalidConfig
from nemo_dcr.runtime import rpc
from nemo_dcr.runtime.rpc import (
    RPC_VERSION,
    Bulk,
    Method,
    NoReply,
    Peer,
    Respond,
    Server,
    _Header,
    call,
    exchange,
    require,
)
from nemo_dcr.trace import LamportClock


@dataclass(frozen=True)
class Echo:
    text: str
    number: int


@dataclass(frozen=True)
class Echoed:
    text: str


ECHO = Method("echo", Echo, Echoed)

SERVER_SCRIPT = """
import sys, time
from dataclasses import dataclass
from nemo_dcr.runtime.rpc import Method, Server
from nemo_dcr.trace import LamportClock
@dataclass(frozen=True)
class Echo:
    text: str
    number: int
@dataclass(frozen=True)
class Echoed:
    text: str
server = Server("child", LamportClock())
server.answer(Method("echo", Echo, Echoed), lambda argument: Echoed(argument.text))
server.start()
print(server.address, flush=True)
time.sleep(60)
"""


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("node", LamportClock())
    server.register(
        ECHO, lambda argument, respond: respond(Echoed(argument.text * argument.number), Bulk((b"raw", b"")))
    )
    server.start()
    yield server
    server.close()


def test_a_reply_and_its_bulk_frames_come_back_as_values(server: Server, context: zmq.Context) -> None:
    peer = Peer("node", server.address, LamportClock(), context)
    answer = call(peer, ECHO, Echo("ab", 2), 5.0)
    assert answer == (Echoed("abab"), Bulk((b"raw", b"")))
    peer.close()


def test_every_message_carries_the_lamport_clock_forward(context: zmq.Context) -> None:
    clock = LamportClock()
    server = Server("node", clock)
    server.answer(ECHO, lambda argument: Echoed(argument.text))
    server.start()
    mine = LamportClock()
    mine.merge(1000)
    peer = Peer("node", server.address, mine, context)
    call(peer, ECHO, Echo("x", 1), 5.0)
    assert clock.tick() > 1002
    assert mine.tick() > 1004
    peer.close()
    server.close()


def test_an_unknown_method_a_bad_argument_and_another_version_are_refused_by_name(
    server: Server, context: zmq.Context
) -> None:
    peer = Peer("node", server.address, LamportClock(), context)
    answer = call(peer, Method("nothing", Echo, Echoed), Echo("x", 1), 5.0)
    assert isinstance(answer, NoReply)
    assert "unknown control call 'nothing'" in answer.reason
    answer = call(peer, Method("echo", Echoed, Echoed), Echoed("x"), 5.0)
    assert isinstance(answer, NoReply)
    assert "argument of echo is not valid" in answer.reason
    peer.socket.send_multipart([msgspec.msgpack.encode(_Header(RPC_VERSION + 1, 3, "echo", 0)), b""])
    peer._waiting = 3
    deadline = time.monotonic() + 5
    answer = None
    while answer is None and time.monotonic() < deadline:
        answer = peer.receive(ECHO)
    assert isinstance(answer, NoReply)
    assert "upgrade one side" in answer.reason
    peer.close()


def test_garbage_on_the_socket_does_not_stop_the_server(server: Server, context: zmq.Context) -> None:
    peer = Peer("node", server.address, LamportClock(), context)
    for frames in ([b"x"], [b"x", b"y"], [b"\xc1", b"y"], [b"", b"", b"", b""], [msgspec.msgpack.encode([1, 2]), b""]):
        peer.socket.send_multipart(frames)
    assert call(peer, ECHO, Echo("still", 1), 5.0) == (Echoed("still"), Bulk((b"raw", b"")))
    peer.close()


def test_a_typed_error_of_a_handler_is_a_value_for_the_caller(context: zmq.Context) -> None:
    def refuse(argument: Echo) -> Echoed:
        raise InvalidConfig("field", argument.text)

    server = Server("node", LamportClock())
    server.answer(ECHO, refuse)
    server.start()
    peer = Peer("node", server.address, LamportClock(), context)
    answer = call(peer, ECHO, Echo("too small", 1), 5.0)
    assert isinstance(answer, NoReply)
    assert "InvalidConfig" in answer.reason
    assert "too small" in answer.reason
    with pytest.raises(EndpointLost, match="node"):
        require({"node": answer})
    peer.close()
    server.close()


def test_plaintext_is_served_on_loopback_only(context: zmq.Context) -> None:
    with pytest.raises(InvalidConfig, match="loopback"):
        Server("node", LamportClock(), "tcp://0.0.0.0:*")
    with pytest.raises(InvalidConfig, match="loopback"):
        Peer("node", "tcp://192.0.2.1:1", LamportClock(), context)


def test_a_server_names_an_address_that_is_taken(server: Server) -> None:
    with pytest.raises(InvalidConfig, match="cannot bind"):
        Server("node", LamportClock(), server.address)


@pytest.mark.timeout(60)
def test_peers_of_one_context_may_come_and_go_as_fast_as_they_like(server: Server, context: zmq.Context) -> None:
    for count in range(1000):  # each is built in the memory that the one before it has just left
        Peer("node", server.address, LamportClock(), context).close()
        if count % 100 == 99:
            time.sleep(0.1)  # a context has a thousand sockets, and its own thread gives closed ones back
    last = Peer("node", server.address, LamportClock(), context)
    assert not isinstance(call(last, ECHO, Echo("now", 1), 5.0), NoReply)
    last.close()


def test_a_peer_that_cannot_be_built_leaves_nothing_that_keeps_the_context_open() -> None:
    own = zmq.Context()
    with pytest.raises(InvalidConfig, match="cannot connect"):
        Peer("node", "tcp://127.0.0.1:none", LamportClock(), own)
    ended = threading.Thread(target=own.term, daemon=True)
    ended.start()
    ended.join(10.0)
    assert not ended.is_alive()


@pytest.mark.parametrize("fatal", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_peer_shows_at_once_and_a_stopped_one_after_the_limit(fatal: int, context: zmq.Context) -> None:
    child = subprocess.Popen([sys.executable, "-c", SERVER_SCRIPT], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        with child.stdout:
            address = child.stdout.readline().strip()
            peer = Peer("child", address, LamportClock(), context)
            assert call(peer, ECHO, Echo("up", 1), 10.0) == (Echoed("up"), Bulk(()))
            os.kill(child.pid, fatal)
            if fatal == signal.SIGKILL:
                child.wait(10)
            begin = time.monotonic()
            answer = exchange({"child": (peer, ECHO, Echo("down", 1))}, 1.5)["child"]
            waited = time.monotonic() - begin
            assert isinstance(answer, NoReply)
            assert answer.disconnected == (fatal == signal.SIGKILL)
            assert waited < (1.0 if fatal == signal.SIGKILL else 4.0)
            peer.close()
    finally:
        child.kill()
        child.wait(10)


def test_one_slow_peer_does_not_hide_the_replies_of_the_others(server: Server, context: zmq.Context) -> None:
    slow = Server("slow", LamportClock())
    slow.answer(ECHO, lambda argument: (time.sleep(1.0), Echoed(argument.text))[1])
    slow.start()
    peers = {
        "node": Peer("node", server.address, LamportClock(), context),
        "slow": Peer("slow", slow.address, LamportClock(), context),
    }
    answers = exchange({name: (peer, ECHO, Echo("x", 1)) for name, peer in peers.items()}, 0.3)
    assert answers["node"] == (Echoed("x"), Bulk((b"raw", b"")))
    assert isinstance(answers["slow"], NoReply)
    # The late reply of the abandoned call is not taken for the reply of the next one.
    assert call(peers["slow"], ECHO, Echo("second", 1), 5.0) == (Echoed("second"), Bulk(()))
    for peer in peers.values():
        peer.close()
    slow.close()


def test_an_answer_may_come_later_from_another_thread_while_the_server_goes_on(context: zmq.Context) -> None:
    server = Server("node", LamportClock())
    later: list[Respond] = []
    server.register(Method("later", Echo, Echoed), lambda argument, respond: later.append(respond))
    server.answer(ECHO, lambda argument: Echoed(argument.text))
    server.start()
    waiting = Peer("waiting", server.address, LamportClock(), context)
    other = Peer("other", server.address, LamportClock(), context)
    method = Method("later", Echo, Echoed)
    waiting.send(method, Echo("x", 1))
    assert call(other, ECHO, Echo("now", 1), 5.0) == (Echoed("now"), Bulk(()))
    assert waiting.receive(method) is None
    deadline = time.monotonic() + 5
    while not later and time.monotonic() < deadline:
        time.sleep(0.01)  # the two connections have no order between them
    threading.Thread(target=lambda: later[0](Echoed("done"))).start()
    deadline = time.monotonic() + 5
    answer = None
    while answer is None and time.monotonic() < deadline:
        answer = waiting.receive(method)
    assert answer == (Echoed("done"), Bulk(()))
    waiting.close()
    other.close()
    server.close()


def test_a_fault_of_our_own_in_a_handler_ends_the_server_and_is_handed_over(context: zmq.Context) -> None:
    def broken(argument: Echo) -> Echoed:
        raise InternalError("a fact does not hold")

    faults: list[BaseException] = []
    server = Server("node", LamportClock(), on_fault=faults.append)
    server.answer(ECHO, broken)
    server.start()
    peer = Peer("node", server.address, LamportClock(), context)
    assert isinstance(call(peer, ECHO, Echo("x", 1), 0.5), NoReply)
    assert isinstance(faults[0], InternalError)
    peer.close()
    server.close()


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_peer_that_was_dead_for_long_hinders_neither_its_own_end_nor_others(
    server: Server, context: zmq.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "RECONNECT_MS", 1)
    gone = Server("gone", LamportClock())
    gone.start()
    gone.close()
    dead = Peer("dead", gone.address, LamportClock(), context)
    idle = threading.Event()
    idle.wait(15.0)  # thousands of attempts, and nobody reads what is told about them
    other = Peer("other", server.address, LamportClock(), context)
    assert not isinstance(call(other, ECHO, Echo("now", 1), 5.0), NoReply)
    ended = threading.Thread(target=dead.close, daemon=True)
    ended.start()
    ended.join(10.0)
    assert not ended.is_alive()
    other.close()
