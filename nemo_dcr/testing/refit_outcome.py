"""What a native loader makes of a refit: exactly the bits of a dense load, or a refusal that left storage untouched.

`refit_outcome` takes any loader and the words of two versions, and plays everything that a receiver may do with it:
prewarm, an XOR attempt where the paths allow one, and overwrite retries over mixtures of the two versions. Dense always
means: the same loader, called with the full new tensors, over storage that this loader filled. Anything but the two
allowed outcomes is an AssertionError; also a path that prewarm accepted and an attempt then refuses.

Paper: Section 6.1; Proposition 1   Conditions: LC1-LC12
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import integer_view, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass, choose_encoding
from nemo_dcr.errors import ConditionViolated, OperatorNeeded, UnsupportedLoaderPath
from nemo_dcr.ids import AttemptId
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.paths import LoaderTable, unite_tables
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import NativeModel, resident_dump

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]
Version = Mapping[str, Words]


@dataclass(frozen=True)
class Outcome:
    """One of the two allowed outcomes."""

    refused: str
    """Code of the condition that the loader breaks; empty when every refit was exact."""
    detail: str
    classes: Mapping[str, PathClass]
    """United class of each name; what prewarm found on the first refusing rank when refused."""

    @property
    def exact(self) -> bool:
        """Every refit ended in the bits of a dense load."""
        return not self.refused


def stored_bits(model: NativeModel) -> Bits:
    """Dtype, shape and stored bytes of every parameter and buffer."""
    return {entry.name: (entry.dtype, entry.shape, entry.words.tobytes()) for entry in resident_dump(model)}


def dense_load(model: NativeModel, tensors: Sequence[TensorMeta], version: Version) -> None:
    """Let the native loader load every tensor of a version in table order; it gets copies, which it may edit."""
    model.load_weights(
        [(meta.name, tensor_from_words(version[meta.name].copy(), meta.dtype, meta.shape)) for meta in tensors]
    )


_WAYS = (("over the scratch", False), ("by index", True))
"""Both have to end in the same bits; loader paths without index maps take the scratch in either."""


def change_items(
    tensors: Sequence[TensorMeta], old: Version, new: Version, encodings: Mapping[str, Encoding]
) -> list[Item]:
    """One item for each tensor whose words differ, in table order."""
    made = []
    for meta in tensors:
        at = np.flatnonzero(old[meta.name] != new[meta.name]).astype(np.int64)
        if len(at):
            values, encoding = new[meta.name][at], encodings[meta.name]
            made.append(
                Item.of(meta, encoding, at, values ^ old[meta.name][at] if encoding is Encoding.XOR else values)
            )
    return made


def refit_outcome(
    ranks: Sequence[Callable[[], NativeModel]],
    tensors: Sequence[TensorMeta],
    old: Version,
    new: Version,
    *,
    seed: int = 0,
) -> Outcome:
    """Play every kind of attempt on every rank; `ranks` make fresh engines, one callable a rank, each with own state.

    Raises: AssertionError for any outcome but the two allowed ones.
    """
    engines = [_Engine(make, tensors, old) for make in ranks]
    classes: Mapping[str, PathClass] = {}
    try:
        classes = unite_tables(
            {str(rank): engine.table.classes for rank, engine in enumerate(engines)},
            {str(rank): engine.table.reasons for rank, engine in enumerate(engines)},
        )
    except UnsupportedLoaderPath as refusal:
        for engine in engines:
            engine.require_refusals(old, new)
        found = next((engine.table.classes for engine in engines if engine.table.reasons), engines[0].table.classes)
        return Outcome(refusal.condition, str(refusal), found)
    mixed = {
        name: choose_encoding(overwrite_attempt=False, bits_preserved=True, path=path) for name, path in classes.items()
    }
    overwrites = dict.fromkeys(classes, Encoding.OVERWRITE)
    first, retry = (change_items(tensors, old, new, encodings) for encodings in (mixed, overwrites))
    rng = random.Random(seed)
    for make, engine in zip(ranks, engines, strict=True):
        dense = make()
        dense_load(dense, tensors, old)
        dense_load(dense, tensors, new)
        attempts = itertools.count(1)
        for way, index_space in _WAYS:
            engine.take_back()
            engine.attempt(first, next(attempts), index_space=index_space)
            _require(engine.model, dense, f"the first attempt {way}")
            engine.attempt(retry, next(attempts), index_space=index_space)
            _require(engine.model, dense, f"a retry {way} over a complete attempt")
        for what, index_space in (("no change", False), ("a part of the first attempt", True), ("any elements", False)):
            engine.take_back()
            if what == "a part of the first attempt":
                engine.attempt(_parts(first, rng), next(attempts))
            elif what == "any elements":
                _mix(engine.model, dense, rng)
            engine.attempt(rng.sample(retry, len(retry)), next(attempts), index_space=index_space)
            _require(engine.model, dense, f"an overwrite retry over {what}")
    return Outcome("", "", classes)


class _Engine:
    """One rank that its loader filled with a version, and its loader table."""

    def __init__(self, make: Callable[[], NativeModel], tensors: Sequence[TensorMeta], old: Version) -> None:
        self.model = make()
        dense_load(self.model, tensors, old)
        before, objects = stored_bits(self.model), _objects(self.model)
        try:
            self.table: LoaderTable = prewarm(self.model, tensors)
        except OperatorNeeded as stop:
            raise AssertionError(f"prewarm: {stop}") from stop
        if stored_bits(self.model) != before:
            raise AssertionError("prewarm changed live storage")
        if _objects(self.model) != objects:
            raise AssertionError("prewarm left another tensor, or the tensor in another place")
        self._old = {name: words.clone() for name, words in _words(self.model).items()}
        self._applier = Applier(self.model, self.table, post_apply_check=True)
        self._over_scratch = Applier(self.model, self.table, post_apply_check=True, index_space=False)

    def take_back(self) -> None:
        """Storage as the old version left it; the loader keeps its state, as it would in an engine."""
        for name, resident in _words(self.model).items():
            resident.copy_(self._old[name])

    def attempt(self, items: Sequence[Item], attempt: int, *, index_space: bool = True) -> None:
        applier = self._applier if index_space else self._over_scratch
        try:
            applier.apply(items, attempt=AttemptId(attempt))
        except ConditionViolated as late:
            raise AssertionError(f"prewarm accepted the path and the attempt refused it: {late}") from late

    def require_refusals(self, old: Version, new: Version) -> None:
        """Items of unsupported names are refused before the first write."""
        before = stored_bits(self.model)
        for name in self.table.reasons:
            meta = self.table.paths[name].tensor
            for encoding in Encoding:
                for item in change_items([meta], old, new, {name: encoding}):
                    try:
                        self._applier.apply([item])
                    except ConditionViolated:
                        continue
                    raise AssertionError(f"an item of the unsupported name {name!r} was applied")
        if stored_bits(self.model) != before:
            raise AssertionError("a refused item changed live storage")


def _words(model: NativeModel) -> dict[str, Tensor]:
    """Integer views of every parameter and buffer; a write to one is a write to it."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: integer_view(tensor.data) for name, tensor in named}


def _objects(model: NativeModel) -> dict[str, tuple[int, int]]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.data_ptr()) for name, tensor in named}


def _require(model: NativeModel, dense: NativeModel, what: str) -> None:
    found, wanted = stored_bits(model), stored_bits(dense)
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    if wrong or set(found) != set(wanted):
        raise AssertionError(f"after {what}, {wrong or set(found) ^ set(wanted)} differ from a dense load")


def _parts(items: Sequence[Item], rng: random.Random) -> list[Item]:
    """A prefix of each item, as a failed attempt leaves it; some items not at all."""
    cut = [(item, rng.randint(0, item.count)) for item in items]
    return [
        Item.of(item.tensor, item.encoding, item.flat_indices()[:count], item.values[:count])
        for item, count in cut
        if count
    ]


def _mix(model: NativeModel, dense: NativeModel, rng: random.Random) -> None:
    """Give a random half of the resident elements the bits of the dense load."""

    target = _words(dense)
    for name, resident in _words(model).items():
        mask = np.array([rng.random() < 0.5 for _ in range(resident.numel())], dtype=np.bool_)
        chosen = resident.new_tensor(mask.reshape(tuple(resident.shape))).bool()
        resident.copy_(target[name].where(chosen, resident))
