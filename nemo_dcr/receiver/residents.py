"""The tensors of one engine rank: which storage is resident, under which names, and what its bits are.

Storages are told apart by identity, never by name: tied tensors and alias views are one storage with several names.
Parameters and buffers (persistent or not) are compared, dumped and pinned to their place (LC9). Tensors that hang on
modules as plain attributes are known too, so that a write to one is never taken for a write to a temporary.
Not handled: tensors inside containers or closures; a load that writes them is refused as a write to unknown storage.

Paper: Section 3 (rank-local storage P_r)   Proofs: L4 xor_reconstructs   Conditions: LC1, LC9, LC10
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nemo_dcr import bits
from nemo_dcr.bits.tensors import copied_words, dtype_name


class NativeModel(Protocol):
    """A torch module with its own loader."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str] | None:
        """Place canonical tensors into resident storage; may return the names that it loaded."""
        ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As in `torch.nn.Module`."""
        ...

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in `torch.nn.Module`."""
        ...


def storage_key(tensor: Tensor) -> int:
    """Identity of the storage behind a tensor; 0 where it has none that torch can name."""
    try:
        # The base method, because a guarded tensor refuses to hand out its storage.
        return int(Tensor.untyped_storage(tensor)._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def weak_storage(tensor: Tensor) -> Any:
    """A weak reference to the tensor's storage, with `expired()`: while it lives, the identity is not reused."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def storage_bytes(tensor: Tensor) -> Tensor:
    """Every byte of the storage behind a tensor, aliased: a write to one is a write to the storage."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass(frozen=True, slots=True)
class Resident:
    """One named tensor of the model, with the place it had when the table was made."""

    name: str
    tensor: Tensor
    pinned: Tensor
    """Another handle on the same storage, to put the tensor back where it was."""
    storage: int
    """Number of its storage in `Residents`."""
    place: tuple[Any, ...]
    kind: type[Tensor]
    attributes: dict[str, Any]
    """The tensor's own attributes, such as its loader."""


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return Tensor.data_ptr(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, storage_key(tensor)


def _named_tensors(model: NativeModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def attribute_tensors(model: NativeModel) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Tensors that hang on modules as plain attributes: name, tensor, and the attributes of the module."""
    named_modules = getattr(model, "named_modules", None)
    for prefix, module in named_modules() if named_modules is not None else [("", model)]:
        for key, value in vars(module).items():
            if isinstance(value, Tensor):
                yield (f"{prefix}.{key}" if prefix else key), value, vars(module)


class Residents:
    """Registry of the resident storages of one model."""

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._words: dict[tuple[int, int], bits.Words | None] = {}
        self.names: list[list[str]] = []
        """Names of each storage, by number; attribute tensors included."""
        self.tensors: dict[str, Resident] = {}
        """Parameters and buffers by name, sorted."""
        for name, tensor in sorted(_named_tensors(model), key=lambda entry: entry[0]):
            number = self._register(name, tensor)
            self.tensors[name] = Resident(
                name, tensor, tensor.detach(), number, _place(tensor), type(tensor), vars(tensor)
            )
        self._attributes: dict[str, weakref.ref[Tensor]] = {}
        for name, tensor, _ in attribute_tensors(model):
            if storage_key(tensor):
                self._register(name, tensor)
                self._attributes[name] = weakref.ref(tensor)
                # A weak reference keeps the identity from being reused without keeping the memory.
                self._held.append(weak_storage(tensor))

        self._memory = _pieces([self.tensor_of(number).untyped_storage() for number in range(len(self.names))])

    def _register(self, name: str, tensor: Tensor) -> int:
        number = self._numbers.setdefault(storage_key(tensor), len(self.names))
        if number == len(self.names):
            self.names.append([])
        self.names[number].append(name)
        return number

    def number_of(self, tensor: Tensor) -> int | None:
        """Number of the resident storage behind `tensor`, or None for any other tensor."""
        return self._numbers.get(storage_key(tensor))

    def memory_of(self, number: int) -> tuple[int, int]:
        """The piece of memory of a storage, and the byte in it where the storage begins.

        Storages over the same memory, such as two made from one array, lie in one piece; every other one is alone.
        """
        return self._memory[number]

    def tensor_of(self, number: int) -> Tensor:
        """Some tensor on the resident storage of that number."""
        name = self.names[number][0]
        return self.tensors[name].pinned if name in self.tensors else self.attributes[name]

    def words_of(self, number: int, width: int) -> bits.Words | None:
        """All words of that many bytes in a resident storage, aliased and made once; LC9 says that it stays in place.

        None where the host cannot address them as words, or where only an attribute tensor has the storage.
        """
        key = number, width
        if key not in self._words:
            self._words[key] = self._make_words(number, width)
        return self._words[key]

    def _make_words(self, number: int, width: int) -> bits.Words | None:
        tensor = next((self.tensors[name].pinned for name in self.names[number] if name in self.tensors), None)
        if tensor is None or tensor.device.type != "cpu" or tensor.untyped_storage().data_ptr() % width:
            return None
        whole = storage_bytes(tensor).numpy()
        words: bits.Words = whole[: len(whole) // width * width].view(bits.unsigned_of_width(width))
        return words

    @property
    def attributes(self) -> dict[str, Tensor]:
        """Tensors that hang on modules as plain attributes and still exist."""
        found = {name: reference() for name, reference in self._attributes.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def put_back(self) -> None:
        """Undo a loader's rebinding of parameters and buffers (`.data =`, new and swapped objects), not writes."""
        modules = dict(getattr(self._model, "named_modules", dict)())
        for name in self.replaced():
            resident = self.tensors.get(name)
            prefix, _, leaf = name.rpartition(".")
            holder = modules.get(prefix, self._model)
            for kind in ("_parameters", "_buffers"):
                slot = getattr(holder, kind, {})
                if leaf in slot and resident is None:
                    del slot[leaf]
                elif leaf in slot and resident is not None:
                    slot[leaf] = resident.tensor
            if resident is not None and type(resident.tensor) is not resident.kind:
                fresh = resident.pinned.as_subclass(resident.kind)
                torch.utils.swap_tensors(resident.tensor, fresh)  # type: ignore[no-untyped-call]
            if resident is not None and _place(resident.tensor) != resident.place:
                resident.tensor.data = resident.pinned
            if resident is not None and vars(resident.tensor) is not resident.attributes:
                vars(resident.tensor).update(resident.attributes)

    def moved(self) -> list[str]:
        """Names whose tensor no longer has the storage, pointer, shape, stride or dtype of prewarm (LC9)."""
        return [name for name, resident in self.tensors.items() if _place(resident.tensor) != resident.place]

    def replaced(self) -> list[str]:
        """As `moved`, and also the names under which the model now has another tensor object, or none."""
        now = dict(_named_tensors(self._model))
        gone = {name for name, resident in self.tensors.items() if now.get(name) is not resident.tensor}
        return sorted(gone | set(now) - set(self.tensors) | set(self.moved()))

    @property
    def on_inference_mode(self) -> bool:
        """True when a resident tensor was made in inference mode and may be written only there."""
        return any(resident.tensor.is_inference() for resident in self.tensors.values())


def _pieces(storages: list[torch.UntypedStorage]) -> list[tuple[int, int]]:
    found = [(number, 0) for number in range(len(storages))]
    spans = sorted(
        (str(storage.device), storage.data_ptr(), storage.nbytes(), number)
        for number, storage in enumerate(storages)
        if storage.device.type != "meta"
    )
    device, first, begin, end = "", 0, 0, 0
    for place, start, nbytes, number in spans:
        if place != device or start >= end:
            device, first, begin, end = place, number, start, start
        found[number] = first, start - begin
        end = max(end, start + nbytes)
    return found


@dataclass(frozen=True, slots=True)
class ResidentTensor:
    """The stored bits of one parameter or buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: bits.Words
    """Row-major unsigned words, a copy."""


def resident_dump(model: NativeModel) -> Iterator[ResidentTensor]:
    """Every parameter and buffer, persistent or not, tied names each on their own, sorted by name.

    Raises: UnsupportedDtype.
    """
    for name, tensor in sorted(_named_tensors(model), key=lambda entry: entry[0]):
        yield ResidentTensor(name, dtype_name(tensor.dtype), tuple(tensor.shape), copied_words(tensor))


@dataclass(frozen=True, slots=True)
class ResidentDigest:
    """BLAKE2b-128 of the resident bits."""

    by_name: dict[str, str]
    """Hex digest over dtype, shape and words of each parameter and buffer, sorted by name."""
    total: str
    """Hex digest over all names and their digests."""


def resident_digest(model: NativeModel) -> ResidentDigest:
    """Digest every parameter and buffer; two views of the same elements are read once.

    Raises: UnsupportedDtype.
    """
    by_place: dict[tuple[Any, ...], str] = {}
    by_name: dict[str, str] = {}
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(_named_tensors(model), key=lambda entry: entry[0]):
        place = (*_place(tensor), tensor.storage_offset())
        if place not in by_place:
            state = hashlib.blake2b(f"{dtype_name(tensor.dtype)}{tuple(tensor.shape)}".encode(), digest_size=16)
            state.update(np.ascontiguousarray(copied_words(tensor)).data)
            by_place[place] = state.hexdigest()
        by_name[name] = by_place[place]
        total.update(f"{name}\0{by_place[place]}\n".encode())
    return ResidentDigest(by_name, total.hexdigest())
