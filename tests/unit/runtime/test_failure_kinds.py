"""Kinds of failures: every reason that the attempt machine writes, and every error that fails an attempt, has one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nemo_dcr import errors
from nemo_dcr.protocol import attempt
from nemo_dcr.runtime.failure_kinds import FailureKind, kind_of_failure

PHASE = ", in phase applying"
SENTENCES = {
    "receiver e1/0 is lost: the connection broke": FailureKind.RECEIVER_LOST,
    "owner 0 is lost: silence": FailureKind.OWNER_LOST,
    "receiver e1/0 restarted": FailureKind.RECEIVER_RESTARTED,
    "owner 0 restarted": FailureKind.OWNER_RESTARTED,
    "receiver e1/0 refused: asleep": FailureKind.REFUSED,
    "owner 3 refused: it holds another candidate": FailureKind.REFUSED,
    "receiver e1/0 was prepared for attempt 9": FailureKind.REPLACED,
    "owner 0 was prepared for attempt 9": FailureKind.REPLACED,
    "receiver e1/0: was stopped": FailureKind.REPLACED,
    "owner 0: was stopped": FailureKind.REPLACED,
    "receiver e1/0 acknowledged other payloads than the owners sent": FailureKind.CORRUPT,
    "deadline passed e1/0 (applying)": FailureKind.DEADLINE,
    "abort was requested": FailureKind.ABORTED,
    "receiver e1/0: the engine released its weights": FailureKind.RECEIVER,
    "owner 0: something else": FailureKind.OWNER,
    "": FailureKind.OTHER,
}
ERRORS = {
    errors.ConditionViolated("LC1", "a", "is lost"): FailureKind.CONDITION,
    errors.PayloadCorrupt("1/0/3", "restarted"): FailureKind.CORRUPT,
    errors.PayloadUnsupported("1/0/3", "version 9"): FailureKind.CORRUPT,
    errors.PayloadConflict("1/0/3", "other bytes"): FailureKind.CORRUPT,
    errors.PayloadMissing("1/0/3", "gone"): FailureKind.MISSING,
    errors.PostApplyMismatch("a", 3): FailureKind.CHECK,
    errors.EndpointLost("relay a", "silence"): FailureKind.TRANSPORT,
    errors.TransportFailed("s3", "no route"): FailureKind.TRANSPORT,
    errors.EngineTrouble("vllm", "load", "out of memory"): FailureKind.ENGINE,
    errors.AttemptStopped(3, "cleaned up"): FailureKind.REPLACED,
}


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_sentence_of_the_attempt_machine_has_its_kind(sentence: str) -> None:
    assert kind_of_failure(sentence + PHASE if sentence else "") is SENTENCES[sentence]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_at_an_endpoint_has_its_kind_with_and_without_its_class_in_front(error: Exception) -> None:
    for who in ("receiver engine-7/1", "owner 12"):
        assert kind_of_failure(f"{who}: {error}{PHASE}") is ERRORS[error]
        assert kind_of_failure(f"{who}: {type(error).__name__}: {error}{PHASE}") is ERRORS[error]


def test_every_error_that_fails_an_attempt_is_among_those_above() -> None:
    found, left = set(), [errors.AttemptFailed]
    while left:
        found |= (more := set(left.pop().__subclasses__()))
        left += more
    assert {each for each in found if each.__module__ == errors.__name__} == {type(error) for error in ERRORS}


def test_every_sentence_of_the_attempt_machine_is_among_those_above() -> None:
    tree = ast.parse(Path(attempt.__file__).read_text(encoding="utf-8"))
    given = [
        call.args[1]
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "_fail"
    ]
    assert len(given) >= 12
    for argument in given:
        parts = [argument] if isinstance(argument, ast.Constant) else getattr(argument, "values", [])
        words = [str(part.value).strip() for part in parts if isinstance(part, ast.Constant)]
        words = [word for word in words if word.strip(": ")]
        assert any(all(word in sentence for word in words) for sentence in SENTENCES), words
