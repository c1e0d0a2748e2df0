"""All live storage as it was before a loader ran: what changed behind the observer's back, and the way back.

A loader can write through an array, an address or a storage object that it took earlier, or in another thread; torch
shows none of these before they happen. `ByteCopy` keeps the bytes of every resident storage on the host. It compares
them after each pass of the loader, so that a write which undoes itself the next time is seen as well, and writes the
old ones back where they differ, storage by storage and not by hooked copies. It costs as much host memory as the rank
has resident bytes, attribute tensors included, for the time of the prewarm. `Checksums` costs no memory and only
notices a change: the engine then has to be started again.
Not handled: a write that leaves all bits of a pass as they were; memory that is no resident storage.

Paper: Section 6.1 (prewarm)   Proofs: L5 inactive_unchanged   Conditions: LC1, LC9
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from threading import Event

import numpy as np
import torch
from torch import Tensor

from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.receiver.residents import Residents, storage_bytes

_BLOCK_BYTES = 1 << 24
_BLOCK_WORDS = 1 << 16
_SETTLE_S = 0.05
"""How long a thread that still writes gets to show itself after the bits were put back."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """One resident storage."""

    names: tuple[str, ...]
    tensor: Tensor
    """A handle of its own, which nobody else can rebind."""
    address: int
    nbytes: int

    @property
    def in_place(self) -> bool:
        """The storage still has its memory."""
        storage = self.tensor.untyped_storage()
        return storage.data_ptr() == self.address and storage.nbytes() == self.nbytes


class LiveStorage(ABC):
    """Every resident storage of one model; make it before the first call of the loader."""

    def __init__(self, residents: Residents) -> None:
        self.written: set[str] = set()
        """Names of all that was found changed, and put back, so far."""
        self._kept: list[_Kept] = []
        for number, names in enumerate(residents.names):
            tensor = residents.tensor_of(number).detach()
            storage = tensor.untyped_storage()
            if storage.nbytes() > 0 and tensor.device.type != "meta":
                self._kept.append(_Kept(tuple(names), tensor, storage.data_ptr(), storage.nbytes()))
        self._synchronize()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of host memory."""

    @abstractmethod
    def changed(self) -> list[str]:
        """Every name of the storages whose bits differ from what they were."""

    @abstractmethod
    def look(self) -> None:
        """Note in `written` what has changed, and undo it as far as possible; the loader will run again."""

    @abstractmethod
    def put_back(self) -> None:
        """Note in `written` what has changed, and undo it; the loader is done.

        Raises: OperatorNeeded when something cannot be undone.
        """

    def _synchronize(self) -> None:
        """Let writes that are under way on a device arrive."""
        if any(kept.tensor.device.type != "cpu" for kept in self._kept):
            torch.accelerator.synchronize()


class ByteCopy(LiveStorage):
    """A copy of all bytes in host memory."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self._before = [_on_host(storage_bytes(kept.tensor)).clone() for kept in self._kept]

    @property
    def nbytes(self) -> int:
        """See `LiveStorage`."""
        return sum(len(before) for before in self._before)

    def changed(self) -> list[str]:
        """See `LiveStorage`."""
        return [name for number in self._differing() for name in self._kept[number].names]

    def look(self) -> None:
        """See `LiveStorage`."""
        self._synchronize()
        for number in self._differing():
            kept = self._kept[number]
            self.written.update(kept.names)
            storage = kept.tensor.untyped_storage()
            if storage.nbytes() != kept.nbytes:
                storage.resize_(kept.nbytes)
            storage_bytes(kept.tensor).copy_(self._before[number])
        self._synchronize()

    def put_back(self) -> None:
        """See `LiveStorage`. Raises: OperatorNeeded."""
        self.look()
        if self.written:
            Event().wait(_SETTLE_S)
        again = self.changed() if self.written else []
        if again:
            raise OperatorNeeded(
                f"{_some(again)} is still being written after prewarm put its bits back",
                "end the thread that writes it, and start the engine again",
            )
        lost = [name for kept in self._kept if not kept.in_place for name in kept.names]
        if lost:
            raise OperatorNeeded(
                f"the loader gave {_some(lost)} other memory during prewarm, and captured graphs still use the old one",
                "make it keep its storages and copy with Tensor.copy_, then start the engine again",
            )

    def _differing(self) -> list[int]:
        return [
            number
            for number, (kept, before) in enumerate(zip(self._kept, self._before, strict=True))
            if kept.nbytes != kept.tensor.untyped_storage().nbytes()
            or not _same_bytes(storage_bytes(kept.tensor), before)
        ]


class Checksums(LiveStorage):
    """A fast checksum of each storage (no proof of equality), for hosts without room for a copy."""

    def __init__(self, residents: Residents) -> None:
        super().__init__(residents)
        self._before = [checksum(storage_bytes(kept.tensor)) for kept in self._kept]

    @property
    def nbytes(self) -> int:
        """See `LiveStorage`."""
        return 0

    def changed(self) -> list[str]:
        """See `LiveStorage`."""
        return [
            name
            for kept, before in zip(self._kept, self._before, strict=True)
            if not kept.in_place or checksum(storage_bytes(kept.tensor)) != before
            for name in kept.names
        ]

    def look(self) -> None:
        """See `LiveStorage`; nothing can be undone here."""
        self._synchronize()
        self.written.update(self.changed())

    def put_back(self) -> None:
        """See `LiveStorage`. Raises: OperatorNeeded."""
        self.look()
        if self.written:
            raise OperatorNeeded(
                f"the loader wrote {_some(self.written)} during prewarm in a way that torch does not dispatch",
                "make it copy with Tensor.copy_ on the calling thread, then start the engine again",
            )


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:4])


def _on_host(raw: Tensor) -> Tensor:
    return raw if raw.device.type == "cpu" else raw.cpu()


def _same_bytes(raw: Tensor, before: Tensor) -> bool:
    """Equality of every byte, in blocks, so that a device needs no second copy on the host."""
    return all(
        np.array_equal(
            _on_host(raw[start : start + _BLOCK_BYTES]).numpy(), before[start : start + _BLOCK_BYTES].numpy()
        )
        for start in range(0, len(before), _BLOCK_BYTES)
    )


def checksum(raw: Tensor) -> int:
    """A weighted sum of the mixed words of flat bytes: words that change places change it too."""
    whole = len(raw) // 8 * 8
    words, rest = raw[:whole].view(torch.int64), raw[whole:].to(torch.int64)
    draw = np.random.default_rng(0).integers(0, 1 << 63, min(max(len(words), 8), _BLOCK_WORDS), dtype=np.int64)
    weights = torch.from_numpy(draw).to(raw.device)
    total = 0
    for start in range(0, len(words), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        # The high half goes into the low one, so that the top bits meet every bit of a weight.
        mixed = ((block >> 32) & 0xFFFFFFFF).bitwise_xor_(block)
        total = (total * 0x9E3779B97F4A7C15 + int(mixed.mul_(weights[: len(block)]).sum())) & ((1 << 64) - 1)
    return total + (int((rest * weights[: len(rest)]).sum()) << 64)
