"""Control calls beyond loopback: CURVE keys, pinned on one side and listed on the other; plaintext only by a flag."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from nemo_dcr.errors import EndpointLost, InvalidConfig
from nemo_dcr.ids import Incarnation, OwnerId
from nemo_dcr.runtime.addresses import Address, publish_address, wait_for_address
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.rpc import PLAINTEXT, Method, NoReply, Peer, Server, call, require
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import KeyPair, Security, new_keys, read_security

BEYOND = "tcp://0.0.0.0:*"
"""Not a loopback address, though this machine can call it."""
WAIT_S = 5.0


@dataclass(frozen=True)
class Echo:
    text: str


ECHO = Method("echo", Echo, Echo)


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def pair(directory: Path, name: str) -> KeyPair:
    return new_keys(directory / name)


def admit(directory: Path, name: str, *keys: KeyPair) -> Security:
    """What process `name` has when its key directory lists these clients."""
    listed = "".join(f"{key.public}  # a client\n" for key in keys)
    (directory / name / "allowed.keys").write_text(listed, encoding="utf-8")
    return read_security(directory / name)


@contextmanager
def serving(security: Security, address: str = BEYOND) -> Iterator[str]:
    """An echo server; gives the address under which this machine reaches it."""
    server = Server("node", LamportClock(), address, security=security)
    server.answer(ECHO, lambda argument: argument)
    server.start()
    try:
        yield server.address.replace("0.0.0.0", "127.0.0.1")
    finally:
        server.close()


def ask(context: zmq.Context, address: str, security: Security, key: str) -> Echo | NoReply:
    peer = Peer("node", address, LamportClock(), context, security=security, key=key)
    try:
        answer = call(peer, ECHO, Echo("hello"), WAIT_S)
    finally:
        peer.close()
    return answer if isinstance(answer, NoReply) else answer[0]


def test_a_listed_key_that_pins_the_servers_key_is_served_beyond_loopback(tmp_path: Path, context: zmq.Context) -> None:
    server, client, other = (pair(tmp_path, name) for name in ("server", "client", "other"))
    with serving(admit(tmp_path, "server", other, client)) as address:
        assert ask(context, address, read_security(tmp_path / "client"), server.public) == Echo("hello")
        assert ask(context, address, read_security(tmp_path / "other"), server.public) == Echo("hello")


def test_a_key_that_is_not_listed_is_refused_and_told_so(tmp_path: Path, context: zmq.Context) -> None:
    server, client, _ = (pair(tmp_path, name) for name in ("server", "client", "stranger"))
    with serving(admit(tmp_path, "server", client)) as address:
        answer = ask(context, address, read_security(tmp_path / "stranger"), server.public)
        assert isinstance(answer, NoReply)
        assert answer.disconnected
        assert "does not admit this key" in answer.reason
        with pytest.raises(EndpointLost, match=r"allowed\.keys"):
            require({"node": answer})
        assert ask(context, address, read_security(tmp_path / "client"), server.public) == Echo("hello")


def test_a_server_with_another_key_than_the_pinned_one_is_not_spoken_to(tmp_path: Path, context: zmq.Context) -> None:
    _, client, other = (pair(tmp_path, name) for name in ("server", "client", "other"))
    with serving(admit(tmp_path, "server", client)) as address:
        answer = ask(context, address, read_security(tmp_path / "client"), other.public)
    assert isinstance(answer, NoReply)
    assert answer.disconnected
    assert "pinned key" in answer.reason


def test_plaintext_is_refused_by_a_server_with_keys(tmp_path: Path, context: zmq.Context) -> None:
    pair(tmp_path, "server")
    client = pair(tmp_path, "client")
    with serving(admit(tmp_path, "server", client)) as address:
        answer = ask(context, address, PLAINTEXT, "")
    assert isinstance(answer, NoReply)
    assert answer.disconnected


def test_curve_is_refused_by_a_server_that_speaks_plaintext(tmp_path: Path, context: zmq.Context) -> None:
    server = pair(tmp_path, "server")
    pair(tmp_path, "client")
    with serving(Security(plaintext=True)) as address:
        answer = ask(context, address, read_security(tmp_path / "client"), server.public)
    assert isinstance(answer, NoReply)
    assert answer.disconnected


def test_plaintext_beyond_loopback_needs_the_flag_on_both_sides(context: zmq.Context) -> None:
    with pytest.raises(InvalidConfig, match="plaintext explicitly"):
        Server("node", LamportClock(), BEYOND)
    with pytest.raises(InvalidConfig, match="plaintext explicitly"):
        Peer("node", "tcp://192.0.2.1:1", LamportClock(), context)
    allowed = Security(plaintext=True)
    with serving(allowed) as address:
        assert ask(context, address, allowed, "") == Echo("hello")
    Peer("node", "tcp://192.0.2.1:1", LamportClock(), context, security=allowed).close()


def test_a_server_that_admits_nobody_and_a_client_without_keys_are_refused_at_once(
    tmp_path: Path, context: zmq.Context
) -> None:
    server = pair(tmp_path, "server")
    with pytest.raises(InvalidConfig, match="admits nobody"):
        Server("node", LamportClock(), BEYOND, security=admit(tmp_path, "server"))
    with pytest.raises(InvalidConfig, match="has no key pair"):
        Peer("node", "tcp://127.0.0.1:1", LamportClock(), context, key=server.public)


def test_loopback_needs_no_keys_and_may_have_them(tmp_path: Path, context: zmq.Context) -> None:
    with serving(PLAINTEXT, "tcp://127.0.0.1:*") as address:
        assert ask(context, address, PLAINTEXT, "") == Echo("hello")
    server, client = pair(tmp_path, "server"), pair(tmp_path, "client")
    with serving(admit(tmp_path, "server", client), "tcp://127.0.0.1:*") as address:
        assert ask(context, address, read_security(tmp_path / "client"), server.public) == Echo("hello")
        assert isinstance(ask(context, address, PLAINTEXT, ""), NoReply)


def test_an_address_carries_the_key_that_endpoints_pin(tmp_path: Path) -> None:
    server, client, wrong = (pair(tmp_path, name) for name in ("server", "client", "wrong"))
    mine = read_security(tmp_path / "client")
    with serving(admit(tmp_path, "server", client)) as address:
        publish_address(tmp_path, Address("owner-0", address, Incarnation(1), 1, key=server.public))
        endpoints = SocketEndpoints(LamportClock(), mine)
        endpoints.add_owner(OwnerId(0), wait_for_address(tmp_path, "owner-0", WAIT_S))
        assert endpoints.call_owners(ECHO, Echo("x"), WAIT_S)[OwnerId(0)][0] == Echo("x")
        endpoints.add_owner(OwnerId(0), Address("owner-0", address, Incarnation(2), 1, key=wrong.public))
        with pytest.raises(EndpointLost, match="pinned key"):
            endpoints.call_owners(ECHO, Echo("x"), WAIT_S)
        endpoints.close()


def test_a_refused_handshake_does_not_disturb_calls_under_way(tmp_path: Path, context: zmq.Context) -> None:
    server, client = pair(tmp_path, "server"), pair(tmp_path, "client")
    pair(tmp_path, "stranger")
    with serving(admit(tmp_path, "server", client)) as address:
        good = Peer(
            "node", address, LamportClock(), context, security=read_security(tmp_path / "client"), key=server.public
        )
        for _ in range(5):
            assert isinstance(ask(context, address, read_security(tmp_path / "stranger"), server.public), NoReply)
            assert not isinstance(call(good, ECHO, Echo("on"), WAIT_S), NoReply)
        good.close()
