"""What decides how a cluster goes on, as one value that hashes: clusters with the same print do the same from here on.

Counters and clocks of reports are left out, since they only tell older from newer. States of machines are frozen and
shared by the copies of a cluster, so each is looked through once.

Not handled: what was recorded only (lines, outcomes).

Spec: vars
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from tests.unit.protocol.cluster import Cluster

ATOMS = frozenset({int, str, bytes, bool, type(None), float, frozenset})
IGNORED = frozenset({"revision", "waiting", "clock", "config"})


class Prints:
    """One number for each state of a machine, report or message; equal numbers, equal behaviour."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, int]] = {}
        self._numbers: dict[Any, int] = {}
        self._fields: dict[type[Any], attrgetter[Any]] = {}

    def number(self, value: Any) -> int:
        """The number of one frozen value, which copies of a cluster share."""
        known = self._known.get(id(value))
        if known is not None and known[0] is value:
            return known[1]
        number = self._numbers.setdefault(self._frozen(value), len(self._numbers))
        self._known[id(value)] = (value, number)
        return number

    def _frozen(self, value: Any) -> Any:
        """The value with numbers for what it is made of."""
        kind = type(value)
        if kind in ATOMS:
            return value
        if kind is dict:
            return frozenset((key, self._part(each)) for key, each in value.items())
        if kind is tuple:
            return tuple(map(self._part, value))
        fields = self._fields.get(kind)
        if fields is None:
            names = tuple(name for name in getattr(kind, "__dataclass_fields__", ()) if name not in IGNORED)
            fields = self._fields[kind] = attrgetter(*names, "__class__", "__class__")
        return tuple([part if type(part) in ATOMS else self._part(part) for part in fields(value)])

    def _part(self, value: Any) -> Any:
        if type(value) in (dict, tuple):
            return self._frozen(value)
        if isinstance(value, type):
            return value
        return self.number(value) if hasattr(value, "__dataclass_fields__") else value

    def of(self, cluster: Cluster) -> Any:
        """The print of a cluster."""
        return (
            tuple(
                (
                    self.number(r.state),
                    tuple(r.storage.values()),
                    tuple(r.staged),
                    tuple(r.issued),
                    r.flushing,
                    r.draining,
                )
                for r in cluster.receivers.values()
            ),
            tuple(
                (
                    self.number(o.state),
                    tuple(o.baseline.values()),
                    None if o.stream is None else tuple(o.stream),
                    o.stopping,
                    None if o.copying is None else tuple(o.copying),
                )
                for o in cluster.owners.values()
            ),
            tuple(
                (
                    self.number(n.state),
                    self.number(n.survey),
                    self.number(n.control),
                    self.number(n.control_reply),
                    n.waits,
                )
                for n in cluster.coordinators
            ),
            len(cluster.net),
            len(cluster.control._journal),
        )
