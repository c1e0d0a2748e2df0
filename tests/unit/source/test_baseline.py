"""The baseline moves only in committed steps."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, Version
from nemo_dcr.source.baseline import (
    LOST,
    Baseline,
    BaselineState,
    BaselineTag,
    can_rebuild,
    committed,
    unite_tags,
)

OLD, NEW = np.array([1, 2, 3], dtype="<u2"), np.array([1, 9, 3], dtype="<u2")
V0, V1, V2 = Version(0), Version(1), Version(2)


def captured() -> Baseline:
    baseline = Baseline(["a", "b"])
    for key in baseline:
        baseline.capture(key, OLD, V0)
    return baseline


def test_a_new_baseline_is_lost_until_every_tracker_is_captured() -> None:
    baseline = Baseline(["a", "b"])
    assert baseline.tag == LOST
    baseline.capture("a", OLD, V0)
    assert baseline.tag == LOST
    with pytest.raises(ConditionViolated, match="SC3"):
        baseline.words("b")
    baseline.capture("b", OLD, V0)
    assert baseline.tag == committed(V0)
    assert baseline.nbytes == 12


def test_trackers_are_copies_and_are_updated_in_place() -> None:
    baseline = Baseline(["a"])
    source = OLD.copy()
    baseline.capture("a", source, V0)
    source[0] = 77
    held = baseline.words("a")
    assert held.tolist() == [1, 2, 3]
    baseline.update("a", NEW, V1)
    assert held.tolist() == NEW.tolist()
    assert baseline.words("a") is held


def test_an_interrupted_update_shows_and_can_be_repeated() -> None:
    baseline = captured()
    baseline.update("a", NEW, V1)
    assert baseline.tag == BaselineTag(BaselineState.UPDATING, V1)
    for key in baseline:
        baseline.update(key, NEW, V1)
    assert baseline.tag == committed(V1)
    assert [baseline.words(key).tolist() for key in baseline] == [NEW.tolist()] * 2


def test_repeating_a_finished_update_does_not_take_a_later_candidate() -> None:
    baseline = captured()
    baseline.update("a", NEW, V1)
    baseline.update("a", np.array([5, 5, 5], dtype="<u2"), V1)
    assert baseline.words("a").tolist() == NEW.tolist()


def test_an_update_that_skips_a_version_or_goes_back_is_refused() -> None:
    baseline = captured()
    with pytest.raises(ConditionViolated, match="SC3"):
        baseline.update("a", NEW, V2)
    baseline.update("a", NEW, V1)
    with pytest.raises(ConditionViolated, match="SC3"):
        baseline.update("a", NEW, V0)
    with pytest.raises(ConditionViolated, match="SC3"):
        baseline.update_at("b", np.array([0]), NEW[:1], V2)


def test_a_lost_tracker_becomes_the_committed_candidate_by_a_full_copy_only() -> None:
    baseline = captured()
    baseline.lose()
    assert baseline.nbytes == 0
    with pytest.raises(ConditionViolated, match="changes alone"):
        baseline.update_at("a", np.array([0]), NEW[:1], V1)
    for key in baseline:
        baseline.update(key, NEW, V1)
    assert baseline.tag == committed(V1)


def test_a_candidate_of_another_size_is_refused_and_leaves_the_words() -> None:
    baseline = captured()
    with pytest.raises(ConditionViolated, match="SC4"):
        baseline.update("a", NEW[:2], V1)
    baseline.update("a", NEW, V1)
    assert baseline.words("a").tolist() == NEW.tolist()


def test_sparse_updates_write_the_changes_in_place() -> None:
    baseline = captured()
    baseline.update_at("a", np.array([1]), NEW[1:2], V1)
    assert baseline.words("a").tolist() == NEW.tolist()


def test_a_baseline_is_rebuilt_only_from_a_committed_policy() -> None:
    mine, other = CandidateId("c1"), CandidateId("c0")
    assert can_rebuild(open_candidate=NO_CANDIDATE, committed_candidate=other)
    assert can_rebuild(open_candidate=mine, committed_candidate=mine)
    assert not can_rebuild(open_candidate=mine, committed_candidate=other)
    assert not can_rebuild(open_candidate=mine, committed_candidate=NO_CANDIDATE)


def test_tags_unite_to_the_worst() -> None:
    updating = BaselineTag(BaselineState.UPDATING, V1)
    assert unite_tags([]) is None
    assert unite_tags([committed(V1), committed(V1)]) == committed(V1)
    assert unite_tags([committed(V0), committed(V1)]) == updating
    assert unite_tags([updating, LOST]) == LOST
    assert str(updating) == "updating(1)"
    assert str(LOST) == "lost"
