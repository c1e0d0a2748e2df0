"""Which endpoints a coordinator knows: every process life whose address file lies in a directory.

An owner is known at once. A receiver is known once it found its loader paths (prewarm): until then it could not apply
anything, and the coordinator must know the class of every name over all receivers before the first attempt. A prewarm
may take as long as a load, so each runs on a thread of its own, and a receiver remembers what it found for the next
coordinator that asks. A receiver whose paths do not fit is left out, with the reason. A connection that broke
while the process lives on, as after a partition, is made again.
Not handled: hosts that share no file system; there the addresses come from the deployment.

Paper: Section 6.1 (prewarm call); Appendix B (endpoints)   Decisions: D5
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import EndpointLost, InvalidConfig, UnsupportedLoaderPath
from nemo_dcr.ids import OwnerId, ReceiverId
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.runtime.addresses import Address, read_addresses
from nemo_dcr.runtime.endpoints import SocketEndpoints
from nemo_dcr.runtime.methods import PREWARM, TABLE, Nothing, Prewarm, Prewarmed, TensorRow
from nemo_dcr.runtime.rpc import PLAINTEXT, NoReply, Peer, call, exchange, require
from nemo_dcr.trace import LamportClock
from nemo_dcr.transport.relay.keys import Security

logger = logging.getLogger(__name__)

TABLE_S = 5.0
"""Limit of a call that only reads a table."""
RECONNECT_S = 1.0
"""A broken connection is made again after so long, and its prewarm asked for again."""
OWNER = "owner-"


class Roster:
    """Keeps `SocketEndpoints` in step with the address files. Used by one thread."""

    def __init__(
        self,
        directory: Path,
        endpoints: SocketEndpoints,
        clock: LamportClock,
        *,
        owners: int,
        security: Security = PLAINTEXT,
        prewarm_s: float = 600.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owners`: how many there are; no receiver is prewarmed before each of them told its tensors.

        `prewarm_s` limits one prewarm, in seconds.
        """
        self._directory = directory
        self._endpoints = endpoints
        self._clock = clock
        self._owners = owners
        self._security = security
        self._prewarm_s = prewarm_s
        self._monotonic = monotonic
        self._known: dict[str, Address] = {}
        self._asked: dict[str, Address] = {}
        self._answers: queue.SimpleQueue[tuple[Address, Prewarmed | str]] = queue.SimpleQueue()
        self._unanswered: dict[str, float] = {}
        """Receivers whose prewarm got no answer, and since when."""
        self._broken: dict[str, float] = {}
        """Endpoints whose connection broke, and since when."""
        self._tables: dict[str, dict[str, PathClass]] = {}
        self._waiting: dict[str, tuple[Address, dict[str, PathClass]]] = {}
        self.left_out: dict[str, str] = {}
        """Receivers that can take no part, with the reason."""
        self.classes: dict[str, str] = {}
        """Path class of each canonical name, united over all receivers that are known."""

    def refresh(self) -> None:
        """Look at the address files, take in finished prewarms, and connect anew what broke."""
        found = {entry.name: entry for entry in read_addresses(self._directory)}
        for name, entry in found.items():
            if name.startswith(OWNER):
                self._know_owner(name, entry)
            elif "/" in name:
                self._ask_receiver(name, entry)
        while True:
            try:
                self._take(*self._answers.get_nowait())
            except queue.Empty:
                break
        self._reconnect()

    def _know_owner(self, name: str, entry: Address) -> None:
        if self._known.get(name) != entry:
            self._known[name] = entry
            self._endpoints.add_owner(OwnerId(int(name.removeprefix(OWNER))), entry)

    def _ask_receiver(self, name: str, entry: Address) -> None:
        owners = [address for other, address in self._known.items() if other.startswith(OWNER)]
        if self._asked.get(name) == entry or len(owners) < self._owners:
            return
        self._asked[name] = entry
        job = threading.Thread(target=self._prewarm, args=(entry, owners), name=f"prewarm-{name}", daemon=True)
        job.start()

    def _prewarm(self, entry: Address, owners: list[Address]) -> None:
        """On a thread of its own: the table of the owners, then the paths of one receiver."""
        context: zmq.Context[Any] = zmq.Context()
        peers: list[Peer] = []
        try:
            peers += [self._peer(address, context) for address in (entry, *owners)]
            tables = require(exchange({peer.name: (peer, TABLE, Nothing()) for peer in peers[1:]}, TABLE_S))
            rows = {row: None for table, _ in tables.values() for row in table.tensors}
            answer = call(peers[0], PREWARM, Prewarm(_sorted(rows)), self._prewarm_s)
            self._answers.put((entry, answer.reason if isinstance(answer, NoReply) else answer[0]))
        except (EndpointLost, InvalidConfig) as problem:
            self._answers.put((entry, str(problem)))
        finally:
            for peer in peers:
                peer.close()
            context.term()

    def _peer(self, address: Address, context: zmq.Context[Any]) -> Peer:
        return Peer(address.name, address.address, self._clock, context, security=self._security, key=address.key)

    def _take(self, entry: Address, answer: Prewarmed | str) -> None:
        name = entry.name
        if self._asked.get(name) != entry:
            return  # a later life was asked meanwhile
        if isinstance(answer, str):
            self._leave_out(name, f"no prewarm: {answer}")
            self._unanswered[name] = self._monotonic()
            return
        if answer.problem:
            self._leave_out(name, f"it was not prewarmed: {answer.problem}; repair that engine and start it again")
            return
        classes = {item: PathClass(path) for item, path in answer.classes.items()}
        refused = [item for item, path in classes.items() if path is PathClass.UNSUPPORTED]
        if refused:
            code, detail = answer.reasons.get(refused[0], ("LC1-LC12", "see its loader table"))
            self._leave_out(name, str(UnsupportedLoaderPath(refused[0], code, detail)))
            return
        self._waiting[name] = (entry, classes)
        self._admit()

    def _admit(self) -> None:
        """Know every receiver that waits, once each name is taken by some rank (LC3): a rank alone may skip many."""
        tables = {**self._tables, **{name: classes for name, (_, classes) in self._waiting.items()}}
        try:
            united = unite_tables(tables)
        except UnsupportedLoaderPath as problem:
            for name in self._waiting:
                self._leave_out(name, f"until another rank takes what it skips: {problem}")
            return
        self._tables = tables
        self.classes = {item: path.value for item, path in united.items()}
        for name, (entry, _) in self._waiting.items():
            self.left_out.pop(name, None)
            self._known[name] = entry
            self._endpoints.add_receiver(ReceiverId(name), entry)
        self._waiting.clear()

    def _leave_out(self, name: str, reason: str) -> None:
        if self.left_out.get(name) != reason:
            logger.warning("receiver %s takes no part: %s", name, reason)
        self.left_out[name] = reason

    def _reconnect(self) -> None:
        """Broken connections and prewarms without an answer are tried again; a dead process stays broken."""
        now = self._monotonic()
        for name in [name for name, since in self._unanswered.items() if now - since >= RECONNECT_S]:
            del self._unanswered[name]
            self._asked.pop(name, None)
        broken = self._endpoints.broken()
        self._broken = {name: self._broken.get(name, now) for name in broken if name in self._known}
        for name in [name for name, since in self._broken.items() if now - since >= RECONNECT_S]:
            del self._broken[name]
            if name.startswith(OWNER):
                self._endpoints.add_owner(OwnerId(int(name.removeprefix(OWNER))), self._known[name])
            else:
                self._endpoints.add_receiver(ReceiverId(name), self._known[name])


def _sorted(rows: dict[TensorRow, None]) -> tuple[TensorRow, ...]:
    return tuple(sorted(rows, key=lambda row: (row.name, row.shape, row.dtype)))
