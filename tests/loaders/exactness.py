"""One rank of a real loader: every way to a version ends in the same bits, in all storage that the rank has.

Dense reload, one tensor in each call, a delta in the encodings that the paths allow, and a retry of overwrites alone
from a random mixture of both versions, in random order. All of it on one model, whose storage is put back in between;
every byte of every storage is compared, also those that no path writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_dcr import bits
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, choose_encoding
from nemo_dcr.ids import AttemptId
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.paths import LoaderTable
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import NativeModel, Residents, storage_bytes
from nemo_dcr.testing.refit_outcome import Version, change_items, dense_load

SPECIAL = {"BF16": (0x7FC1, 0xFFA5, 0x8000, 0x0001, 0x7F80), "F32": (0x7FC00001, 0xFFA00005, 0x80000000, 1, 0x7F800000)}
"""NaN with two payloads, one of them signalling; -0.0; the smallest subnormal; infinity."""
CHANGED = 0.3
SMALL = 64


def two_versions(tensors: Sequence[TensorMeta], seed: int, *, special: bool = True) -> tuple[Version, Version]:
    """Stored words of two versions: every tensor differs.

    With `special`, NaN payloads and -0.0 come and go, and small tensors differ in all elements.
    """
    rng = np.random.default_rng(seed)
    old, new = {}, {}
    for meta in tensors:
        old[meta.name] = _words(meta, rng, special)
        kind = bits.unsigned(meta.dtype)
        other = np.where(rng.random(meta.numel) < 0.5, old[meta.name] ^ kind.type(1), _words(meta, rng, special))
        changed = rng.random(meta.numel) < (1 if special and meta.numel < SMALL else CHANGED)
        changed[rng.integers(0, meta.numel) if meta.numel else 0 :][:1] = True
        words = np.where(changed, other, old[meta.name])
        new[meta.name] = np.where(changed & (words == old[meta.name]), words ^ kind.type(1), words)
    return old, new


def _words(meta: TensorMeta, rng: np.random.Generator, special: bool) -> Words:
    numbers = torch.from_numpy(rng.normal(0, 0.5, meta.numel).astype(np.float32))
    words = copied_words(numbers.to(torch_dtype(meta.dtype)))
    patterns = np.array(SPECIAL.get(meta.dtype, (0,)), dtype=words.dtype)
    chosen = np.where(rng.random(meta.numel) < 0.05, rng.choice(patterns, meta.numel), words)
    return chosen if special else words


@dataclass(frozen=True)
class RankResult:
    """What one rank did."""

    table: LoaderTable
    changed: frozenset[str]
    """First name of each storage that the new version changed."""
    faults: tuple[str, ...]


Bytes = list[bytes]


class Rank:
    """A model that was filled with the old version, and its loader table."""

    def __init__(self, model: NativeModel, tensors: Sequence[TensorMeta], old: Version, new: Version) -> None:
        self.model, self.tensors, self.old, self.new = model, tensors, old, new
        self.faults: list[str] = []
        self._clear()
        dense_load(model, tensors, old)
        self.residents = Residents(model)
        self.before = self.stored()
        self.table = prewarm(model, tensors)
        self._expect(self.before, "prewarm")
        if self.table.shadow_bytes > max(map(len, self.before)):
            self.faults.append(f"prewarm shadowed {self.table.shadow_bytes} bytes, more than the largest storage")

    def play(self, rng: np.random.Generator) -> RankResult:
        """Every way to the new version; `faults` says which of them ended in other bits."""
        if self.table.reasons:
            return RankResult(self.table, frozenset(), tuple(self.faults))
        dense_load(self.model, self.tensors, self.new)
        dense = self.stored()
        dense_load(self.model, self.tensors, self.new)
        self._expect(dense, "a second dense load")
        self._ways(dense, rng)
        names = self.residents.names
        changed = frozenset(names[n][0] for n, (b, d) in enumerate(zip(self.before, dense, strict=True)) if b != d)
        return RankResult(self.table, changed, tuple(self.faults))

    def _ways(self, dense: Bytes, rng: np.random.Generator) -> None:
        self.put(self.before)
        for meta in self.tensors:
            dense_load(self.model, [meta], self.new)
        self._expect(dense, "one tensor in each call")
        classes = self.table.classes
        mixed = {
            name: choose_encoding(overwrite_attempt=False, bits_preserved=True, path=path)
            for name, path in classes.items()
        }
        first = change_items(self.tensors, self.old, self.new, mixed)
        retry = change_items(self.tensors, self.old, self.new, dict.fromkeys(classes, Encoding.OVERWRITE))
        for way, index_space in (("by index", True), ("over the scratch", False)):
            applier = Applier(self.model, self.table, post_apply_check=True, index_space=index_space)
            self.put(self.before)
            applier.apply(first, attempt=AttemptId(1))
            self._expect(dense, f"a mixed delta {way}")
            self.put(self._mixture(dense, rng))
            applier.apply([retry[number] for number in rng.permutation(len(retry))], attempt=AttemptId(2))
            self._expect(dense, f"an overwrite retry {way} from a mixture")

    def _mixture(self, dense: Bytes, rng: np.random.Generator) -> Bytes:
        """Each element of each storage from one of the two versions."""
        mixed = []
        for number, (one, other) in enumerate(zip(self.before, dense, strict=True)):
            width = self.residents.tensor_of(number).itemsize
            pair = [np.frombuffer(raw, dtype=np.uint8).reshape(-1, width) for raw in (one, other)]
            mixed.append(np.where(rng.random((len(pair[0]), 1)) < 0.5, *pair).tobytes())
        return mixed

    def _clear(self) -> None:
        """What a build leaves unset may be anything; the same bits in every run are easier to read."""
        for _, tensor in self.model.named_parameters(remove_duplicate=False):
            storage_bytes(tensor.detach()).zero_()

    def _storages(self) -> list[Tensor]:
        return [storage_bytes(self.residents.tensor_of(number)) for number in range(len(self.residents.names))]

    def stored(self) -> Bytes:
        """Every byte of every storage."""
        return [storage.numpy().tobytes() for storage in self._storages()]

    def put(self, wanted: Bytes) -> None:
        """Give every storage these bytes."""
        for storage, raw in zip(self._storages(), wanted, strict=True):
            if raw:
                storage.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def _expect(self, wanted: Bytes, what: str) -> None:
        found = self.stored()
        wrong = [self.residents.names[n][0] for n in range(len(found)) if found[n] != wanted[n]]
        if wrong:
            self.faults.append(f"after {what}, {', '.join(wrong[:3])} differ from a dense load")
        if self.residents.replaced():
            self.faults.append(f"{what} replaced {', '.join(self.residents.replaced()[:3])}")


def unchanged(results: Mapping[object, RankResult]) -> list[str]:
    """Resident storages that some path writes and that no rank saw change: the run would not have tested them."""
    written, changed = set(), set()
    for result in results.values():
        residents = result.table.residents
        targets = {step.target.storage for path in result.table.paths.values() for step in path.steps if path.copies}
        written |= {residents.names[storage][0] for storage in targets}
        changed |= result.changed
    return sorted(written - changed)
