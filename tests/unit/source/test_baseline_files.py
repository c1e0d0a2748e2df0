"""A baseline in mapped files outlives its process exactly when it is complete, unchanged, and what the record says."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import NO_CANDIDATE, AttemptId, CandidateId, OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.baseline_files import SEAL, BaselineFiles
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.testing.local_source import LocalSource

OWNER, FIRST, SECOND = OwnerId(0), CandidateId("c1"), CandidateId("c2")
DIGESTS = {FIRST: b"of the first", SECOND: b"of the second", NO_CANDIDATE: b"of none"}
TENSORS = (
    TensorMeta("a", (8, 4), "BF16"),
    TensorMeta("b", (40,), "F32"),
    TensorMeta("c", (), "F16"),
    TensorMeta("d", (0, 3), "I64"),
)


def started(directory: Path, residual: bool = False) -> tuple[LocalSource, DeltaOwner]:
    """A process that begins: its weights, and its owned tasks without a baseline."""
    source = LocalSource(TENSORS, seed=5, residual=residual)
    source.draw(FIRST, NO_CANDIDATE, 0.5)
    source.draw(SECOND, FIRST, 0.5)
    return source, source.ranks[OWNER].new_delta(BaselineFiles(directory, OWNER))


def held(delta: DeltaOwner) -> list[tuple[str, bytes]]:
    return [(f"{tensor.name} {box.label}", words.tobytes()) for tensor, box, words in delta.tracker_words()]


def at_version_1(directory: Path, residual: bool = False) -> list[tuple[str, bytes]]:
    """A first process brings its baseline to version 1, seals it, and is gone; what it held."""
    source, delta = started(directory, residual)
    delta.capture(Version(0))
    move(source, delta, FIRST, 1)
    return held(delta)


def move(source: LocalSource, delta: DeltaOwner, candidate: CandidateId, version: int) -> None:
    """One transition: a stream, the commit, the update of the baseline, the seal."""
    source.ranks[OWNER].load(candidate)
    assert list(delta.stream(AttemptMode.OVERWRITE, {}, attempt=AttemptId(version)))
    delta.update_baseline(Version(version))
    delta.seal(candidate, DIGESTS[candidate])


@pytest.mark.parametrize("residual", [False, True])
def test_a_sealed_baseline_comes_back_bit_for_bit_and_goes_on(tmp_path: Path, residual: bool) -> None:
    before = at_version_1(tmp_path, residual)
    source, delta = started(tmp_path, residual)
    assert delta.recover(Version(1), FIRST, DIGESTS[FIRST])
    assert held(delta) == before
    move(source, delta, SECOND, 2)
    after = held(delta)
    assert after != before
    _, third = started(tmp_path, residual)
    assert not third.recover(Version(1), FIRST, DIGESTS[FIRST])
    assert third.recover(Version(2), SECOND, DIGESTS[SECOND])
    assert held(third) == after


@pytest.mark.parametrize(("version", "candidate"), [(0, FIRST), (2, FIRST), (1, SECOND), (1, NO_CANDIDATE)])
def test_files_of_another_version_or_candidate_than_the_record_are_not_taken(
    tmp_path: Path, version: int, candidate: CandidateId
) -> None:
    at_version_1(tmp_path)
    _, delta = started(tmp_path)
    assert not delta.recover(Version(version), candidate, DIGESTS[candidate])
    assert str(delta.tag) == "lost"


def test_files_of_another_run_with_the_same_names_and_numbers_are_not_taken(tmp_path: Path) -> None:
    at_version_1(tmp_path)
    _, delta = started(tmp_path)
    assert not delta.recover(Version(1), FIRST, b"of another run")
    assert not delta.recover(Version(1), FIRST, b"")
    assert delta.recover(Version(1), FIRST, DIGESTS[FIRST])


def test_a_baseline_without_the_digest_of_a_record_is_not_sealed(tmp_path: Path) -> None:
    _, delta = started(tmp_path)
    delta.capture(Version(0))
    delta.seal(NO_CANDIDATE, b"")
    assert not (tmp_path / f"owner-{OWNER}" / SEAL).exists()
    assert not started(tmp_path)[1].recover(Version(0), NO_CANDIDATE, b"")


def test_one_changed_bit_a_short_file_or_a_missing_one_loses_the_baseline(tmp_path: Path) -> None:
    for change in ("bit", "short", "missing"):
        at_version_1(tmp_path / change)
        (path, *_) = sorted((tmp_path / change / "owner-0").glob("*.words"))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.unlink()
        if change != "missing":
            path.write_bytes(bytes(data) if change == "bit" else bytes(data[:-1]))
        _, delta = started(tmp_path / change)
        assert not delta.recover(Version(1), FIRST, DIGESTS[FIRST]), change


def test_a_process_that_dies_inside_an_update_leaves_no_baseline(tmp_path: Path) -> None:
    """The seal is broken before the first word changes, so neither version is claimed."""
    at_version_1(tmp_path)
    source, delta = started(tmp_path)
    assert delta.recover(Version(1), FIRST, DIGESTS[FIRST])
    source.ranks[OWNER].load(SECOND)

    def die(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        delta.update_baseline(Version(2), die)
    for version, candidate in ((1, FIRST), (2, SECOND)):
        assert not started(tmp_path)[1].recover(Version(version), candidate, DIGESTS[candidate])


def test_a_lost_baseline_and_a_new_capture_break_the_seal(tmp_path: Path) -> None:
    for number, change in enumerate((DeltaOwner.lose_baseline, lambda delta: delta.capture(Version(0)))):
        directory = tmp_path / str(number)
        at_version_1(directory)
        assert (directory / "owner-0" / SEAL).exists()
        change(started(directory)[1])
        assert not (directory / "owner-0" / SEAL).exists()


def test_a_baseline_that_is_not_complete_is_not_sealed(tmp_path: Path) -> None:
    _, delta = started(tmp_path)
    delta.seal(FIRST, DIGESTS[FIRST])
    assert not (tmp_path / "owner-0" / SEAL).exists()


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match=r"baseline\.dir"):
        BaselineFiles(tmp_path / "file", OWNER)
