"""How trainer ranks pass residual parts to each other, inside the trainer and never across clusters.

Work is cut into rounds. A round begins with `meet`: it is entered by all ranks or by none. The last rank to arrive
decides "go"; a rank that gives up decides "stop"; whichever compare-and-set comes first holds for all. Waiting for a
meeting can be interrupted, so a failed attempt ends without a rank that hangs in a collective. Between meetings every
rank makes the same calls. Only bytes travel, as uint8: gloo has no 16-bit integers.
Not handled: a rank that dies inside a round; the process group reports it, and the attempt fails.

Paper: Section 5 (owners convert their parts, the residual-baseline owner assembles them); Figure A.4
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_dcr.errors import AttemptFailed, EndpointLost

GO, STOP = "go", "stop"
POLL_S = 0.002


def never() -> bool:
    """The stop request of a caller that never stops."""
    return False


class Exchange(Protocol):
    """All-to-all of bytes between the trainer ranks 0 .. world-1."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def world(self) -> int:
        """Number of ranks."""
        ...

    def meet(self, key: str, stopped: Callable[[], bool] = never) -> None:
        """Wait until all ranks are at the meeting `key`. A key is used once by each rank.

        Raises: AttemptFailed when a rank gave up this meeting, or `stopped()` became true before all arrived.
        """
        ...

    def give_up(self, key: str) -> None:
        """Decide that the meeting `key` stops, unless it was decided already. Never blocks."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, by rank. Raises: EndpointLost when a rank is gone."""
        ...

    def scatter(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send parts[r] to rank r; what each rank sent here, by rank. Raises: EndpointLost when a rank is gone."""
        ...


class LoneExchange:
    """The exchange of a trainer with one rank."""

    rank = 0
    world = 1

    def meet(self, key: str, stopped: Callable[[], bool] = never) -> None:
        """Go on unless stopped.

        Raises: AttemptFailed when `stopped()` is true.
        """
        if stopped():
            raise AttemptFailed(f"the attempt was stopped at {key}")

    def give_up(self, key: str) -> None:
        """Nobody waits."""

    def gather(self, data: bytes) -> list[bytes]:
        """The data itself."""
        return [data]

    def scatter(self, parts: Sequence[bytes]) -> list[bytes]:
        """The part for this rank."""
        return [parts[0]]


class KeyStore(Protocol):
    """What an exchange needs of a torch store (TCPStore, FileStore, HashStore and PrefixStore have it)."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0 and return it."""
        ...

    def check(self, keys: list[str]) -> bool:
        """True iff all keys exist."""
        ...

    def get(self, key: str) -> bytes:
        """The value of an existing key."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that does not exist when `expected` is empty; returns the value that it has then."""
        ...


class GroupExchange:
    """Exchange over a CPU process group (gloo) and the store that its ranks met at.

    Args:
        store: any torch store that all ranks share; keys begin with `prefix`.
        group: the process group of the trainer ranks, None for the default one.
    """

    def __init__(self, store: KeyStore, group: dist.ProcessGroup | None = None, prefix: str = "nemo-dcr") -> None:
        self._store = store
        self._group = group
        self._prefix = prefix

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return dist.get_rank(self._group)

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return dist.get_world_size(self._group)

    def meet(self, key: str, stopped: Callable[[], bool] = never) -> None:
        """Wait until all ranks are at `key`. Raises: AttemptFailed; EndpointLost when the store is gone."""
        outcome = f"{self._prefix}/{key}/outcome"
        try:
            if self._store.add(f"{self._prefix}/{key}/ready", 1) == self.world:
                self._store.compare_set(outcome, "", GO)
            while not self._store.check([outcome]):
                if stopped():
                    self._store.compare_set(outcome, "", STOP)
                else:
                    time.sleep(POLL_S)
            decided = self._store.get(outcome)
        except RuntimeError as error:
            raise EndpointLost("trainer ranks", f"the store failed at {key}: {error}") from error
        if decided != GO.encode():
            raise AttemptFailed(f"a trainer rank stopped at {key}")

    def give_up(self, key: str) -> None:
        """Decide "stop". Raises: EndpointLost when the store is gone."""
        try:
            self._store.compare_set(f"{self._prefix}/{key}/outcome", "", STOP)
        except RuntimeError as error:
            raise EndpointLost("trainer ranks", f"the store failed at {key}: {error}") from error

    def gather(self, data: bytes) -> list[bytes]:
        """All-gather, as an all-to-all of the same bytes. Raises: EndpointLost."""
        return self.scatter([data] * self.world)

    def scatter(self, parts: Sequence[bytes]) -> list[bytes]:
        """All-to-all with sizes first. Raises: EndpointLost."""
        sizes = [len(part) for part in parts]
        incoming = torch.empty(self.world, dtype=torch.int64)
        try:
            self._all_to_all(incoming, torch.tensor(sizes, dtype=torch.int64))
            expected = [int(size) for size in incoming]
            outgoing = torch.from_numpy(np.frombuffer(bytearray().join(parts), dtype=np.uint8))
            received = torch.empty(sum(expected), dtype=torch.uint8)
            self._all_to_all(received, outgoing, expected, sizes)
        except RuntimeError as error:
            raise EndpointLost("trainer ranks", str(error)) from error
        whole = received.numpy()
        ends = np.cumsum(expected)
        return [whole[end - size : end].tobytes() for end, size in zip(ends, expected, strict=True)]

    def _all_to_all(
        self, received: Tensor, sent: Tensor, expected: list[int] | None = None, sizes: list[int] | None = None
    ) -> None:
        dist.all_to_all_single(received, sent, expected, sizes, group=self._group)


class OwnGroupExchange(GroupExchange):
    """Exchange over a gloo group that only its ranks know, and that torch.distributed does not list.

    Ranks outside of it need not take part, its name is never that of an earlier group, and it ends with the object.
    """

    def __init__(self, store: KeyStore, rank: int, world: int, prefix: str, timeout: timedelta) -> None:
        """All ranks 0 .. world-1 of the group together.

        Args:
            store: any torch store that these ranks share.
            rank: of this process in the group.
            world: ranks of the group.
            prefix: of all keys in the store; a new one for each group.
            timeout: a rank that does not answer inside a round for so long is lost.

        Raises: EndpointLost when a rank does not come.
        """
        super().__init__(store, prefix=prefix)
        try:
            own = dist.PrefixStore(f"{prefix}/gloo", store)  # type: ignore[attr-defined, arg-type]
            self._own: Any = dist.ProcessGroupGloo(own, rank, world, timeout)
        except RuntimeError as error:
            raise EndpointLost("trainer ranks", str(error)) from error

    @property
    def rank(self) -> int:
        """This rank in the group."""
        return int(self._own.rank())

    @property
    def world(self) -> int:
        """Ranks of the group."""
        return int(self._own.size())

    def _all_to_all(
        self, received: Tensor, sent: Tensor, expected: list[int] | None = None, sizes: list[int] | None = None
    ) -> None:
        self._own.alltoall_base(received, sent, expected or [], sizes or []).wait()
