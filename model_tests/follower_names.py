"""Names and errors of a `Follower`: how the model calls the things of an implementation.

Spec: CONSTANTS of DeltaRefit
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


class Rejected(Exception):
    """A line is no step of the specification."""

    def __init__(self, number: int, node: str, action: str, why: str) -> None:
        super().__init__(f"line {number}: {action} of {node}: {why}")
        self.number, self.node, self.action, self.why = number, node, action, why


class Mismatch(Exception):
    """The line tells another state, another parameter or another order than the model has."""


@dataclass
class Names:
    """What things of the implementation are called in the model."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    """Of receivers, owners (`owner 0`) and coordinators; the same name when it is missing."""
    items: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Of (owner node, tensor); `owner/tensor` when it is missing."""
    left_out: frozenset[tuple[str, str]] = frozenset()
    """Tensors that are no items of the model: projected away, or with records in several payloads of one attempt."""
    candidates: dict[str, int] = field(default_factory=lambda: {"": 0})
    """Numbers of candidates; one that is frozen for the first time gets the next."""
    changes: Callable[[str, str], frozenset[str]] | None = None
    """Items of the model in which a candidate differs from the committed one before; all when nobody knows."""
    checkpoint: str = ""
    """Digest (hex) of the checkpoint that training began with; when empty, any digest is taken for it."""
    incarnations: dict[tuple[str, int], int] = field(default_factory=dict)
    """(node of the implementation, its incarnation): the incarnation in the model."""
    acquirers: dict[int, str] = field(default_factory=dict)
    """Who acquired an epoch, when the line itself does not tell."""

    def node(self, name: str) -> str:
        """The model's name of a node."""
        return self.nodes.get(name, name)

    def item(self, owner: str | int, tensor: str) -> str:
        """The model's name of a tensor; `owner` is a number or a node."""
        node = owner if isinstance(owner, str) else f"owner {owner}"
        return self.items.get((node, tensor), f"{node}/{tensor}")

    def is_left_out(self, owner: str | int, tensor: str) -> bool:
        """The tensor is no item of the model."""
        return (owner if isinstance(owner, str) else f"owner {owner}", tensor) in self.left_out

    def candidate(self, name: str) -> int:
        """The number of a candidate that was frozen before.

        Raises: Mismatch when there is none.
        """
        if name not in self.candidates:
            raise Mismatch(f"candidate {name!r} was never frozen")
        return self.candidates[name]

    def incarnation(self, node: str, real: int) -> int:
        """The model's incarnation of a life.

        Raises: Mismatch when that life never started.
        """
        if (node, real) not in self.incarnations:
            raise Mismatch(f"{node} never started incarnation {real}")
        return self.incarnations[node, real]
