"""Appendix A.1 condition by condition: one trainer that satisfies it, and one that breaks it and no other."""

from __future__ import annotations

import pytest

from nemo_dcr.testing.source_conformance import SOURCE_CONFORMANCE, SourceConformance

BY_CODE = {row.code: row for row in SOURCE_CONFORMANCE}


def test_there_is_one_pair_for_each_source_condition() -> None:
    assert list(BY_CODE) == [f"SC{number}" for number in range(1, 8)]


@pytest.mark.parametrize("row", BY_CODE.values(), ids=BY_CODE)
def test_the_satisfying_trainer_is_accepted(row: type[SourceConformance]) -> None:
    row().satisfying()


@pytest.mark.parametrize("row", BY_CODE.values(), ids=BY_CODE)
def test_the_breaking_trainer_is_refused_by_its_condition(row: type[SourceConformance]) -> None:
    row().check_breaking()


@pytest.mark.parametrize("row", BY_CODE.values(), ids=BY_CODE)
def test_the_check_fails_for_a_trainer_that_breaks_nothing(
    row: type[SourceConformance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "breaking", row.satisfying)
    with pytest.raises(AssertionError, match="accepted"):
        row().check_breaking()
