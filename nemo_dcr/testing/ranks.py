"""Several trainer ranks for tests: in threads of one process, or in processes of their own over gloo.

`ThreadExchange` keeps the contract of `nemo_dcr.source.exchange` without a process group, so that many small cases with
several ranks run in one process. `run_in_processes` starts real ranks that meet in a file and use torch.distributed.

Paper: Section 5 (owners)
"""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from nemo_dcr.errors import AttemptFailed, EndpointLost
from nemo_dcr.source.exchange import GO, STOP, never

T = TypeVar("T")
WAIT_S = 30.0
_POLL_S = 0.01
PRELOADED = (__name__, "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers.modeling_utils")
"""What the server of the processes imports; it leaves out what is not installed."""


class Hall:
    """Where the threads of one exchange meet."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.ready: dict[str, int] = {}
        self.outcomes: dict[str, str] = {}
        self.mail: dict[tuple[int, int, int], bytes] = {}
        """(round, sender, receiver) -> bytes."""


class ThreadExchange:
    """Exchange between threads; rank `rank` of the `hall`."""

    def __init__(self, hall: Hall, rank: int) -> None:
        self._hall = hall
        self._round = 0
        self.rank = rank
        self.world = hall.world

    def meet(self, key: str, stopped: Callable[[], bool] = never) -> None:
        """Wait for all threads. Raises: AttemptFailed when one gave up; EndpointLost after `WAIT_S` seconds."""
        hall = self._hall
        with hall.changed:
            hall.ready[key] = hall.ready.get(key, 0) + 1
            if hall.ready[key] == self.world:
                hall.outcomes.setdefault(key, GO)
            hall.changed.notify_all()
            for _ in range(int(WAIT_S / _POLL_S)):
                if key in hall.outcomes or hall.changed.wait_for(lambda: key in hall.outcomes, _POLL_S):
                    break
                if stopped():
                    self._decide(key, STOP)
            else:
                raise EndpointLost("trainer ranks", f"not all threads came to {key}")
            if hall.outcomes[key] != GO:
                raise AttemptFailed(f"a trainer rank stopped at {key}")

    def give_up(self, key: str) -> None:
        """Decide "stop" unless decided."""
        with self._hall.changed:
            self._decide(key, STOP)

    def _decide(self, key: str, outcome: str) -> None:
        self._hall.outcomes.setdefault(key, outcome)
        self._hall.changed.notify_all()

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every thread. Raises: EndpointLost after `WAIT_S` seconds."""
        return self.scatter([data] * self.world)

    def scatter(self, parts: Sequence[bytes]) -> list[bytes]:
        """What each thread sent here. Raises: EndpointLost after `WAIT_S` seconds."""
        hall, number = self._hall, self._round
        self._round += 1
        wanted = [(number, sender, self.rank) for sender in range(self.world)]
        with hall.changed:
            hall.mail.update({(number, self.rank, receiver): part for receiver, part in enumerate(parts)})
            hall.changed.notify_all()
            if not hall.changed.wait_for(lambda: all(key in hall.mail for key in wanted), WAIT_S):
                raise EndpointLost("trainer ranks", f"not all threads sent in round {number}")
            return [hall.mail.pop(key) for key in wanted]


def run_in_threads(world: int, work: Callable[[ThreadExchange], T]) -> list[T]:
    """Run `work` once for each rank at the same time; the results by rank. Raises: the first rank's error."""
    hall = Hall(world)
    with ThreadPoolExecutor(max_workers=world) as pool:
        futures = [pool.submit(work, ThreadExchange(hall, rank)) for rank in range(world)]
        return [future.result() for future in futures]


def run_in_processes(world: int, work: Callable[..., None], *args: Any) -> None:
    """Run `work(store, rank, world, *args)` in `world` fresh processes with gloo as the default process group.

    `work` and `args` are importable and picklable. Raises: torch's ProcessRaisedException with the rank's traceback.
    """
    multiprocessing.set_forkserver_preload(list(PRELOADED))
    with tempfile.TemporaryDirectory() as directory:
        arguments = (str(Path(directory) / "store"), world, work, args)
        start_processes(_enter, args=arguments, nprocs=world, start_method="forkserver")  # type: ignore[no-untyped-call]


def _enter(rank: int, path: str, world: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        work(dist.PrefixStore("exchange", store), rank, world, *args)  # type: ignore[attr-defined]
        dist.barrier()
    finally:
        dist.destroy_process_group()
