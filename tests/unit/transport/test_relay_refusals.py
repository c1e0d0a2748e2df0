"""What a relay node does not take: garbage, wrong places, foreign attempts, foreign runs, unknown keys; it lives on."""

from __future__ import annotations

import os
import random
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from nemo_dcr.errors import EndpointLost, InvalidConfig, PayloadConflict, PayloadMissing, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId
from nemo_dcr.testing.transport_suite import body_of, publish
from nemo_dcr.transport.base import Announcement
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.keys import KeyPair, Security, is_local, new_keys, read_security
from nemo_dcr.transport.relay.node import RelayNode
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.tree import RelayTree, TreeNode, balanced_tree, read_tree, write_tree
from tests.unit.transport.relay_helpers import (
    MIB,
    ONE,
    OWNER,
    RawPeer,
    bodies,
    key,
    nodes_of,
    transport_over,
    tree_over,
)

QUICK = RelayConfig(connect_s=1.0, handshake_ms=500)


@pytest.fixture
def node() -> Iterator[RelayNode]:
    with nodes_of(1, RelayConfig(max_payload_bytes=8 * MIB)) as nodes:
        yield nodes[0]


@pytest.fixture
def peer(node: RelayNode) -> Iterator[RawPeer]:
    raw = RawPeer(node)
    yield raw
    raw.close()


def works(node: RelayNode, attempt: int = 9) -> None:
    """The node still carries a payload."""
    with transport_over(tree_over([node]), node.place) as transport:
        publisher = transport.publisher(AttemptId(attempt), OWNER)
        publish(publisher, key(0, attempt))
        publisher.close_set()
        subscription = transport.subscribe(AttemptId(attempt), [OWNER])
        assert bodies(subscription, attempt=attempt) == {key(0, attempt): body_of(key(0, attempt))}


def opened(node: RelayNode, peer: RawPeer, *, nbytes: int = 3 * MIB) -> None:
    """A stream is open and its payload 0 is granted under upload 5."""
    peer.send(wire.Open(1, 0, tree_over([node]), 0))
    peer.send(wire.Put(1, 0, 0, 5, nbytes, b"d", b"c"))
    assert isinstance(peer.receive(), wire.Grant)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1garbage"],
        [msgspec.msgpack.encode([3, 1, 2])],
        [msgspec.msgpack.encode([99])],
        [msgspec.msgpack.encode([9, -1, 0, 1, 1, [], 0])],
        [msgspec.msgpack.encode(["cos\nsystem\n(S'touch marked'\ntR."])],
        [b"a", b"b", b"c"],
    ],
)
def test_garbage_is_refused_with_a_typed_error(node: RelayNode, peer: RawPeer, parts: list[bytes]) -> None:
    peer.socket.send_multipart(parts)
    answer = peer.receive()
    assert isinstance(answer, wire.Rejected)
    assert isinstance(wire.error_of(answer.fault), TransportFailed)
    assert node.counters().refused == 1
    works(node)


@pytest.mark.parametrize("seed", range(4))
def test_no_message_of_any_kind_with_any_numbers_ends_a_node(node: RelayNode, seed: int) -> None:
    """Well-formed messages of every kind, drawn with small, huge and foreign numbers and with bodies."""
    rng = random.Random(seed)
    raw = RawPeer(node)
    kinds = [kind for kind in typing.get_args(wire.ToNode) if kind not in (wire.Bye, wire.Hello)]

    def number() -> int:
        return rng.choice([0, 0, 1, 1, 1, 2, 5, MIB, 2**31, 2**63, 2**64 - 1])

    def value(name: str) -> object:
        special = {
            "tree": rng.choice([tree_over([node]), balanced_tree([node.place, TreeNode("x", "nonsense", "k" * 40)])]),
            "owners": (number(), number()),
            "digest": rng.randbytes(rng.choice([1, 16, 32])),
            "checksum": rng.randbytes(16),
            "fault": wire.Fault("PayloadConflict", "x", "y"),
            "through": 0,
            "wait": rng.choice([True, False]),
            "cleaned": 0,
        }
        return special[name] if name in special else number()

    try:
        for _ in range(400):
            kind = rng.choice(kinds)
            message = kind(*[value(name) for name in kind.__struct_fields__])
            raw.send(message, *[rng.randbytes(rng.choice([0, 1, 1000, MIB])) for _ in range(rng.choice([0, 0, 1]))])
        raw.send(wire.Hello(wire.RELAY_VERSION, ""))
        while not isinstance(raw.receive(), wire.Welcome):
            pass
    finally:
        raw.close()
    assert not node.ended.is_set()
    works(node, attempt=2**40)


def test_a_message_larger_than_a_frame_closes_its_connection(node: RelayNode, peer: RawPeer) -> None:
    opened(node, peer)
    peer.socket.send_multipart([wire.encode(wire.Data(1, 0, 0, 5, 0)), bytes(wire.MAX_PART_BYTES + 1)])
    works(node)
    assert node.counters().owners[0].received <= len(body_of(key(0, 9)))


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(MIB, MIB), (0, MIB - 1), (0, 0), (1, MIB), (2**62, MIB)], ids=lambda value: str(value)
)
def test_a_frame_out_of_place_is_refused_and_leaves_nothing(
    node: RelayNode, peer: RawPeer, offset: int, nbytes: int
) -> None:
    opened(node, peer)
    peer.send(wire.Data(1, 0, 0, 5, offset), bytes(nbytes))
    answer = peer.receive()
    assert isinstance(answer, wire.Rejected)
    assert "granted" in answer.fault.detail
    assert node.counters().owners[0].received == 0
    works(node)


def test_a_frame_that_was_not_granted_is_refused() -> None:
    """The child of this node takes nothing in, so nothing beyond the first window is granted."""
    config = RelayConfig(window_frames=1, connect_s=20.0)
    with nodes_of(1, config) as nodes:
        silent = TreeNode("silent", "tcp://127.0.0.1:9")
        raw = RawPeer(nodes[0])
        try:
            raw.send(wire.Open(1, 0, balanced_tree([nodes[0].place, silent]), 0))
            raw.send(wire.Put(1, 0, 0, 5, 3 * MIB, b"d", b"c"))
            assert raw.receive() == wire.Grant(5, 0, MIB)
            raw.send(wire.Data(1, 0, 0, 5, 0), bytes(MIB))
            raw.send(wire.Data(1, 0, 0, 5, MIB), bytes(MIB))
            answer = raw.receive()
            assert isinstance(answer, wire.Rejected)
            assert f"granted up to {MIB}" in answer.fault.detail
            assert nodes[0].counters().owners[0].received == MIB
        finally:
            raw.close()


def test_a_payload_of_a_foreign_attempt_or_owner_is_refused(node: RelayNode, peer: RawPeer) -> None:
    opened(node, peer)
    for attempt, owner in ((2, 0), (1, 1)):
        peer.send(wire.Put(attempt, owner, 0, 6, 1, b"d", b"c"))
        answer = peer.receive()
        assert isinstance(answer, wire.Refused)
        assert answer.number == 6
        assert "no stream" in answer.fault.detail
        peer.send(wire.Data(attempt, owner, 0, 6, 0), b"x")
        assert isinstance(peer.receive(), wire.Rejected)
    works(node)


def test_a_payload_larger_than_the_limit_is_refused_before_anything_is_allocated(
    node: RelayNode, peer: RawPeer
) -> None:
    peer.send(wire.Open(1, 0, tree_over([node]), 0))
    peer.send(wire.Put(1, 0, 0, 5, 2**62, b"d", b"c"))
    answer = peer.receive()
    assert isinstance(answer, wire.Refused)
    assert isinstance(wire.error_of(answer.fault), TransportFailed)
    counters = node.counters()
    assert (counters.memory_peak_bytes, counters.spilled_peak_bytes, counters.waiting) == (0, 0, 0)
    with transport_over(tree_over([node]), config=RelayConfig(max_payload_bytes=MIB)) as transport:
        publisher = transport.publisher(ONE, OWNER)
        with pytest.raises(TransportFailed, match="max_payload_bytes"):
            publish(publisher, key(0), bytes(MIB + 1))


def test_a_short_payload_must_be_as_long_as_it_says(node: RelayNode, peer: RawPeer) -> None:
    peer.send(wire.Open(1, 0, tree_over([node]), 0))
    peer.send(wire.Put(1, 0, 0, 5, 10, b"d", b"c"), b"nine byte")
    assert isinstance(peer.receive(), wire.Refused)
    works(node)


def test_an_end_that_lists_other_payloads_is_a_conflict(node: RelayNode, peer: RawPeer) -> None:
    peer.send(wire.Open(1, 0, tree_over([node]), 0))
    peer.send(wire.Put(1, 0, 0, 5, 1, b"d", b"c"), b"x")
    assert isinstance(peer.receive(), wire.Acked)
    for count, digest in ((2, bytes(16)), (1, bytes(16)), (0, bytes(16))):
        peer.send(wire.End(1, 0, 6, count, digest))
        answer = peer.receive()
        assert isinstance(answer, wire.Refused)
        assert isinstance(wire.error_of(answer.fault), PayloadConflict)


def test_a_connection_begins_with_a_greeting(node: RelayNode) -> None:
    raw = RawPeer(node, greet=False)
    try:
        raw.send(wire.Ask(1))
        answer = raw.receive()
        assert isinstance(answer, wire.Rejected)
        assert "greeting" in answer.fault.detail
    finally:
        raw.close()
    works(node)


def test_a_fetch_of_what_is_not_there_or_is_something_else_is_missing(node: RelayNode) -> None:
    works(node, attempt=1)
    with transport_over(tree_over([node]), node.place) as transport:
        subscription = transport.subscribe(ONE, [OWNER])
        assert isinstance(subscription.poll(5.0), Announcement)
        with pytest.raises(PayloadMissing):
            subscription.fetch(Announcement(key(0), bytes(16), 10))
    raw = RawPeer(node)
    try:
        for nbytes, digest in ((10, b"d"), (200, b"d")):
            raw.send(wire.Fetch(1, 0, 0, 3, nbytes, digest, 0, 10))
            assert isinstance(raw.receive(), wire.Missing)
        raw.send(wire.Fetch(7, 0, 0, 3, 1, b"d", 0, 1))
        assert isinstance(raw.receive(), wire.Missing)
    finally:
        raw.close()


def test_another_run_and_another_node_are_told_apart() -> None:
    """Two runs on one host, or a tree with two addresses mixed up: the connection is refused and says why."""
    with nodes_of(1, run="mine") as mine:
        with transport_over(tree_over(mine), run="theirs", config=QUICK) as transport:
            publisher = transport.publisher(ONE, OWNER)
            with pytest.raises(EndpointLost, match="belongs to run 'mine', not to 'theirs'"):
                publish(publisher, key(0))
        other = balanced_tree([replace(mine[0].place, name="n9")])
        with transport_over(other, run="mine", config=QUICK) as transport:
            publisher = transport.publisher(ONE, OWNER)
            with pytest.raises(EndpointLost, match="is node 'n0'; correct the tree"):
                publish(publisher, key(0))


def test_a_node_connects_to_the_nodes_that_it_knows_only() -> None:
    with nodes_of(1) as strangers:
        known = balanced_tree([TreeNode("root", "tcp://127.0.0.1:1")])
        root = RelayNode("root", known=known)
        try:
            tree = balanced_tree([replace(root.place, address="tcp://127.0.0.1:1"), strangers[0].place])
            raw = RawPeer(root)
            raw.send(wire.Open(1, 0, tree, 0))
            answer = raw.receive()
            raw.close()
            assert isinstance(answer, wire.Failed)
            assert "does not know n0" in answer.fault.detail
        finally:
            root.close()


def test_an_address_that_is_taken_is_refused_in_one_line() -> None:
    with nodes_of(1) as nodes, pytest.raises(InvalidConfig, match="cannot listen"):
        RelayNode("second", nodes[0].address)


def test_a_root_that_nobody_answers_for_is_named_in_time() -> None:
    tree = balanced_tree([TreeNode("gone", "tcp://127.0.0.1:9")])
    with transport_over(tree, tree.root_node, config=QUICK) as transport:
        with pytest.raises(EndpointLost, match="relay node gone is lost"):
            publish(transport.publisher(ONE, OWNER), key(0))
        with pytest.raises(EndpointLost, match="relay node gone is lost"):
            transport.subscribe(ONE, [OWNER]).poll(20.0)
        with pytest.raises(EndpointLost, match="relay node gone is lost"):
            transport.cleanup(ONE)


# -- keys


def pair() -> KeyPair:
    public, secret = (text.decode() for text in zmq.curve_keypair())
    return KeyPair(public, secret)


def test_payloads_travel_over_curve_between_admitted_keys() -> None:
    keys = [pair() for _ in range(4)]
    allowed = frozenset(each.public for each in keys)
    nodes = [RelayNode(f"n{n}", security=Security(keys=keys[n], allowed=allowed)) for n in range(3)]
    try:
        tree = tree_over(nodes)
        with transport_over(tree, tree.node("n2"), security=Security(keys=keys[3])) as transport:
            publisher = transport.publisher(ONE, OWNER)
            publish(publisher, key(0), body_of(key(0), 3 * MIB))
            publisher.close_set()
            assert bodies(transport.subscribe(ONE, [OWNER])) == {key(0): body_of(key(0), 3 * MIB)}
    finally:
        for node in nodes:
            node.close()


@pytest.mark.parametrize("wrong", ["unknown key", "wrong server key", "plaintext"])
def test_whoever_does_not_prove_itself_is_refused(wrong: str) -> None:
    server, client = pair(), pair()
    allowed = frozenset([pair().public if wrong == "unknown key" else client.public])
    node = RelayNode("n0", security=Security(keys=server, allowed=allowed), config=QUICK)
    pinned = {"wrong server key": pair().public, "plaintext": ""}.get(wrong, server.public)
    try:
        tree = balanced_tree([replace(node.place, key=pinned)])
        with transport_over(tree, tree.root_node, security=Security(keys=client), config=QUICK) as transport:
            for call in (
                lambda: publish(transport.publisher(ONE, OWNER), key(0)),
                lambda: transport.publisher(ONE, OwnerId(1)).close_set(),
                lambda: transport.subscribe(ONE, [OWNER]).poll(20.0),
                lambda: transport.cleanup(ONE),
                lambda: transport.counters(tree.root_node),
            ):
                with pytest.raises(EndpointLost):
                    call()
        assert node.counters().peers == node.counters().attempts == 0
    finally:
        node.close()


def test_plaintext_stays_on_loopback_unless_it_is_allowed() -> None:
    far = balanced_tree([TreeNode("far", "tcp://192.0.2.1:7000")])
    with pytest.raises(InvalidConfig, match="not a loopback address"):
        RelayNode("open", "tcp://0.0.0.0:*")
    with pytest.raises(InvalidConfig, match="admits nobody"):
        RelayNode("closed", "tcp://127.0.0.1:*", security=Security(keys=pair()))
    with transport_over(far, far.root_node) as transport:
        for call in (lambda: transport.publisher(ONE, OWNER), lambda: transport.subscribe(ONE, [OWNER])):
            with pytest.raises(InvalidConfig, match="not a loopback address"):
                call()
    keyed = balanced_tree([TreeNode("n", "tcp://127.0.0.1:1", pair().public)])
    with transport_over(keyed) as transport, pytest.raises(InvalidConfig, match="has no key pair"):
        transport.publisher(ONE, OWNER)
    node = RelayNode("open", "tcp://0.0.0.0:*", security=Security(plaintext=True))
    node.close()


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:*", True),
        ("tcp://127.3.2.1:7000", True),
        ("tcp://[::1]:7000", True),
        ("ipc:///run/x", True),
        ("inproc://x", True),
        ("tcp://127.example.org:7000", False),
        ("tcp://localhost:7000", False),
        ("tcp://0.0.0.0:*", False),
        ("tcp://[::]:7000", False),
        ("tcp://192.0.2.1:7000", False),
        ("tcp://127.0.0.1", False),
        ("udp://127.0.0.1:7000", False),
        ("", False),
    ],
)
def test_only_a_loopback_address_in_digits_is_local(address: str, local: bool) -> None:
    assert is_local(address) is local


def test_keys_are_written_once_readable_by_their_owner_and_read_back(tmp_path: Path) -> None:
    made = new_keys(tmp_path / "keys")
    secret = tmp_path / "keys" / "secret.key"
    assert oct(secret.stat().st_mode & 0o777) == "0o600"
    assert (tmp_path / "keys" / "public.key").read_text().strip() == made.public
    assert made.secret not in repr(made)
    with pytest.raises(InvalidConfig, match="holds keys already"):
        new_keys(tmp_path / "keys")
    assert secret.read_text().strip() == made.secret
    other = pair().public
    (tmp_path / "keys" / "allowed.keys").write_text(f"# who may connect\n\n{other}  owner 0\n")
    security = read_security(tmp_path / "keys", also=[made.public])
    assert security.keys == made
    assert security.allowed == {other, made.public}
    assert security.admits(other)
    assert not security.admits(other[:-1] + ("0" if other[-1] != "0" else "1"))
    (tmp_path / "keys" / "allowed.keys").write_text("short\n")
    with pytest.raises(InvalidConfig, match="40 letters"):
        read_security(tmp_path / "keys")
    os.chmod(secret, 0o644)
    with pytest.raises(InvalidConfig, match="chmod 600"):
        read_security(tmp_path / "keys")
    with pytest.raises(InvalidConfig, match="nemo-dcr keys new"):
        read_security(tmp_path / "nothing")


# -- trees


def test_a_balanced_tree_reaches_every_node_level_by_level() -> None:
    nodes = [TreeNode(f"n{number}", f"tcp://127.0.0.1:{number + 1}") for number in range(11)]
    for fan_out, depth in ((1, 10), (2, 3), (3, 2), (10, 1)):
        tree = balanced_tree(nodes, fan_out)
        depths = {tree.root: 0}
        for node in nodes:
            for child in tree.below(node.name):
                depths[child.name] = depths[node.name] + 1
        assert len(depths) == len(nodes)
        assert max(depths.values()) == depth
        assert max(len(tree.below(node.name)) for node in nodes) == fan_out
    lost = balanced_tree(nodes, 2).without(["n0", "n4"])
    assert lost.root == "n1"
    assert {node.name for node in lost.nodes} == {f"n{n}" for n in range(11)} - {"n0", "n4"}
    assert balanced_tree(nodes, 2).subtree("n1").below("n1") == tuple(nodes[3:5])


def test_what_is_no_tree_is_refused(tmp_path: Path) -> None:
    a, b, c = (TreeNode(name, "tcp://127.0.0.1:1") for name in "abc")
    for root, nodes, children in (
        ("x", (a,), {}),
        ("a", (a, a), {"a": ("a",)}),
        ("a", (a, b), {}),
        ("a", (a, b), {"a": ("b", "b")}),
        ("a", (a, b, c), {"a": ("b",), "b": ("c",), "c": ("b",)}),
        ("a", (a, b, c), {"b": ("c",), "c": ("b",)}),
        ("a", (a,), {"a": ("b",)}),
        ("a", (replace(a, key="short"),), {}),
        ("a", (replace(a, receivers=-1),), {}),
        ("", (), {}),
    ):
        with pytest.raises(InvalidConfig):
            RelayTree(root, nodes, children)
    for wrong in ({"nodes": [], "fan_out": 2}, {"nodes": [a], "fan_out": 0}):
        with pytest.raises(InvalidConfig):
            balanced_tree(**wrong)
    write_tree(tmp_path / "tree.json", balanced_tree([a, b, c]))
    assert read_tree(tmp_path / "tree.json") == balanced_tree([a, b, c])
    (tmp_path / "tree.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="not a readable tree"):
        read_tree(tmp_path / "tree.json")
    with pytest.raises(InvalidConfig, match="must be positive"):
        RelayConfig(window_frames=0)
