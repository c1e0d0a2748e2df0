from __future__ import annotations

import dataclasses

import pytest

from nemo_dcr import control_rules
from nemo_dcr.control.head import CandidateRow, Event, Head, advance, decode, encode, facts_of, first_head
from nemo_dcr.errors import InternalError, OperatorNeeded
from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId
from nemo_dcr.record import AttemptMode, PrepareRequest
from nemo_dcr.testing.control_calls import LIFETIME_S, MEMBERS, OWNERS

NOBODY = CandidateRow()


def prepared() -> tuple[Head, Event]:
    """A head after an epoch and a restore attempt, and the event of the latter."""
    head, _ = advance(
        first_head(), control_rules.decide_acquire_epoch(facts_of(first_head(), NO_ATTEMPT, NOBODY), 0), "a"
    )
    mode = AttemptMode.RESTORE
    request = PrepareRequest(head.epoch, None, NO_CANDIDATE, mode, MEMBERS, OWNERS, LIFETIME_S)
    head, event = advance(head, control_rules.decide_prepare(facts_of(head, NO_ATTEMPT, NOBODY), request, 5.0, 0), "b")
    assert event is not None
    return head, event


def test_head_and_event_read_back_as_they_were_written() -> None:
    head, event = prepared()
    assert decode(encode(head), Head, "here") == head
    assert decode(encode(event), Event, "here") == event
    assert encode(decode(encode(event), Event, "here")) == encode(event)


def test_only_the_latest_attempt_has_a_row() -> None:
    head, event = prepared()
    assert facts_of(head, AttemptId(1), NOBODY).entry == event.entry
    assert facts_of(head, AttemptId(2), NOBODY).entry is None
    assert facts_of(head, NO_ATTEMPT, NOBODY).last == 1


def test_a_change_without_a_journal_line_is_a_fault_of_this_package() -> None:
    head, _ = prepared()
    decision = control_rules.decide_acquire_epoch(facts_of(head, NO_ATTEMPT, NOBODY), 0)
    with pytest.raises(InternalError, match="no journal line"):
        advance(head, dataclasses.replace(decision, journal=None), "c")
    with pytest.raises(InternalError, match="does not follow"):
        advance(dataclasses.replace(head, events=7), decision, "c")


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'{"format":1}', b"\xff", b"{" * 1000])
def test_what_is_no_head_needs_an_operator(content: bytes) -> None:
    with pytest.raises(OperatorNeeded, match="here is no part of a commit record"):
        decode(content, Head, "here")
