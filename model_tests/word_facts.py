"""Facts about single stored words on which the lemmas of PROOFS.md rest, for an SMT solver.

Each function states one fact about words of `bits` bits; its variables stand for every pattern. A fact comes with the
same claim less its one condition, which must be false: the condition is needed, and the solver can say no.
What is modelled is what the placer does to one cell: XOR adds the scratch word, overwrite stores where the mask is
true. A loader's transform is an unknown function of one word, so a fact holds for every transform.
Not handled: which cell an element goes to (N1, N2 in PROOFS.md); location coding (location_facts).

Paper: Section 6.1; Appendix A   Proofs: change_detection_complete, xor_reconstructs, inactive_unchanged,
overwrite_supplies, loader_commutes, dedup_once, retry_repairs   Conditions: LC4, LC5, LC6, LC7, LC8
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import z3

Claim = Callable[[int], z3.BoolRef]

NARROW = (8, 16)
ALL = (8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Fact:
    """One claim about words, and the claim that is left when its condition is dropped."""

    claim: Claim
    lemma: str
    """Slug in PROOFS.md."""
    widths: tuple[int, ...]
    """Bits of a word at which it is proved."""
    without_condition: Claim
    """Must have a counterexample."""

    @property
    def name(self) -> str:
        """Name of the fact: that of the function that states it."""
        return self.claim.__name__


def xor_applied(resident: z3.BitVecRef, scratch: z3.BitVecRef) -> z3.BitVecRef:
    """What the XOR path leaves in a cell."""
    return resident ^ scratch


def overwritten(resident: z3.BitVecRef, word: z3.BitVecRef, mask: z3.BoolRef) -> z3.BitVecRef:
    """What the overwrite path leaves in a cell."""
    return z3.If(mask, word, resident)


def scattered(active: z3.BoolRef, value: z3.BitVecRef, placeholder: z3.BitVecRef) -> z3.BitVecRef:
    """The scratch word at a position: the item's value, or the placeholder where the item has no entry."""
    return z3.If(active, value, placeholder)


def _words(names: str, bits: int) -> list[z3.BitVecRef]:
    return [z3.BitVec(name, bits) for name in names.split()]


def _flag(name: str) -> z3.BoolRef:
    return z3.Bool(name)


def _transform(name: str, bits: int) -> z3.FuncDeclRef:
    return z3.Function(name, z3.BitVecSort(bits), z3.BitVecSort(bits))


# ------------------------------------------------------------------------------------------------- comparing (L1)


def mask_is_zero_exactly_where_nothing_changed(bits: int) -> z3.BoolRef:
    """The XOR of two words is zero iff they are the same pattern: a difference of bits is never lost."""
    old, new = _words("old new", bits)
    return (old ^ new == 0) == (old == new)


def _numbers_tell_changes_apart(bits: int) -> z3.BoolRef:
    """Comparing numbers instead of patterns: 0.0 and -0.0 are equal, a NaN differs from itself."""
    old, new = _words("old new", bits)
    sort = {8: z3.FPSort(5, 3), 16: z3.FPSort(8, 8), 32: z3.Float32(), 64: z3.Float64()}[bits]
    return z3.fpEQ(z3.fpBVToFP(old, sort), z3.fpBVToFP(new, sort)) == (old == new)


# ------------------------------------------------------------------------------------------------------- XOR (L4)


def xor_reconstructs_the_new_word(bits: int) -> z3.BoolRef:
    """On storage that holds the old word, the mask leads to the new one."""
    old, new, resident = _words("old new resident", bits)
    return z3.Implies(resident == old, xor_applied(resident, old ^ new) == new)


def _xor_on_any_storage(bits: int) -> z3.BoolRef:
    old, new, resident = _words("old new resident", bits)
    return xor_applied(resident, old ^ new) == new


def xor_twice_brings_the_old_word_back(bits: int) -> z3.BoolRef:
    """A payload that is applied twice undoes itself: this is why payloads are deduplicated."""
    old, new = _words("old new", bits)
    twice = xor_applied(xor_applied(old, old ^ new), old ^ new)
    return twice == old


def _xor_twice_is_harmless(bits: int) -> z3.BoolRef:
    old, new = _words("old new", bits)
    return xor_applied(xor_applied(old, old ^ new), old ^ new) == new


def two_xor_items_reach_a_cell_only_apart(bits: int) -> z3.BoolRef:
    """Of two masks that meet in a cell, at most one may change it if each is to leave its own new word (LC6)."""
    old, first, second = _words("old first second", bits)
    both = xor_applied(xor_applied(old, old ^ first), old ^ second)
    return z3.Implies(z3.Or(first == old, second == old), z3.Or(both == first, both == second))


def _two_xor_items_may_meet(bits: int) -> z3.BoolRef:
    old, first, second = _words("old first second", bits)
    both = xor_applied(xor_applied(old, old ^ first), old ^ second)
    return z3.Or(both == first, both == second)


# --------------------------------------------------------------------------------------- inactive positions (L5)


def zero_mask_changes_nothing(bits: int) -> z3.BoolRef:
    """XOR: an inactive position holds zero in the scratch, and its cell keeps every bit."""
    resident, mask = _words("resident mask", bits)
    active = _flag("active")
    zero = z3.BitVecVal(0, bits)
    return z3.Implies(z3.Not(active), xor_applied(resident, scattered(active, mask, zero)) == resident)


def _any_placeholder_suits_xor(bits: int) -> z3.BoolRef:
    resident, mask, placeholder = _words("resident mask placeholder", bits)
    active = _flag("active")
    return z3.Implies(z3.Not(active), xor_applied(resident, scattered(active, mask, placeholder)) == resident)


def placeholder_marks_exactly_the_inactive(bits: int) -> z3.BoolRef:
    """Overwrite: with a placeholder that no value equals, "differs from it" is exactly "has an entry"."""
    value, placeholder = _words("value placeholder", bits)
    active = _flag("active")
    differs = scattered(active, value, placeholder) != placeholder
    return z3.Implies(value != placeholder, differs == active)


def _any_placeholder_marks(bits: int) -> z3.BoolRef:
    value, placeholder = _words("value placeholder", bits)
    active = _flag("active")
    return (scattered(active, value, placeholder) != placeholder) == active


def two_passes_mark_exactly_the_active(bits: int) -> z3.BoolRef:
    """Two placeholders that the path maps to different words: equal sources are exactly the active positions.

    Nothing is asked of the value, so this serves one-byte items that hold every pattern as well.
    """
    value, first, second = _words("value first second", bits)
    active, path = _flag("active"), _transform("path", bits)
    repeats = path(scattered(active, value, first)) == path(scattered(active, value, second))
    return z3.Implies(path(first) != path(second), repeats == active)


def _two_passes_with_any_placeholders(bits: int) -> z3.BoolRef:
    value, first, second = _words("value first second", bits)
    active, path = _flag("active"), _transform("path", bits)
    repeats = path(scattered(active, value, first)) == path(scattered(active, value, second))
    return z3.Implies(first != second, repeats == active)


def one_more_pattern_than_values_leaves_one_free(bits: int) -> z3.BoolRef:
    """Among n + 1 different patterns, one is none of n values: the search for a placeholder ends (here n = 3)."""
    values, patterns = _words("v0 v1 v2", bits), _words("p0 p1 p2 p3", bits)
    free = [z3.And(*[pattern != value for value in values]) for pattern in patterns]
    return z3.Implies(z3.Distinct(*patterns), z3.Or(*free))


def _as_many_patterns_as_values(bits: int) -> z3.BoolRef:
    values, patterns = _words("v0 v1 v2", bits), _words("p0 p1 p2", bits)
    free = [z3.And(*[pattern != value for value in values]) for pattern in patterns]
    return z3.Implies(z3.Distinct(*patterns), z3.Or(*free))


def first_gap_from_the_top(values: list[z3.BitVecRef]) -> z3.BitVecRef:
    """The search of `free_pattern` for wide words: counting down from the largest word, the first that is missing.

    `values` are sorted, largest first, without repetition.
    """
    bits = values[0].size()
    found = z3.BitVecVal((1 << bits) - 1 - len(values), bits)
    for number, value in reversed(list(enumerate(values))):
        expected = z3.BitVecVal((1 << bits) - 1 - number, bits)
        found = z3.If(value != expected, expected, found)
    return found


def counting_down_finds_a_free_pattern(bits: int) -> z3.BoolRef:
    """Over sorted distinct values (here four), the first gap from the top is none of them."""
    values = _words("v0 v1 v2 v3", bits)
    sorted_down = [z3.UGT(high, low) for high, low in itertools.pairwise(values)]
    return z3.Implies(z3.And(*sorted_down), z3.And(*[first_gap_from_the_top(values) != value for value in values]))


def _counting_down_over_any_order(bits: int) -> z3.BoolRef:
    values = _words("v0 v1 v2 v3", bits)
    return z3.And(*[first_gap_from_the_top(values) != value for value in values])


# ------------------------------------------------------------------------------------------------- overwrite (L6)


def overwrite_supplies_the_word_over_anything(bits: int) -> z3.BoolRef:
    """An active cell ends with the path's word of the new value, whatever it held."""
    resident, value, placeholder = _words("resident value placeholder", bits)
    active, path = _flag("active"), _transform("path", bits)
    stored = overwritten(resident, path(scattered(active, value, placeholder)), active)
    return z3.Implies(active, stored == path(value))


def _overwrite_supplies_everywhere(bits: int) -> z3.BoolRef:
    resident, value, placeholder = _words("resident value placeholder", bits)
    active, path = _flag("active"), _transform("path", bits)
    return overwritten(resident, path(scattered(active, value, placeholder)), active) == path(value)


def overwrite_is_idempotent(bits: int) -> z3.BoolRef:
    """The same item again changes nothing: overwrite items may be repeated."""
    resident, value, again = _words("resident value again", bits)
    active = _flag("active")
    once = overwritten(resident, value, active)
    return z3.Implies(again == value, overwritten(once, again, active) == once)


def _any_overwrite_is_idempotent(bits: int) -> z3.BoolRef:
    resident, value, again = _words("resident value again", bits)
    active = _flag("active")
    once = overwritten(resident, value, active)
    return overwritten(once, again, active) == once


def first_copy_mask_serves_the_second_copy(bits: int) -> z3.BoolRef:
    """A loader that stores a raw word and then a function of it: with the mask of the first copy for both copies, an
    active cell ends as in a dense load and an inactive one is untouched.
    """
    resident, value, placeholder = _words("resident value placeholder", bits)
    active, raw, cooked = _flag("active"), _transform("raw", bits), _transform("cooked", bits)
    word = scattered(active, value, placeholder)
    mask = word != placeholder
    first = overwritten(resident, raw(word), mask)
    second = overwritten(first, cooked(first), mask)
    dense = cooked(raw(value))
    return z3.Implies(value != placeholder, second == z3.If(active, dense, resident))


def _each_copy_makes_its_own_mask(bits: int) -> z3.BoolRef:
    resident, value, placeholder = _words("resident value placeholder", bits)
    active, raw, cooked = _flag("active"), _transform("raw", bits), _transform("cooked", bits)
    word = scattered(active, value, placeholder)
    first = overwritten(resident, raw(word), word != placeholder)
    second = overwritten(first, cooked(first), cooked(first) != placeholder)
    return z3.Implies(value != placeholder, second == z3.If(active, cooked(raw(value)), resident))


# ------------------------------------------------------------------------------------------ all items (L7, L11)


def agreeing_overwrites_commute(bits: int) -> z3.BoolRef:
    """Overwrites that meet in a cell and agree leave the same word in either order (LC7)."""
    resident, one, other = _words("resident one other", bits)
    left, right = _flag("left"), _flag("right")
    forth = overwritten(overwritten(resident, one, left), other, right)
    back = overwritten(overwritten(resident, other, right), one, left)
    return z3.Implies(one == other, forth == back)


def _any_overwrites_commute(bits: int) -> z3.BoolRef:
    resident, one, other = _words("resident one other", bits)
    left, right = _flag("left"), _flag("right")
    forth = overwritten(overwritten(resident, one, left), other, right)
    return forth == overwritten(overwritten(resident, other, right), one, left)


def overwrite_retry_repairs_any_mixture(bits: int) -> z3.BoolRef:
    """Reached cells may hold anything, others hold the old word: overwriting every changed word gives the new one."""
    old, new, resident = _words("old new resident", bits)
    changed = old != new
    return z3.Implies(z3.Or(changed, resident == old), overwritten(resident, new, changed) == new)


def _overwrite_retry_repairs_another_candidate(bits: int) -> z3.BoolRef:
    """After a part of another candidate (D8): words that only that one changed are not in the retry."""
    old, other, new = _words("old other new", bits)
    resident = z3.If(_flag("written"), other, old)
    return overwritten(resident, new, old != new) == new


def xor_after_a_mixture_is_exact_only_on_old_words(bits: int) -> z3.BoolRef:
    """Over a mixture, XOR gives the new word exactly where the old one stood: no XOR retry (D9)."""
    old, new = _words("old new", bits)
    written = _flag("written")
    resident = z3.If(written, new, old)
    exact = xor_applied(resident, old ^ new) == new
    return exact == z3.Or(z3.Not(written), old == new)


def _xor_retry_repairs_a_mixture(bits: int) -> z3.BoolRef:
    old, new = _words("old new", bits)
    return xor_applied(z3.If(_flag("written"), new, old), old ^ new) == new


WORD_FACTS = (
    Fact(mask_is_zero_exactly_where_nothing_changed, "change_detection_complete", ALL, _numbers_tell_changes_apart),
    Fact(xor_reconstructs_the_new_word, "xor_reconstructs", ALL, _xor_on_any_storage),
    Fact(xor_twice_brings_the_old_word_back, "dedup_once", ALL, _xor_twice_is_harmless),
    Fact(two_xor_items_reach_a_cell_only_apart, "xor_reconstructs", ALL, _two_xor_items_may_meet),
    Fact(zero_mask_changes_nothing, "inactive_unchanged", ALL, _any_placeholder_suits_xor),
    Fact(placeholder_marks_exactly_the_inactive, "inactive_unchanged", ALL, _any_placeholder_marks),
    Fact(two_passes_mark_exactly_the_active, "inactive_unchanged", ALL, _two_passes_with_any_placeholders),
    Fact(one_more_pattern_than_values_leaves_one_free, "inactive_unchanged", ALL, _as_many_patterns_as_values),
    Fact(counting_down_finds_a_free_pattern, "inactive_unchanged", ALL, _counting_down_over_any_order),
    Fact(overwrite_supplies_the_word_over_anything, "overwrite_supplies", ALL, _overwrite_supplies_everywhere),
    Fact(overwrite_is_idempotent, "overwrite_supplies", ALL, _any_overwrite_is_idempotent),
    Fact(first_copy_mask_serves_the_second_copy, "overwrite_supplies", ALL, _each_copy_makes_its_own_mask),
    Fact(agreeing_overwrites_commute, "loader_commutes", ALL, _any_overwrites_commute),
    Fact(overwrite_retry_repairs_any_mixture, "retry_repairs", ALL, _overwrite_retry_repairs_another_candidate),
    Fact(xor_after_a_mixture_is_exact_only_on_old_words, "retry_repairs", ALL, _xor_retry_repairs_a_mixture),
)
