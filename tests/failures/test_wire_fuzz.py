"""A short run of the wire fuzzer, in a process of its own with a bound on its memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nemo_dcr.errors import PayloadCorrupt
from nemo_dcr.testing import wire_fuzz


def test_mutated_payloads_end_in_typed_refusals_or_valid_items() -> None:
    command = [sys.executable, "-m", "nemo_dcr.testing.wire_fuzz", "--count", "6000", "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    report = json.loads(done.stdout)
    assert (done.returncode, report["findings"], report["cases"]) == (0, [], 6000)
    assert min(report["outcomes"][kind] for kind in ("PayloadCorrupt", "PayloadUnsupported", "valid")) > 100


def test_a_case_is_a_function_of_seed_and_number_and_every_kind_of_change_is_drawn() -> None:
    bases = wire_fuzz.corpus()
    assert all(wire_fuzz.outcome(base.data) == "valid" for base in bases)
    cases = [wire_fuzz.mutated(3, number, bases) for number in range(70)]
    assert cases == [wire_fuzz.mutated(3, number, bases) for number in range(70)]
    assert len({kind for kind, _ in cases}) == len(wire_fuzz.MUTATIONS)


def _raises(error: BaseException) -> object:
    def decoder(*_: object, **__: object) -> object:
        raise error

    return decoder


def test_any_other_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_fuzz, "verify_payload", _raises(IndexError("out of range")))
    assert "IndexError" in wire_fuzz.run(10, 1, most_findings=1).findings[0]
    monkeypatch.setattr(wire_fuzz, "verify_payload", _raises(MemoryError()))
    assert "MemoryError" in wire_fuzz.run(10, 1, most_findings=1).findings[0]
    monkeypatch.setattr(wire_fuzz, "verify_payload", _raises(PayloadCorrupt("1/0/0", "refused")))
    assert wire_fuzz.run(10, 1).findings == []


def test_a_slow_case_and_a_large_one_are_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_fuzz, "CASE_SECONDS", -1.0)
    assert "case 0" in wire_fuzz.run(1, 1).findings[0]
    monkeypatch.undo()
    monkeypatch.setattr(wire_fuzz, "MEMORY_BYTES", -1)
    assert "grew by" in wire_fuzz.run(1, 1).findings[0]
