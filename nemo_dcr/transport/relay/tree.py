"""The shape of one relay tree: which node is the root, who forwards to whom, where each listens and with which key.

A tree is a small value that whoever opens an attempt hands over; nodes learn it with the attempt, so a retry may run
over another shape. Every node but the root has one parent and is reached from the root. `balanced_tree` gives each node
up to `fan_out` children, level by level, so that depths differ by one at most.
Not handled: choosing nodes by distance or speed; the caller orders them.

Paper: Section 7 (relay tree)   Spec: Channel
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nemo_dcr.errors import InvalidConfig

MAX_NODES = 4096
KEY_LETTERS = 40
"""Letters of a CURVE key in Z85."""
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One rollout node."""

    name: str
    address: str
    """Where it listens, such as `tcp://10.0.0.7:7000`."""
    key: str = ""
    """Its public CURVE key in Z85; empty for plaintext, which stays on loopback addresses."""
    receivers: int = 0
    """Subscriptions that will read here: a payload is let go once so many have fetched it. 0 keeps all of them until
    clean-up."""


@dataclass(frozen=True, slots=True)
class RelayTree:
    """Who forwards to whom in one attempt. Raises: InvalidConfig when it is no tree over `nodes`."""

    root: str
    nodes: tuple[TreeNode, ...]
    children: Mapping[str, tuple[str, ...]]
    """Names of the children of each node that forwards."""

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not 1 <= len(names) <= MAX_NODES:
            raise InvalidConfig("relay.tree", f"has {len(names)} nodes; give 1 to {MAX_NODES}")
        for node in self.nodes:
            _check_node(node)
        if len(set(names)) < len(names) or self.root not in names:
            raise InvalidConfig("relay.tree", f"names must differ and hold the root {self.root!r}: {names}")
        below = [child for parent in self.children.values() for child in parent]
        if {*below, *self.children} - set(names) or len(set(below)) < len(below) or self.root in below:
            raise InvalidConfig("relay.tree", "every child has a node of its own and one parent, the root has none")
        if len(_reached(self.root, self.children)) < len(names):
            raise InvalidConfig("relay.tree", "every node must be reached from the root")

    def node(self, name: str) -> TreeNode:
        """The node of that name. Raises: InvalidConfig when there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise InvalidConfig("relay.tree", f"has no node {name!r}; it has {', '.join(n.name for n in self.nodes)}")

    @property
    def root_node(self) -> TreeNode:
        """The node that owners stream to."""
        return self.node(self.root)

    def below(self, name: str) -> tuple[TreeNode, ...]:
        """The nodes that `name` forwards to."""
        return tuple(self.node(child) for child in self.children.get(name, ()))

    def subtree(self, name: str) -> RelayTree:
        """The tree from `name` downward, which is what that node is told. Raises: InvalidConfig for no such node."""
        names = _reached(name, self.children)
        nodes = tuple(node for node in self.nodes if node.name in names)
        return RelayTree(name, nodes, {at: below for at, below in self.children.items() if at in names})

    def without(self, lost: Collection[str], fan_out: int = 2) -> RelayTree:
        """A balanced tree over the nodes that are left, in their old order.

        Raises: InvalidConfig when none is left.
        """
        return balanced_tree([node for node in self.nodes if node.name not in lost], fan_out)


def balanced_tree(nodes: Sequence[TreeNode], fan_out: int = 2) -> RelayTree:
    """The tree in which node i forwards to nodes `fan_out * i + 1` and following; the first node is the root.

    Raises: InvalidConfig without nodes or with a fan-out below 1.
    """
    if fan_out < 1:
        raise InvalidConfig("relay.fan_out", f"must be at least 1, got {fan_out}")
    if not nodes:
        raise InvalidConfig("relay.tree", "has no nodes; name at least the root")
    names = [node.name for node in nodes]
    shares = {name: tuple(names[fan_out * at + 1 : fan_out * (at + 1) + 1]) for at, name in enumerate(names)}
    return RelayTree(names[0], tuple(nodes), {name: below for name, below in shares.items() if below})


def read_tree(path: Path) -> RelayTree:
    """Read a tree from a JSON file. Raises: InvalidConfig when it cannot be read or is no tree."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RelayTree)
    except (OSError, msgspec.MsgspecError) as problem:
        raise InvalidConfig("relay.tree", f"{path} is not a readable tree: {problem}") from problem


def write_tree(path: Path, tree: RelayTree) -> None:
    """Write a tree as JSON, for `read_tree`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(tree)))


def _check_node(node: TreeNode) -> None:
    if not 1 <= len(node.name) <= _MAX_NAME or not 1 <= len(node.address) <= _MAX_NAME:
        raise InvalidConfig("relay.tree", f"node {node.name[:_MAX_NAME]!r}: name and address have 1 to {_MAX_NAME}")
    if node.key and len(node.key) != KEY_LETTERS:
        raise InvalidConfig("relay.tree", f"node {node.name!r}: a key has {KEY_LETTERS} letters; see nemo-dcr keys new")
    if node.receivers < 0:
        raise InvalidConfig("relay.tree", f"node {node.name!r}: receivers must not be negative")


def _reached(start: str, children: Mapping[str, tuple[str, ...]]) -> set[str]:
    reached, todo = {start}, [start]
    while todo:
        fresh = [child for child in children.get(todo.pop(), ()) if child not in reached]
        reached.update(fresh)
        todo += fresh
    return reached
