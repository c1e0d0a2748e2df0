"""Random loaders, dtypes and change sets: a delta refit ends in the bits of a dense one, in all resident storage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.codec.records import Encoding, Item, PathClass, choose_encoding
from nemo_dcr.ids import AttemptId
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.paths import LoaderTable, unite_tables
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import resident_dump
from nemo_dcr.testing.strategies import ToyCase, toy_cases
from nemo_dcr.testing.toy_loader import ToyModel

RELAXED = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def dense_load(model: ToyModel, case: ToyCase, version: dict[str, np.ndarray]) -> None:
    model.load_weights((m.name, tensor_from_words(version[m.name], m.dtype, m.shape)) for m in case.tensors)


def stored_bits(model: ToyModel) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {entry.name: (entry.dtype, entry.shape, entry.words.tobytes()) for entry in resident_dump(model)}


def ranks_of(case: ToyCase) -> list[tuple[ToyModel, ToyModel, LoaderTable]]:
    """For each rank: the model at the old version, another one at the new version (dense), and its table."""
    made = []
    for rank in range(case.world):
        model, dense = case.model(rank), case.model(rank)
        dense_load(model, case, case.old)
        dense_load(dense, case, case.old)
        dense_load(dense, case, case.new)
        before = stored_bits(model)
        table = prewarm(model, case.tensors)
        assert stored_bits(model) == before
        made.append((model, dense, table))
    return made


def encodings_of(case: ToyCase, tables: list[LoaderTable], *, overwrite: bool) -> dict[str, Encoding]:
    classes = unite_tables({str(rank): table.classes for rank, table in enumerate(tables)})
    return {
        name: choose_encoding(overwrite_attempt=overwrite, bits_preserved=True, path=path)
        for name, path in classes.items()
    }


@RELAXED
@given(toy_cases(), st.booleans(), st.booleans())
def test_a_refit_of_xor_and_overwrite_items_equals_a_dense_load(case: ToyCase, overwrite: bool, check: bool) -> None:
    ranks = ranks_of(case)
    items = case.items(encodings_of(case, [table for _, _, table in ranks], overwrite=overwrite))
    for rank, (model, dense, table) in enumerate(ranks):
        by_scratch = case.model(rank)
        dense_load(by_scratch, case, case.old)
        other = prewarm(by_scratch, case.tensors)
        reports = [
            Applier(model, table, post_apply_check=check).apply(items, attempt=AttemptId(1)),
            Applier(by_scratch, other, post_apply_check=check, index_space=False).apply(items, attempt=AttemptId(1)),
        ]
        assert stored_bits(model) == stored_bits(by_scratch) == stored_bits(dense)
        assert [replace(report, check_seconds=0) for report in reports] == [replace(reports[0], check_seconds=0)] * 2
        assert not table.scratch._bytes.any()


@RELAXED
@given(toy_cases(), st.data())
def test_an_overwrite_retry_repairs_any_part_of_a_failed_attempt(case: ToyCase, data: st.DataObject) -> None:
    ranks = ranks_of(case)
    tables = [table for _, _, table in ranks]
    first = case.items(encodings_of(case, tables, overwrite=False))
    retry = case.items(encodings_of(case, tables, overwrite=True))
    for model, dense, table in ranks:
        part = [partial for item in first if (partial := _some_of(item, data.draw(st.integers(0, item.count))))]
        applier = Applier(model, table)
        applier.apply(part, attempt=AttemptId(1))
        order = data.draw(st.permutations(retry))
        applier.apply(order, attempt=AttemptId(2))
        applier.apply(order, attempt=AttemptId(3))
        assert stored_bits(model) == stored_bits(dense)


def _some_of(item: Item, count: int) -> Item | None:
    if count == 0:
        return None
    return Item.of(item.tensor, item.encoding, item.flat_indices()[:count], item.values[:count])


@RELAXED
@given(toy_cases())
def test_one_owner_a_part_and_one_call_an_item_make_no_difference(case: ToyCase) -> None:
    ranks = ranks_of(case)
    items = case.items(encodings_of(case, [table for _, _, table in ranks], overwrite=False))
    for model, dense, table in ranks:
        applier = Applier(model, table)
        for item in items:
            at = item.flat_indices()
            for owner in range(2):
                mine = at % 2 == owner
                if mine.any():
                    part = Item.of(item.tensor, item.encoding, at[mine], item.values[mine])
                    applier.apply([part], attempt=AttemptId(1))
        assert stored_bits(model) == stored_bits(dense)


@RELAXED
@given(toy_cases())
def test_dense_items_fill_storage_that_holds_anything(case: ToyCase) -> None:
    """A restore: every element of the new version, whatever the rank held before."""
    for model, dense, table in ranks_of(case):
        items = [Item.run(meta, Encoding.OVERWRITE, 0, case.new[meta.name]) for meta in case.tensors if meta.numel > 0]
        Applier(model, table).apply(items)
        assert stored_bits(model) == stored_bits(dense)


@pytest.mark.parametrize("wanted", [PathClass.XOR, PathClass.OVERWRITE, PathClass.SKIPPED])
def test_the_strategies_reach_every_class_of_path(wanted: PathClass) -> None:
    """A table of cases without one of the classes would prove less."""

    def reaches(case: ToyCase) -> bool:
        found: set[PathClass] = set()
        for rank in range(case.world):
            model = case.model(rank)
            dense_load(model, case, case.old)
            found.update(prewarm(model, case.tensors).classes.values())
        assert PathClass.UNSUPPORTED not in found
        return wanted in found

    search = settings(max_examples=500, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    assert find(toy_cases(), reaches, settings=search).tensors


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_change_of_every_tensor_reaches_every_rank_that_holds_it(world: int) -> None:
    """Forced changes everywhere, so that no path passes for lack of a change."""
    from nemo_dcr.canonical import TensorMeta
    from nemo_dcr.testing import toy_loader as toy

    rules: dict[str, toy.Rule] = {
        "slice": toy.Slice(1, by_item=True),
        "pad": toy.PadRows(4),
        "pad_copy": toy.PadRows(4, by_copy=True),
        "turn": toy.Transpose(contiguous=True),
        "composed": toy.Composed(None),
        "negate": toy.Negate(),
        "stacked": toy.Stacked(),
        "braid": toy.Interleave(),
        "expert": toy.OnRank(1),
    }
    tensors = tuple(TensorMeta(name, (5, 4), "BF16") for name in rules)
    rng = np.random.default_rng(7)
    old = {meta.name: rng.integers(0x3C00, 0x4100, 20).astype("<u2") for meta in tensors}
    new = {name: np.where(rng.random(20) < 0.3, words ^ 1, words).astype("<u2") for name, words in old.items()}
    assert all((old[name] != new[name]).any() for name in old)
    case = ToyCase(tensors, rules, world, old, new)
    ranks = ranks_of(case)
    items = case.items(encodings_of(case, [table for _, _, table in ranks], overwrite=False))
    changed = 0
    for model, dense, table in ranks:
        before = stored_bits(model)
        Applier(model, table).apply(items)
        assert stored_bits(model) == stored_bits(dense)
        changed += before != stored_bits(model)
    assert changed == world
