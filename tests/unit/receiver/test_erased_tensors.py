"""A loader that erases what it is given, such as a bias that only the first rank of a sum may add."""

from __future__ import annotations

import pytest

from nemo_dcr.codec.records import PathClass
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.testing.loader_conformance import OLD, A, B, Case, replacing_a
from nemo_dcr.testing.refit_outcome import dense_load


def erase(residents, tensor) -> None:
    residents["a"].copy_(tensor.zero_())


def erase_by_fill(residents, tensor) -> None:
    tensor.fill_(2)
    residents["a"].t().copy_(tensor.t())


def erase_half(residents, tensor) -> None:
    tensor[:2].zero_()
    residents["a"].copy_(tensor)


def erase_afterwards(residents, tensor) -> None:
    residents["a"].copy_(tensor)
    tensor.zero_()


def multiply(residents, tensor) -> None:
    residents["a"].copy_(tensor.mul_(0))


@pytest.mark.parametrize("act", [erase, erase_by_fill])
def test_rank_that_erases_a_tensor_skips_it_and_others_take_it(act):
    outcome = Case(more_ranks=(replacing_a(act),)).outcome()
    assert outcome.exact, outcome.detail
    engine = Case(replacing_a(act)).engines()[0]()
    dense_load(engine, (A, B), OLD)
    assert prewarm(engine, (A, B)).classes == {"a": PathClass.SKIPPED, "b": PathClass.XOR}


def test_tensor_that_every_rank_erases_is_refused():
    assert Case(replacing_a(erase)).outcome().refused == "LC3"


@pytest.mark.parametrize("act", [erase_half, erase_afterwards, multiply])
def test_any_other_edit_of_the_given_tensor_stays_refused(act):
    assert Case(more_ranks=(replacing_a(act),)).outcome().refused == "LC5"
