"""Proposition 1: for any loader path and any base, a delta refit ends in the bits of a dense load.

The first part is about the definitions alone, with a counterexample for each condition that is dropped. The second part
compares the definitions with the real codec and the real applier over toy loaders: also in the middle of a failed
attempt, where storage is a mixture that only the definitions predict.

Paper: Proposition 1; Figures A.13, A.14   Proofs: PROOFS.md section 4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model_tests.proposition import (
    Cell,
    Delta,
    Destination,
    Path,
    Record,
    Storage,
    Weights,
    Writer,
    apply,
    changed_set,
    delta,
    dense_load,
    everything,
    free_word,
    keep,
    may_xor,
)
from nemo_dcr.bits import unsigned
from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload, verify_payload
from nemo_dcr.codec.records import Encoding, Item, choose_encoding
from nemo_dcr.config import CodecConfig
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.receiver import apply as receiver_apply
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.index_map import IndexMap
from nemo_dcr.receiver.paths import unite_tables
from nemo_dcr.receiver.place import DenseScratchPlacer
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import resident_dump
from nemo_dcr.testing.strategies import ANY_DTYPE, ToyCase, toy_cases
from nemo_dcr.testing.toy_loader import Replicate, ToyModel

WORD = st.integers(0, 255)
TRANSFORMS = (keep, lambda word: word ^ 0xFF, lambda word: word & 0x0F, lambda word: (3 * word + 1) % 256)
"""Kept, negated, cast to something smaller, computed."""


@dataclass(frozen=True)
class Case:
    """Two versions and the loader of a receiver."""

    old: Weights
    new: Weights
    path: Path
    storage: Storage
    """What the receiver held before it ever loaded anything."""
    masks: frozenset[str]
    """Tensors that travel as masks; each of them may."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Fused, sliced, padded, replicated, skipped, transformed and tied elements, in any mixture."""
    sizes = {f"t{number}": draw(st.integers(0, 5)) for number in range(draw(st.integers(1, 3)))}
    destinations = [(name, element) for name, size in sizes.items() for element in range(size)]
    old = {destination: draw(WORD) for destination in destinations}
    new = {destination: draw(WORD | st.just(word)) for destination, word in old.items()}
    ties = draw(st.booleans())
    if ties:
        for version in (old, new):
            version.update({("tied", element): version["t0", element] for element in range(sizes["t0"])})
    writers: dict[Cell, tuple[Writer, ...]] = {}
    constants: dict[Cell, int] = {}
    storage: Storage = {}
    for offset in range(draw(st.integers(0, 10))):
        cell = (draw(st.sampled_from(("fused", "other"))), offset)
        storage[cell] = draw(WORD)
        kind = draw(st.sampled_from(("placed", "placed", "padding", "not loaded")))
        if kind == "padding":
            constants[cell] = draw(WORD)
        elif kind == "placed" and destinations:
            (name, element), stored = draw(st.sampled_from(destinations)), draw(st.sampled_from(TRANSFORMS))
            writers[cell] = (Writer((name, element), stored),)
            if ties and name == "t0":
                writers[cell] += (Writer(("tied", element), stored),)
    path = Path(writers, constants)
    masks = frozenset(name for name in sizes if may_xor(path, name) and draw(st.booleans()))
    return Case(old, new, path, storage, masks)


@given(cases())
def test_a_delta_refit_ends_in_the_bits_of_a_dense_load(case: Case) -> None:
    resident = dense_load(case.path, case.old, case.storage)
    refitted = apply(case.path, delta(case.old, case.new, case.masks), resident)
    assert refitted == dense_load(case.path, case.new, case.storage)


@given(cases(), st.data())
def test_the_order_of_items_plays_no_part(case: Case, data: st.DataObject) -> None:
    items = delta(case.old, case.new, case.masks)
    shuffled = dict(data.draw(st.permutations(list(items.items()))))
    resident = dense_load(case.path, case.old, case.storage)
    assert apply(case.path, shuffled, resident) == apply(case.path, items, resident)


@given(cases())
def test_a_restore_over_anything_is_a_dense_load(case: Case) -> None:
    padded = {**case.storage, **case.path.constants}
    assert apply(case.path, everything(case.new), padded) == dense_load(case.path, case.new, case.storage)


@given(cases(), st.data())
def test_an_overwrite_retry_repairs_whatever_a_failed_attempt_left(case: Case, data: st.DataObject) -> None:
    first, retry = delta(case.old, case.new, case.masks), delta(case.old, case.new)
    writes = sorted((name, cell) for name in first for cell in case.path.writers)
    landed = set(data.draw(st.lists(st.sampled_from(writes), unique=True))) if writes else set()
    resident = dense_load(case.path, case.old, case.storage)
    mixture = apply(case.path, first, resident, lambda name, cell: (name, cell) in landed)
    repaired = apply(case.path, retry, mixture)
    assert repaired == dense_load(case.path, case.new, case.storage)
    assert apply(case.path, retry, repaired) == repaired


@given(cases())
def test_masks_applied_twice_bring_the_old_bits_back(case: Case) -> None:
    resident = dense_load(case.path, case.old, case.storage)
    masks = {name: records for name, records in delta(case.old, case.new, case.masks).items() if name in case.masks}
    once = apply(case.path, masks, resident)
    assert apply(case.path, masks, once) == resident
    reached = {writers[0].source for writers in case.path.writers.values()}
    changed = {destination for destination in changed_set(case.old, case.new) if destination[0] in case.masks}
    assert (once != resident) == bool(reached & changed)


# ------------------------------------------------------------------------------- without a condition it does not hold

A, B = ("a", 0), ("b", 0)
CELL = ("p", 0)
OLD, NEW = 0b1100, 0b1010


def stored(writers: tuple[Writer, ...], items: Delta, resident: int, lands: bool = True) -> int:
    return apply(Path({CELL: writers}, {}), items, {CELL: resident}, lambda name, cell: lands)[CELL]


def one(encoding: str, word: int, name: str = "a") -> Delta:
    return {name: {0: Record(encoding, word)}}


def test_masks_need_the_version_that_they_were_made_from() -> None:
    assert stored((Writer(A, keep),), one("xor", OLD ^ NEW), OLD) == NEW
    assert stored((Writer(A, keep),), one("xor", OLD ^ NEW), OLD ^ 1) != NEW


def test_masks_need_a_path_that_keeps_bits() -> None:
    negated = (Writer(A, lambda word: word ^ 0xFF),)
    assert stored(negated, one("xor", OLD ^ NEW), OLD ^ 0xFF) != NEW ^ 0xFF
    assert not may_xor(Path({CELL: negated}, {}), "a")


def test_masks_need_a_cell_of_their_own() -> None:
    tied = (Writer(A, keep), Writer(B, keep))
    assert stored(tied, {**one("xor", OLD ^ NEW), **one("xor", OLD ^ NEW, "b")}, OLD) == OLD
    assert not may_xor(Path({CELL: tied}, {}), "a")


def test_overlapping_overwrites_need_to_agree() -> None:
    tied = (Writer(A, keep), Writer(B, keep))
    a, b = one("overwrite", NEW), one("overwrite", OLD, "b")
    assert stored(tied, {**a, **b}, 0) != stored(tied, {**b, **a}, 0)


def test_a_change_without_a_record_is_lost() -> None:
    assert stored((Writer(A, keep),), {}, OLD) != NEW


def test_a_mixture_is_not_repaired_by_masks() -> None:
    mixture = stored((Writer(A, keep),), one("xor", OLD ^ NEW), OLD)
    assert stored((Writer(A, keep),), one("xor", OLD ^ NEW), mixture) == OLD


def test_a_mixture_is_not_repaired_by_another_candidate() -> None:
    """The second candidate leaves the element alone that the first one changed, so it has no record for it."""
    mixture = stored((Writer(A, keep),), delta({A: OLD}, {A: NEW}), OLD)
    assert stored((Writer(A, keep),), delta({A: OLD, B: 0}, {A: OLD, B: 1}), mixture) != OLD


def test_a_write_that_did_not_land_leaves_the_old_bits() -> None:
    assert stored((Writer(A, keep),), one("overwrite", NEW), OLD, lands=False) == OLD


def test_a_placeholder_is_none_of_the_values() -> None:
    assert free_word([0, 1, 3]) == 2
    assert free_word(range(4)) == 4


# ------------------------------------------------------------------------------------------- the real codec and applier

ONES = {"BF16": 0x3F80, "F16": 0x3C00, "F32": 0x3F800000, "F64": 0x3FF << 52, "F8_E4M3": 0x38, "F8_E5M2": 0x3C}
"""The word of 1.0; for other dtypes the word 1 is another value than the word 0 as well."""


def snapshot(model: ToyModel) -> Storage:
    """Every word of the storage that the model holds."""
    dump = resident_dump(model)
    return {(entry.name, place): word for entry in dump for place, word in enumerate(entry.words.reshape(-1).tolist())}


def load(model: ToyModel, meta: TensorMeta, words: np.ndarray) -> None:
    model.load_weights([(meta.name, tensor_from_words(words, meta.dtype, meta.shape))])


def observed_path(case: ToyCase, rank: int, masks: frozenset[str]) -> Path:
    """The path of a toy loader, seen from outside: dense loads that differ in one element, and loads of one word."""
    model = case.model(rank)
    sources: dict[Cell, Destination] = {}
    made: dict[tuple[Cell, int], int] = {}
    for meta in case.tensors:
        zeros = np.zeros(meta.numel, dtype=unsigned(meta.dtype))
        load(model, meta, zeros)
        before = snapshot(model)
        for element in range(meta.numel):
            probe = zeros.copy()
            probe[element] = ONES.get(meta.dtype, 1)
            load(model, meta, probe)
            seen = snapshot(model)
            sources |= {cell: (meta.name, element) for cell, word in seen.items() if word != before[cell]}
        mine = [cell for cell, source in sources.items() if source[0] == meta.name]
        for word in {int(word) for version in (case.old, case.new) for word in version[meta.name]}:
            load(model, meta, np.full_like(zeros, word))
            seen = snapshot(model)
            made |= {(cell, word): seen[cell] for cell in mine}
    writers = {
        cell: (Writer(source, keep if source[0] in masks else lambda word, cell=cell: made[cell, word]),)
        for cell, source in sources.items()
    }
    return Path(writers, {})


def weights(words: dict[str, np.ndarray]) -> Weights:
    return {(name, element): int(word) for name, all_of in words.items() for element, word in enumerate(all_of)}


def items_of(case: ToyCase, records: Delta) -> list[Item]:
    """The records as real items, encoded as a payload and decoded again."""
    items = []
    for meta in case.tensors:
        if mine := records.get(meta.name):
            encoding = Encoding.XOR if next(iter(mine.values())).encoding == "xor" else Encoding.OVERWRITE
            at, words = zip(*((element, record.word) for element, record in sorted(mine.items())), strict=True)
            items.append(Item.of(meta, encoding, np.array(at, np.int64), np.array(words, unsigned(meta.dtype))))
    payload = encode_payload(PayloadKey(AttemptId(1), OwnerId(0), 0), items)
    return list(verify_payload(payload.data, limits=CodecConfig()).decode())


def first_records(records: Delta, counts: dict[str, int]) -> Delta:
    """What a failed attempt applied: of each tensor, the records of its first elements."""
    return {name: some for name, all_of in records.items() if (some := dict(sorted(all_of.items())[: counts[name]]))}


def check_against_real(case: ToyCase, counts: dict[str, int], *, index_space: bool = True) -> bool:
    """Real storage equals the definitions' after a part of an attempt and after its retry; says whether any changed."""
    real = [case.model(rank) for rank in range(case.world)]
    for model in real:
        for meta in case.tensors:
            load(model, meta, case.old[meta.name])
    tables = [prewarm(model, case.tensors) for model in real]
    classes = unite_tables({str(rank): table.classes for rank, table in enumerate(tables)})
    wanted = {
        name: choose_encoding(overwrite_attempt=False, bits_preserved=True, path=path) for name, path in classes.items()
    }
    masks = frozenset(name for name, encoding in wanted.items() if encoding is Encoding.XOR)
    old, new = weights(case.old), weights(case.new)
    attempt, retry = first_records(delta(old, new, masks), counts), delta(old, new)
    moved = False
    for rank, (model, table) in enumerate(zip(real, tables, strict=True)):
        path, resident = observed_path(case, rank, masks), snapshot(model)
        applier = Applier(model, table, index_space=index_space)
        assert resident == dense_load(path, old, resident)
        for records in (attempt, retry):
            applier.apply(items_of(case, records), attempt=AttemptId(1 + (records is retry)))
            predicted = apply(path, records, resident)
            assert snapshot(model) == predicted
            moved |= predicted != resident
            resident = predicted
        assert resident == dense_load(path, new, resident)
    return moved


def every_dtype(dtype: str) -> ToyCase:
    """A scalar, an empty tensor and a matrix of one dtype; every word but the last changes in its lowest bit."""
    metas = tuple(TensorMeta(name, shape, dtype) for name, shape in (("s", ()), ("e", (0, 3)), ("m", (2, 3))))
    old = {meta.name: (np.arange(meta.numel) % 2).astype(unsigned(dtype)) for meta in metas}
    new = {name: words ^ words.dtype.type(1) for name, words in old.items()}
    new["m"][-1] = old["m"][-1]
    return ToyCase(metas, {meta.name: Replicate() for meta in metas}, 1, old, new)


@pytest.mark.parametrize("dtype", ANY_DTYPE)
def test_every_dtype_ends_as_the_definitions_say(dtype: str) -> None:
    for index_space in (True, False):
        assert check_against_real(every_dtype(dtype), {"s": 0, "m": 3}, index_space=index_space)


FAULTS = {
    "a placeholder that is a value": (receiver_apply, "free_pattern", lambda values, dtype: int(values[0]), False),
    "masks that do not arrive": (DenseScratchPlacer, "_xor", lambda self, name, destination, source: None, False),
    "entries that do not arrive": (IndexMap, "write", lambda self, item, resident, first, target: item.count, True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_definitions_see(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, name, wrong, index_space = FAULTS[fault]
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError, match="=="):
        check_against_real(every_dtype("U8"), {"s": 0, "m": 3}, index_space=index_space)


@pytest.mark.model
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(toy_cases(max_tensors=2), st.data())
def test_the_real_codec_and_applier_do_what_the_definitions_say(case: ToyCase, data: st.DataObject) -> None:
    counts = {meta.name: data.draw(st.integers(0, meta.numel)) for meta in case.tensors}
    check_against_real(case, counts, index_space=data.draw(st.booleans()))
