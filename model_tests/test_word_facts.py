"""Facts about words and their coding hold for every pattern, and are facts about the code that runs.

z3 proves each fact for all words of 8 and 16 bits, and of 32 and 64 where it stays cheap; less its condition the same
claim has a counterexample. The terms that the facts speak of are evaluated beside the real kernels, encoder, decoder
and placer, so the model is not a second truth.

Paper: Section 6.1; Appendix D   Proofs: change_detection_complete, xor_reconstructs, inactive_unchanged,
overwrite_supplies, loader_commutes, payload_carries_items, dedup_once, retry_repairs
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import z3
from torch import Tensor

from model_tests.location_facts import (
    LOCATION_FACTS,
    bitmap_of,
    chain_byte,
    chain_length,
    gaps_of,
    indices_from,
    joined,
    plane_of,
)
from model_tests.solver import Undecided, counterexample, evaluate
from model_tests.word_facts import WORD_FACTS, Fact, first_gap_from_the_top, overwritten, scattered, xor_applied
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.locations import LocationType, decode_locations, encode_locations
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.kernels import plain
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.scratch import free_pattern
from nemo_dcr.testing.toy_loader import ScriptedModel

FACTS = (*WORD_FACTS, *LOCATION_FACTS)
CASES = [pytest.param(fact, bits, id=f"{fact.name}-{bits}") for fact in FACTS for bits in fact.widths]
BYTES = range(256)
EDGES = (0, 1, 0x7F, 0x80, 0xFE, 0xFF)
GAPS = (1, 2, 127, 128, 253, 254, 255, 256, 509, 510, 511, 765)


@pytest.mark.parametrize(("fact", "bits"), CASES)
def test_no_word_breaks_the_fact(fact: Fact, bits: int) -> None:
    assert counterexample(fact.claim(bits)) is None


@pytest.mark.parametrize(("fact", "bits"), CASES)
def test_without_its_condition_the_fact_is_refuted(fact: Fact, bits: int) -> None:
    assert counterexample(fact.without_condition(bits)) is not None


def test_an_answer_of_unknown_is_an_error() -> None:
    word, function = z3.BitVec("word", 64), z3.Function("f", z3.BitVecSort(64), z3.BitVecSort(64))
    hard = z3.Exists(
        [word], z3.ForAll([z3.BitVec("other", 64)], function(z3.BitVec("other", 64) * word) != word * word)
    )
    with pytest.raises(Undecided):
        counterexample(z3.Not(hard))


def test_each_fact_is_proved_at_8_and_16_bits_or_has_no_8_bit_form() -> None:
    short = {fact.name: fact.widths for fact in FACTS if not {8, 16} <= set(fact.widths)}
    assert short == {"planes_give_the_word_back": (16, 32, 64)}  # a word of one byte has one plane


def test_each_fact_stands_under_its_lemma() -> None:
    """The lemma exists, and lists this file under "Checked by"; no lemma lists it without a fact."""
    text = (Path(__file__).resolve().parents[1] / "PROOFS.md").read_text(encoding="utf-8")
    bodies = dict(re.findall(r"^### L\d+ (\w+)\n(.*?)(?=^###? |\Z)", text, re.MULTILINE | re.DOTALL))
    listed = {slug for slug, body in bodies.items() if "test_word_facts.py::test_no_word_breaks_the_fact" in body}
    assert listed == {fact.lemma for fact in FACTS}


# ------------------------------------------------------------------------------------- the terms are those of the code


def chain_by_model(gap: int) -> list[int]:
    term = z3.BitVec("gap", 16)
    length = evaluate(chain_length(term), gap=gap)
    return [evaluate(chain_byte(term, z3.BitVec("k", 24)), gap=gap, k=k) for k in range(length)]


def test_the_chain_of_every_short_gap_is_the_modelled_one() -> None:
    for gap in range(1, 1100):
        chain = plain.encode_chain(np.array([gap], dtype=np.int64))
        assert chain.tolist() == chain_by_model(gap)
        assert plain.decode_chain(chain, 1).tolist() == [gap]


@pytest.mark.parametrize("count", [2, 3])
def test_a_chain_of_gaps_is_the_chains_of_its_gaps_in_a_row(count: int) -> None:
    models = {gap: chain_by_model(gap) for gap in GAPS}
    for gaps in product(GAPS, repeat=count):
        chain = plain.encode_chain(np.array(gaps, dtype=np.int64))
        assert chain.tolist() == [byte for gap in gaps for byte in models[gap]]
        assert plain.decode_chain(chain, count).tolist() == np.cumsum(gaps).tolist()


def test_every_chain_of_two_bytes_decodes_to_gaps_that_code_to_it() -> None:
    """The decoder accepts what the encoder makes, and nothing else: no second coding of the same gaps."""
    accepted = 0
    for pair in product(BYTES, repeat=2):
        chain = np.array(pair, dtype=np.uint8)
        for count in (1, 2):
            try:
                distances = plain.decode_chain(chain, count)
            except ValueError:
                continue
            accepted += 1
            assert plain.encode_chain(np.diff(distances, prepend=0)).tolist() == list(pair)
    assert accepted == 254 * 254 + 255  # two gaps below 255, or one gap of 255 to 509


def subsets(size: int) -> list[list[int]]:
    return [[index for index in range(size) if number >> index & 1] for number in range(1, 1 << size)]


@pytest.mark.parametrize("kind", [LocationType.GAPS_U16, LocationType.BITMAP])
def test_locations_of_every_small_set_are_coded_as_modelled(kind: LocationType) -> None:
    meta = TensorMeta("w", (8,), "U8")
    for chosen in subsets(8):
        indices = np.array(chosen, dtype=np.int64)
        item = Item(meta, Encoding.OVERWRITE, chosen[0], indices, np.zeros(len(chosen), dtype=np.uint8))
        units = encode_locations(item, kind)
        names = {f"i{number}": index for number, index in enumerate(chosen)}
        if kind is LocationType.BITMAP:
            distances = [z3.BitVec(name, 8) - chosen[0] for name in names]
            modelled = [evaluate(bitmap_of(distances), **names)]
        else:
            terms = [z3.BitVec(name, 32) for name in names]
            modelled = [evaluate(gap, **_needed(names, number)) for number, gap in enumerate(gaps_of(terms, 16))]
        assert units.tolist() == modelled
        planes = [np.zeros(len(units), dtype=np.uint8) for _ in range(kind.planes)]
        plain.split_planes(units, planes)
        decoded = decode_locations(kind, chosen[0], len(chosen), 8, planes)
        assert decoded is not None
        assert decoded.tolist() == chosen


def _needed(names: Mapping[str, int], number: int) -> dict[str, int]:
    return {name: names[name] for name in (f"i{number}", f"i{number + 1}")}


def test_gaps_are_summed_as_modelled() -> None:
    for gaps in product((1, 255, 256, 65535), repeat=2):
        terms = indices_from(z3.BitVec("start", 32), [z3.BitVec("g0", 16), z3.BitVec("g1", 16)])
        planes = [np.zeros(2, dtype=np.uint8) for _ in range(2)]
        plain.split_planes(np.array(gaps, dtype="<u2"), planes)
        decoded = decode_locations(LocationType.GAPS_U16, 7, 3, 1 << 20, planes)
        assert decoded is not None
        assert decoded.tolist() == [
            7,
            evaluate(terms[1], start=7, g0=gaps[0]),
            evaluate(terms[2], start=7, g0=gaps[0], g1=gaps[1]),
        ]


def test_every_byte_in_every_place_goes_to_the_modelled_plane() -> None:
    values = np.array([byte << (8 * place) for place in range(2) for byte in BYTES], dtype="<u2")
    planes = [np.zeros(len(values), dtype=np.uint8) for _ in range(2)]
    plain.split_planes(values, planes)
    word = z3.BitVec("word", 16)
    for number, value in enumerate(values.tolist()):
        assert [int(plane[number]) for plane in planes] == [evaluate(plane_of(word, k), word=value) for k in range(2)]
    both = joined([z3.BitVec("low", 8), z3.BitVec("high", 8)])
    rejoined = plain.join_planes(planes, np.dtype("<u2"))
    for number, value in enumerate(rejoined.tolist()):
        assert evaluate(both, low=int(planes[0][number]), high=int(planes[1][number])) == value


def test_the_search_from_the_top_finds_what_is_modelled() -> None:
    """Zero and the usual NaN are taken, so `free_pattern` has to search; the third value is a further neighbour."""
    top = (1 << 32) - 1
    first = (0x7FC00001, 0xFFC00001, 0)
    terms = [z3.BitVec(f"v{number}", 32) for number in range(5)]
    for taken in ((top, top - 1), (top, top - 2), (top - 1, top - 2), (top - 5, top - 6), (top, top - 7)):
        values = sorted({*first, *taken}, reverse=True)
        modelled = evaluate(
            first_gap_from_the_top(terms), **{f"v{number}": value for number, value in enumerate(values)}
        )
        assert free_pattern(np.array(values, dtype="<u4"), "F32") == modelled


def model_of(
    words: np.ndarray, load: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[ScriptedModel, TensorMeta]:
    """An engine of one byte tensor, filled with `words` by its own loader, which passes tensors through `load`."""

    def copy(resident: Mapping[str, Tensor], weights: object) -> list[str]:
        return [name for name, tensor in weights if resident[name].copy_(load(tensor)) is not None]  # type: ignore[attr-defined]

    model = ScriptedModel({"w": torch.zeros(len(words), dtype=torch.uint8)}, copy)
    model.load_weights([("w", torch.from_numpy(words.copy()))])
    return model, TensorMeta("w", (len(words),), "U8")


@pytest.mark.parametrize("index_space", [True, False])
def test_the_placer_xors_every_byte_as_modelled(index_space: bool) -> None:
    residents = np.repeat(np.arange(256, dtype=np.uint8), len(EDGES))
    masks = np.tile(np.array(EDGES, dtype=np.uint8), 256)
    model, meta = model_of(residents)
    applier = Applier(model, prewarm(model, [meta]), index_space=index_space)
    applier.apply([Item.run(meta, Encoding.XOR, 0, masks)])
    term = xor_applied(z3.BitVec("resident", 8), z3.BitVec("mask", 8))
    expected = [evaluate(term, resident=r, mask=m) for r, m in product(BYTES, EDGES)]
    assert copied_words(model.state_dict()["w"]).tolist() == expected


@pytest.mark.parametrize("load", [lambda tensor: tensor, lambda tensor: tensor.clone()], ids=["one-pass", "two-passes"])
@pytest.mark.parametrize("index_space", [True, False])
def test_the_placer_overwrites_and_masks_every_byte_as_modelled(
    load: Callable[[Tensor], Tensor], index_space: bool
) -> None:
    """Every second element is active; every resident byte meets the edge values, active and inactive."""
    residents = np.repeat(np.arange(256, dtype=np.uint8), 2 * len(EDGES))
    model, meta = model_of(residents, load)
    at = np.arange(0, len(residents), 2, dtype=np.int64)
    values = np.tile(np.array(EDGES, dtype=np.uint8), 256)
    applier = Applier(model, prewarm(model, [meta]), index_space=index_space)
    applier.apply([Item.of(meta, Encoding.OVERWRITE, at, values)])
    resident, value, placeholder = z3.BitVecs("resident value placeholder", 8)
    free = free_pattern(values, "U8")
    assert free is not None
    cells = []
    for active in (True, False):
        word = scattered(z3.BoolVal(active), value, placeholder)
        cells.append(overwritten(resident, word, word != placeholder))
    for number, stored in enumerate(copied_words(model.state_dict()["w"]).tolist()):
        known = {"resident": int(residents[number]), "value": int(values[number // 2]), "placeholder": free}
        term = cells[number % 2]
        names = {"resident", "value", "placeholder"} if number % 2 == 0 else {"resident", "placeholder"}
        assert stored == evaluate(term, **{name: known[name] for name in names})
