"""Refits of PyTorch trainers over real sockets: trainer ranks with `Owner.from_module`, engines with `Receiver`.

Rank 0 also hosts the engine ranks. The oracle gathers the full tensors after a step and loads them densely.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_dcr.adapters.owner import Owner
from nemo_dcr.adapters.pytorch import bare_module, bare_name
from nemo_dcr.adapters.receiver import Receiver
from nemo_dcr.bits.tensors import copied_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import RefitConfig
from nemo_dcr.runtime.addresses import read_address
from nemo_dcr.runtime.coordinator_node import ABORT
from nemo_dcr.runtime.methods import Nothing
from nemo_dcr.runtime.rpc import Peer, call
from nemo_dcr.testing.local_oracle import StoredBits, stored_bits
from nemo_dcr.testing.toy_loader import Slice, ToyModel
from nemo_dcr.trace import LamportClock

REFIT = RefitConfig(heartbeat_s=0.02, call_timeout_s=5.0, lost_after_s=10.0)
WAIT_S = 60.0


class Engine:
    """Engine ranks that slice every tensor by rows, and what they must hold."""

    def __init__(self, table: Iterable[TensorMeta], ranks: int) -> None:
        self.table = tuple(table)
        self.models = [self._model(rank, ranks) for rank in range(ranks)]

    def _model(self, rank: int, ranks: int) -> ToyModel:
        return ToyModel(self.table, {tensor.name: Slice(0) for tensor in self.table}, rank, ranks)

    def load(self, full: dict[str, Tensor]) -> None:
        for model in self.models:
            model.load_weights(full.items())

    @property
    def stored(self) -> list[StoredBits]:
        return [stored_bits(model) for model in self.models]

    def dense(self, full: dict[str, Tensor]) -> list[StoredBits]:
        """The bits of fresh ranks after a dense load."""
        fresh = Engine(self.table, len(self.models))
        fresh.load(full)
        return fresh.stored


@contextmanager
def serving(engine: Engine, directory: Path, rank: int, *, thread: bool = True) -> Iterator[list[Receiver]]:
    """Its ranks answer in the process of trainer rank 0."""
    with ExitStack() as opened:
        ranks = len(engine.models)
        receivers = [
            opened.enter_context(Receiver(model, directory=directory, rank=at, ranks=ranks, thread=thread))
            for at, model in enumerate(engine.models if rank == 0 else ())
        ]
        yield receivers


def full_tensors(module: nn.Module, table: Iterable[TensorMeta]) -> dict[str, Tensor]:
    """The served values of whole tensors by name, on every rank; all ranks together."""
    wanted = {tensor.name: torch_dtype(tensor.dtype) for tensor in table}
    found = {}
    for name, value in bare_module(module).state_dict().items():
        if bare_name(name) in wanted:
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[bare_name(name)] = whole.detach().to(wanted[bare_name(name)])
    assert found.keys() == wanted.keys()
    return found


def step(optimizer: torch.optim.Optimizer) -> None:
    """One step with gradients that all ranks agree about, without a forward pass."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def emitted(owner: Owner, world: int) -> int:
    """Records of all owners in the last stream."""
    count = torch.tensor([owner.node.counts.emitted])
    if world > 1:
        dist.all_reduce(count)
    return int(count)


def abort(directory: Path) -> None:
    """Have the coordinator give the open candidate up."""
    import zmq

    context: zmq.Context[Any] = zmq.Context()
    entry = read_address(directory / "addresses" / "coordinator.json")
    peer = Peer("coordinator", entry.address, LamportClock(), context)
    answer = call(peer, ABORT, Nothing(), WAIT_S)
    peer.close()
    context.term()
    assert not answer[0].problem


def shared(directory: Path, kind: str) -> Path:
    """A run directory of its own."""
    place = directory / kind.replace(" ", "-")
    place.mkdir(exist_ok=True)
    return place


def actions(directory: Path, node: str) -> list[str]:
    """What a node's trace tells."""
    lines = [
        line
        for file in sorted((directory / "traces").glob(f"{node}-*.ndjson"))
        for line in file.read_bytes().splitlines()
    ]
    return [msgspec.json.decode(line).get("action", "") for line in lines]


def bits(value: Tensor) -> bytes:
    """Every stored bit."""
    return copied_words(value).tobytes()


class Lending:
    """Lends a thread to receivers until it is stopped."""

    def __init__(self, receivers: list[Receiver]) -> None:
        self._receivers, self._stopping = receivers, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.wait(0.01):
            for receiver in self._receivers:
                receiver.work(0.0)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def lending(receivers: list[Receiver]) -> Lending:
    """An engine whose loop runs for a while."""
    return Lending(receivers)


def until(holds: Callable[[], bool]) -> None:
    """Wait for it."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
