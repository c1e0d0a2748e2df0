"""Facts about the coding of locations and values, for an SMT solver: what is coded can be told from everything else.

The chain of one gap is modelled byte by byte: `chain_byte(gap, k)` is byte k of `chain_length(gap)` bytes. Two facts
make a chain of any length uniquely decodable: chains of different gaps differ within the shorter one, and the decoder's
running sum reaches the gap exactly at the one byte that is not 255. Both models are compared with the real encoder and
decoder by the test beside this file.
Not handled: the payload around the locations (golden and fuzz tests).

Paper: Appendix D (gaps, bitmap, byte planes)   Proofs: payload_carries_items
"""

from __future__ import annotations

import itertools

import z3

from model_tests.word_facts import NARROW, Fact

ESCAPE = 255
_LEMMA = "payload_carries_items"


def chain_length(gap: z3.BitVecRef) -> z3.BitVecRef:
    """Bytes in the chain of one gap, in the gap's own width plus eight bits."""
    wide = z3.ZeroExt(8, gap)
    return z3.UDiv(wide, z3.BitVecVal(ESCAPE, wide.size())) + 1


def chain_byte(gap: z3.BitVecRef, k: z3.BitVecRef) -> z3.BitVecRef:
    """Byte `k` of the chain of `gap`; `k` is as wide as the gap plus eight bits and below the length."""
    wide = z3.ZeroExt(8, gap)
    end = z3.URem(wide, z3.BitVecVal(ESCAPE, wide.size()))
    return z3.If(z3.ULT(k, chain_length(gap) - 1), z3.BitVecVal(ESCAPE, 8), z3.Extract(7, 0, end))


def sum_before(gap: z3.BitVecRef, base: z3.BitVecRef, k: z3.BitVecRef) -> z3.BitVecRef:
    """The decoder's running sum before byte `k`, where `base` is the sum at the beginning of the gap."""
    escapes = z3.BitVecVal(ESCAPE, k.size()) * k
    return base + z3.If(z3.ULT(k, chain_length(gap)), escapes, z3.ZeroExt(8, gap))


def bitmap_of(distances: list[z3.BitVecRef]) -> z3.BitVecRef:
    """One bit for each distance, least significant first; as many bits as a distance has."""
    bitmap = z3.BitVecVal(0, distances[0].size())
    for distance in distances:
        bitmap = bitmap | (z3.BitVecVal(1, distance.size()) << distance)
    return bitmap


def gaps_of(indices: list[z3.BitVecRef], unit: int) -> list[z3.BitVecRef]:
    """Differences of neighbours, cut to units of `unit` bits as the wire holds them."""
    return [z3.Extract(unit - 1, 0, right - left) for left, right in itertools.pairwise(indices)]


def indices_from(start: z3.BitVecRef, gaps: list[z3.BitVecRef]) -> list[z3.BitVecRef]:
    """Running sums of the gaps from the start on."""
    indices = [start]
    for gap in gaps:
        indices.append(indices[-1] + z3.ZeroExt(start.size() - gap.size(), gap))
    return indices


def plane_of(word: z3.BitVecRef, byte: int) -> z3.BitVecRef:
    """Byte `byte` of a word, least significant first."""
    return z3.Extract(8 * byte + 7, 8 * byte, word)


def joined(planes: list[z3.BitVecRef]) -> z3.BitVecRef:
    """The word whose bytes are `planes`, least significant first."""
    return planes[0] if len(planes) == 1 else z3.Concat(*reversed(planes))


# ------------------------------------------------------------------------------------------------------ gap chain


def chains_of_different_gaps_differ_within_the_shorter(bits: int) -> z3.BoolRef:
    """No chain is another one or begins with another one: the coding is injective, also for chains in a row."""
    one, other = z3.BitVec("one", bits), z3.BitVec("other", bits)
    lengths = chain_length(one), chain_length(other)
    last = z3.If(z3.ULT(*lengths), *lengths) - 1
    return z3.Implies(one != other, chain_byte(one, last) != chain_byte(other, last))


def _ends_tell_gaps_apart(bits: int) -> z3.BoolRef:
    one, other = z3.BitVec("one", bits), z3.BitVec("other", bits)
    ends = [chain_byte(gap, chain_length(gap) - 1) for gap in (one, other)]
    return z3.Implies(one != other, ends[0] != ends[1])


def decoder_sums_a_chain_to_its_gap(bits: int) -> z3.BoolRef:
    """One step of the decoder: the sum before byte k becomes the sum after it; the gap ends iff the byte is not 255.

    By induction over k and over the gaps of a chain, decoding gives back the gaps that were coded.
    """
    gap, base, k = z3.BitVec("gap", bits), z3.BitVec("base", bits + 8), z3.BitVec("k", bits + 8)
    byte = chain_byte(gap, k)
    after = sum_before(gap, base, k) + z3.ZeroExt(bits, byte)
    ends = byte != ESCAPE
    step = z3.And(after == sum_before(gap, base, k + 1), ends == (k == chain_length(gap) - 1))
    return z3.Implies(z3.ULT(k, chain_length(gap)), step)


def _decoder_sums_beyond_a_chain(bits: int) -> z3.BoolRef:
    gap, base, k = z3.BitVec("gap", bits), z3.BitVec("base", bits + 8), z3.BitVec("k", bits + 8)
    after = sum_before(gap, base, k) + z3.ZeroExt(bits, chain_byte(gap, k))
    return after == sum_before(gap, base, k + 1)


def a_zero_byte_only_follows_an_escape(bits: int) -> z3.BoolRef:
    """Gaps of at least one never make the decoder refuse a repeated location."""
    gap, k = z3.BitVec("gap", bits), z3.BitVec("k", bits + 8)
    zero = z3.And(z3.ULT(k, chain_length(gap)), chain_byte(gap, k) == 0)
    return z3.Implies(z3.And(gap != 0, zero), z3.And(k != 0, chain_byte(gap, k - 1) == ESCAPE))


def _zero_gaps_look_like_others(bits: int) -> z3.BoolRef:
    gap, k = z3.BitVec("gap", bits), z3.BitVec("k", bits + 8)
    zero = z3.And(z3.ULT(k, chain_length(gap)), chain_byte(gap, k) == 0)
    return z3.Implies(zero, z3.And(k != 0, chain_byte(gap, k - 1) == ESCAPE))


# ------------------------------------------------------------------------------------- plain gaps, bitmap, planes


def gaps_that_fit_give_the_indices_back(bits: int) -> z3.BoolRef:
    """Increasing indices whose gaps fit the unit come back from start and gaps (here four, twice as wide)."""
    indices = [z3.BitVec(f"i{number}", 2 * bits) for number in range(4)]
    pairs = list(itertools.pairwise(indices))
    increasing = [z3.ULT(left, right) for left, right in pairs]
    fits = [z3.ULT(right - left, z3.BitVecVal(1 << bits, 2 * bits)) for left, right in pairs]
    again = indices_from(indices[0], gaps_of(indices, bits))
    same = z3.And(*[left == right for left, right in zip(indices, again, strict=True)])
    return z3.Implies(z3.And(*increasing, *fits), same)


def _any_gaps_give_the_indices_back(bits: int) -> z3.BoolRef:
    indices = [z3.BitVec(f"i{number}", 2 * bits) for number in range(4)]
    increasing = [z3.ULT(left, right) for left, right in itertools.pairwise(indices)]
    again = indices_from(indices[0], gaps_of(indices, bits))
    return z3.Implies(z3.And(*increasing), z3.And(*[left == right for left, right in zip(indices, again, strict=True)]))


def bitmaps_of_different_sets_differ(bits: int) -> z3.BoolRef:
    """Two sorted lists of three distances inside the span with one bitmap are the same list."""
    return _bitmaps_tell_lists_apart(bits, in_order=True)


def _bitmaps_of_unsorted_lists_differ(bits: int) -> z3.BoolRef:
    return _bitmaps_tell_lists_apart(bits, in_order=False)


def _bitmaps_tell_lists_apart(bits: int, *, in_order: bool) -> z3.BoolRef:
    one = [z3.BitVec(f"one{number}", bits) for number in range(3)]
    other = [z3.BitVec(f"other{number}", bits) for number in range(3)]
    rules = [z3.ULT(distance, bits) for distance in (*one, *other)]
    for each in (one, other) if in_order else ():
        rules += [z3.ULT(left, right) for left, right in itertools.pairwise(each)]
    same = z3.And(*[left == right for left, right in zip(one, other, strict=True)])
    return z3.Implies(z3.And(*rules, bitmap_of(one) == bitmap_of(other)), same)


def planes_give_the_word_back(bits: int) -> z3.BoolRef:
    """Byte planes permute bytes: joined in order they are the word."""
    word = z3.BitVec("word", bits)
    return joined([plane_of(word, byte) for byte in range(bits // 8)]) == word


def _planes_in_any_order(bits: int) -> z3.BoolRef:
    word = z3.BitVec("word", bits)
    return joined([plane_of(word, byte) for byte in reversed(range(bits // 8))]) == word


LOCATION_FACTS = (
    Fact(chains_of_different_gaps_differ_within_the_shorter, _LEMMA, NARROW, _ends_tell_gaps_apart),
    Fact(decoder_sums_a_chain_to_its_gap, _LEMMA, NARROW, _decoder_sums_beyond_a_chain),
    Fact(a_zero_byte_only_follows_an_escape, _LEMMA, NARROW, _zero_gaps_look_like_others),
    Fact(gaps_that_fit_give_the_indices_back, _LEMMA, (8, 16, 32), _any_gaps_give_the_indices_back),
    Fact(bitmaps_of_different_sets_differ, _LEMMA, NARROW, _bitmaps_of_unsorted_lists_differ),
    Fact(planes_give_the_word_back, _LEMMA, (16, 32, 64), _planes_in_any_order),
)
