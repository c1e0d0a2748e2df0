"""Table A.2 row by row: one loader that satisfies the row, and one that breaks that row and no other.

The pairs are in `loader_conformance`; further loaders of each row follow here. A row that prewarm judges must be named
in the loader table while live storage is untouched; a row that is judged at a copy must fail the attempt before the
copy executes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_dcr.bits.tensors import tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item, PathClass
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import AttemptId
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.conditions import CONDITIONS, When
from nemo_dcr.receiver.paths import LoaderTable
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import resident_digest
from nemo_dcr.testing.loader_conformance import LOADER_CONFORMANCE, LoaderConformance
from nemo_dcr.testing.toy_loader import ScriptedModel

Weights = Iterable[tuple[str, Tensor]]
Load = Callable[[Mapping[str, Tensor], Weights], Iterable[str] | None]
A, B = TensorMeta("a", (4, 2), "BF16"), TensorMeta("b", (4, 2), "BF16")
OLD = {"a": np.arange(0x3F80, 0x3F88, dtype="<u2"), "b": np.arange(0x4000, 0x4008, dtype="<u2")}


@pytest.fixture(autouse=True, params=[True, False], ids=["by-index", "over-scratch"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file holds for both ways of application."""
    monkeypatch.setitem(Applier.__init__.__kwdefaults__, "index_space", request.param)


def plain(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
    loaded = []
    for name, tensor in weights:
        resident[name].copy_(tensor)
        loaded.append(name)
    return loaded


def storage() -> dict[str, Tensor]:
    return {"a": torch.zeros(4, 2, dtype=torch.bfloat16), "b": torch.zeros(4, 2, dtype=torch.bfloat16)}


@dataclass
class Engine:
    """A model that its own loader filled with OLD."""

    load: Load = plain
    tensors: dict[str, Tensor] = field(default_factory=storage)
    metas: tuple[TensorMeta, ...] = (A, B)
    filled_by: Load | None = None

    def __post_init__(self) -> None:
        self.model = ScriptedModel(self.tensors, self.filled_by or self.load)
        self.model.load_weights((m.name, tensor_from_words(OLD[m.name], m.dtype, m.shape)) for m in self.metas)
        self.model._load = self.load

    def prewarm(self) -> LoaderTable:
        before = resident_digest(self.model)
        table = prewarm(self.model, self.metas)
        assert resident_digest(self.model) == before, "live storage was touched"
        return table

    def breach(self, name: str = "a") -> str | None:
        path = self.prewarm().paths[name]
        assert (path.path_class is PathClass.UNSUPPORTED) == (path.breach is not None)
        return path.breach.code if path.breach else None


def change(meta: TensorMeta, at: list[int], *, xor: bool) -> Item:
    indices = np.array(at, dtype=np.int64)
    values = np.full(len(at), 1, dtype="<u2") if xor else OLD[meta.name][indices] ^ np.uint16(1)
    return Item.of(meta, Encoding.XOR if xor else Encoding.OVERWRITE, indices, values)


def test_the_table_has_twelve_rows_in_order_with_text_and_time() -> None:
    assert [row.code for row in CONDITIONS] == [f"LC{number}" for number in range(1, 13)]
    assert all(row.paper and isinstance(row.when, When) for row in CONDITIONS)


@pytest.mark.parametrize("row", LOADER_CONFORMANCE, ids=lambda row: row.code)
def test_the_satisfying_loader_of_a_row_is_exact(row: type[LoaderConformance]) -> None:
    row().check_satisfying()


@pytest.mark.parametrize("row", LOADER_CONFORMANCE, ids=lambda row: row.code)
def test_the_breaking_loader_of_a_row_is_refused_by_that_row(row: type[LoaderConformance]) -> None:
    row().check_breaking()


def test_every_row_has_its_pair_of_loaders() -> None:
    assert [row.code for row in LOADER_CONFORMANCE] == [row.code for row in CONDITIONS]


@pytest.mark.parametrize("row", LOADER_CONFORMANCE, ids=lambda row: row.code)
def test_the_checks_of_a_row_fail_for_the_other_loader(
    row: type[LoaderConformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    if row.check_breaking is LoaderConformance.check_breaking:
        case = row()
        monkeypatch.setattr(case, "satisfying", case.breaking)
        with pytest.raises(AssertionError, match="refused"):
            case.check_satisfying()
        case = row()
        monkeypatch.setattr(case, "breaking", case.satisfying)
        with pytest.raises(AssertionError, match="no refusal"):
            case.check_breaking()


def test_a_plain_loader_satisfies_every_row() -> None:
    table = Engine().prewarm()
    assert table.reasons == {}
    assert table.classes == {"a": PathClass.XOR, "b": PathClass.XOR}


# -- LC1


def test_lc1_a_write_that_appears_after_prewarm_fails_the_attempt_before_it_executes() -> None:
    engine = Engine()
    table = engine.prewarm()

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = plain(resident, weights)
        resident["b"].mul_(2)
        return names

    engine.model._load = load
    before = engine.tensors["b"].clone().view(torch.int16)
    with pytest.raises(ConditionViolated) as caught:
        Applier(engine.model, table).apply([change(A, [1], xor=True)])
    assert caught.value.condition == "LC1"
    assert (engine.tensors["b"].view(torch.int16) == before).all()


# -- LC2


def test_lc2_both_report_conventions_and_no_report_are_fine() -> None:
    def silent(resident: Mapping[str, Tensor], weights: Weights) -> None:
        plain(resident, weights)

    def resident_names(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return ["fused" for _, tensor in weights if resident["fused"].copy_(tensor) is not None]

    assert Engine(silent).prewarm().reasons == {}
    one = {"fused": torch.zeros(4, 2, dtype=torch.bfloat16)}
    assert Engine(resident_names, one, (A,)).breach() is None

    def canonical_names(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        return [name for name, tensor in weights if resident["fused"].copy_(tensor) is not None]

    assert Engine(canonical_names, {"fused": one["fused"].clone()}, (A,)).breach() is None


def test_lc2_counts_that_agree_do_not_hide_names_that_differ() -> None:
    """The stale name `b` is reported, the copied one `a` is not: two names each, and yet wrong (failure A8)."""

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        for name, tensor in weights:
            if name == "a":
                resident["a"].copy_(tensor)
        return ["b"]

    engine = Engine(load)
    assert engine.breach("a") == "LC2"
    assert engine.breach("b") == "LC2"


def test_lc2_a_loader_that_copies_in_threads_is_refused_and_touches_nothing() -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = []
        for name, tensor in weights:
            thread = threading.Thread(target=resident[name].copy_, args=(tensor,))
            thread.start()
            thread.join()
            names.append(name)
        return names

    engine = Engine(load)
    assert engine.breach("a") == "LC2"
    assert engine.breach("b") == "LC2"


def test_lc2_a_missing_copy_at_run_time_fails_the_attempt() -> None:
    engine = Engine()
    table = engine.prewarm()
    engine.model._load = lambda resident, weights: [name for name, _ in weights]
    with pytest.raises(ConditionViolated) as caught:
        Applier(engine.model, table).apply([change(A, [1], xor=True)])
    assert caught.value.condition == "LC2"


# -- LC4


def _normalise(resident: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    resident[name].copy_(tensor / tensor.float().sum(dim=0).to(tensor.dtype))


def _neighbour(resident: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    resident[name].copy_(torch.maximum(tensor, tensor.roll(1, 0)))


def _accumulate(resident: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    resident[name].copy_(resident[name] + tensor)


def _scaled_by_resident(resident: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    resident[name].copy_(tensor * resident["b"])


def _random(resident: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    resident[name].copy_(tensor + torch.rand(4, 2).to(tensor.dtype))


def _by_value(resident: Mapping[str, Tensor], name: str, tensor: Tensor) -> None:
    half = slice(0, 2) if tensor.float().sum().item() > 0 else slice(2, 4)
    resident[name][half].copy_(tensor[half])


@pytest.mark.parametrize("bad", [_normalise, _neighbour, _accumulate, _scaled_by_resident, _random, _by_value])
def test_lc4_dependence_on_anything_else_is_refused(bad: Callable[[Mapping[str, Tensor], str, Tensor], None]) -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            if name == "a":
                bad(resident, name, tensor)
            else:
                resident[name].copy_(tensor)

    engine = Engine(load, filled_by=plain)
    assert engine.breach("a") == "LC4"
    assert engine.breach("b") is None


def test_lc4_a_composed_step_that_reads_its_neighbours_in_a_fused_parameter_is_refused() -> None:
    """Only the resident bits under the load decide the outcome, so two loads over different ones must agree."""

    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            rows = slice(0, 4) if name == "a" else slice(4, 8)
            resident["fused"][rows].copy_(tensor)
            if name == "a":
                resident["fused"][:4].copy_(resident["fused"][:4] + resident["fused"][4:])

    engine = Engine(load, {"fused": torch.zeros(8, 2, dtype=torch.bfloat16)})
    assert engine.breach("a") == "LC4"
    assert engine.breach("b") is None


def test_lc4_an_output_that_looked_constant_and_is_not_fails_the_attempt_before_the_copy() -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            rare = torch.where(tensor[:1].abs() > 100, tensor[:1], 0)
            resident[name].copy_(torch.cat([rare, tensor[1:]]) if name == "a" else tensor)

    engine = Engine(load)
    table = engine.prewarm()
    assert table.classes["a"] is PathClass.OVERWRITE
    assert table.paths["a"].covered == 6
    applier = Applier(engine.model, table)
    applier.apply([change(A, [0, 5], xor=False)])
    before = resident_digest(engine.model)
    large = Item.run(A, Encoding.OVERWRITE, 0, np.array([0x4348], dtype="<u2"))
    with pytest.raises(ConditionViolated) as caught:
        applier.apply([large])
    assert caught.value.condition == "LC4"
    assert resident_digest(engine.model) == before


# -- LC5


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda t: t, PathClass.XOR),
        (lambda t: t.view(torch.int16).view(torch.bfloat16), PathClass.XOR),
        (lambda t: t.clone(), PathClass.OVERWRITE),
        (lambda t: t.float(), PathClass.OVERWRITE),
        (lambda t: t.t().contiguous().t(), PathClass.OVERWRITE),
    ],
)
def test_lc5_only_views_of_the_scratch_in_its_dtype_are_xor(
    source: Callable[[Tensor], Tensor], expected: PathClass
) -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            resident[name].copy_(source(tensor))

    engine = Engine(load)
    table = engine.prewarm()
    assert table.classes == {"a": expected, "b": expected}
    if expected is PathClass.OVERWRITE:
        with pytest.raises(ConditionViolated) as caught:
            Applier(engine.model, table).apply([change(A, [0], xor=True)])
        assert caught.value.condition == "LC5"


def test_lc5_a_loader_that_starts_to_edit_what_it_was_given_fails_before_the_copy() -> None:
    engine = Engine()
    table = engine.prewarm()
    before = resident_digest(engine.model)
    engine.model._load = lambda resident, weights: [
        name for name, tensor in weights if resident[name].copy_(tensor.add_(1)) is not None
    ]
    with pytest.raises(ConditionViolated) as caught:
        Applier(engine.model, table).apply([change(A, [1], xor=True)])
    assert caught.value.condition == "LC5"
    assert resident_digest(engine.model) == before


# -- LC6


def test_lc6_an_element_that_two_xor_items_carry_fails_the_attempt_also_across_calls() -> None:
    engine = Engine()
    table = engine.prewarm()
    before = resident_digest(engine.model)
    with pytest.raises(ConditionViolated) as caught:
        Applier(engine.model, table).apply([change(A, [1], xor=True), change(A, [1, 2], xor=True)])
    assert caught.value.condition == "LC6"
    assert resident_digest(engine.model) == before
    applier = Applier(engine.model, table)
    applier.apply([change(A, [1, 5], xor=True)], attempt=AttemptId(1))
    applier.apply([change(A, [2, 4], xor=True)], attempt=AttemptId(1))
    with pytest.raises(ConditionViolated) as caught:
        applier.apply([change(A, [4], xor=True)], attempt=AttemptId(1))
    assert caught.value.condition == "LC6"
    applier.apply([change(A, [4], xor=True)], attempt=AttemptId(2))


# -- LC7


def test_lc7_partly_overlapping_copies_of_one_name_are_refused() -> None:
    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            resident[name][:3].copy_(tensor[:3])
            resident[name][2:].copy_(tensor[2:])

    assert Engine(load).breach() == "LC7"


# -- LC8


def test_lc8_a_path_without_separable_placeholders_is_refused() -> None:
    """The rows tell different pairs of placeholders apart, and no pair is told apart by all of them."""

    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            low = torch.where(tensor[:2] < -1.5, tensor[:2], 0)
            middle = torch.where((tensor[2:] > 1.5) & (tensor[2:] < 2.5), tensor[2:], 0)
            resident[name].copy_(torch.cat([low, middle]) if name == "a" else tensor)

    engine = Engine(load, filled_by=plain)
    assert engine.breach("a") == "LC8"
    assert engine.breach("b") is None


def test_lc8_a_source_that_changes_after_prewarm_fails_before_the_copy() -> None:
    engine = Engine()
    table = engine.prewarm()
    before = resident_digest(engine.model)
    engine.model._load = lambda resident, weights: [
        name for name, tensor in weights if resident[name].copy_(tensor.clone()) is not None
    ]
    with pytest.raises(ConditionViolated) as caught:
        Applier(engine.model, table).apply([change(A, [1], xor=True)])
    assert caught.value.condition == "LC8"
    assert resident_digest(engine.model) == before


# -- LC9


def test_lc9_addresses_do_not_change_over_a_refit() -> None:
    engine = Engine()
    table = engine.prewarm()
    places = [tensor.data_ptr() for tensor in engine.tensors.values()]
    Applier(engine.model, table).apply([change(A, [1], xor=True), change(B, [2], xor=False)])
    assert [tensor.data_ptr() for tensor in engine.tensors.values()] == places


def test_lc9_a_loader_that_puts_a_new_object_in_place_of_a_parameter_is_refused_and_undone() -> None:
    engine = Engine()
    original = engine.tensors["a"]

    def load(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
        names = plain(resident, weights)
        if "a" in names:
            engine.model.register_buffer("a", resident["a"].clone())
        return names

    engine.model._load = load
    assert engine.breach("a") == "LC9"
    assert engine.model.a is original


def test_lc9_a_tensor_that_moved_since_prewarm_fails_the_attempt() -> None:
    engine = Engine()
    table = engine.prewarm()
    engine.tensors["b"].data = engine.tensors["b"].clone()
    with pytest.raises(ConditionViolated) as caught:
        Applier(engine.model, table).apply([change(A, [1], xor=True)])
    assert caught.value.condition == "LC9"


# -- LC10


def test_lc10_an_alias_follows_and_a_constant_table_is_listed() -> None:
    tensors = storage()
    tensors |= {"alias": tensors["a"].t(), "frequencies": torch.arange(8, dtype=torch.bfloat16)}
    table = Engine(plain, tensors).prewarm()
    assert table.reasons == {}
    assert table.unwritten == ("frequencies",)


# -- LC11


def buffered(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
    return plain(resident, sorted(weights, key=lambda entry: entry[0], reverse=True))


def looks_ahead(resident: Mapping[str, Tensor], weights: Weights) -> list[str]:
    names, held = [], None
    for entry in _with_end(weights):
        if held is not None:
            resident[held[0]].copy_(held[1])
            names.append(held[0])
        held = entry
    return names


def _with_end(weights: Weights) -> Iterable[tuple[str, Tensor] | None]:
    yield from weights
    yield None


@pytest.mark.parametrize("load", [buffered, looks_ahead])
def test_lc11_a_loader_that_buffers_gets_one_call_an_item_and_stays_exact(load: Load) -> None:
    engine = Engine(load)
    table = engine.prewarm()
    assert not table.grouped
    assert not table.paths["a"].consumed_before_next
    assert table.classes == {"a": PathClass.XOR, "b": PathClass.XOR}
    items = [change(A, [1], xor=True), change(B, [2, 7], xor=False)]
    Applier(engine.model, table).apply(items)
    for meta, at in ((A, [1]), (B, [2, 7])):
        want = OLD[meta.name].copy()
        want[at] ^= 1
        assert engine.tensors[meta.name].view(torch.int16).flatten().tolist() == want.tolist()


# -- LC12


def test_lc12_a_write_to_a_tensor_outside_the_module_is_refused() -> None:
    outside = torch.zeros(4, 2, dtype=torch.bfloat16)

    def load(resident: Mapping[str, Tensor], weights: Weights) -> None:
        for name, tensor in weights:
            (outside if name == "a" else resident[name]).copy_(tensor)

    engine = Engine(load)
    assert engine.breach("a") == "LC12"
    assert engine.breach("b") is None
