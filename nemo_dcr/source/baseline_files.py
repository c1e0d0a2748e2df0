"""The words of one owner's baseline in mapped files, so that they outlive the trainer process.

Files alone prove nothing: a process may have died in the middle of a copy, and the record may have moved on. So a
complete baseline is sealed with the version, the candidate and the digest of its commit record, and with a digest of
every word. The seal is broken before the first word changes. After a restart the files are taken over only when the
seal names what the commit record says now and every digest is that of the words; otherwise the baseline is lost, and
what follows is what follows the loss of one in memory. The record's digest is a chain over all payloads since the first
version, so that files of another run with the same names and numbers are not taken for those of this one.
Not handled: a host that lost power (the digests find out).

Paper: Section 5 (task tracker, residual baseline)   Spec: StartOwner   Decisions: D12   Conditions: SC3
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import CandidateId, OwnerId, Version

SEAL = "sealed.json"


@dataclass(frozen=True, slots=True)
class SealedTracker:
    """One tracker of a sealed baseline."""

    dtype: str
    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Seal:
    """A complete baseline: what it is, and how to recognise it."""

    version: Version
    candidate: CandidateId
    digest: bytes
    """Of the commit record."""
    trackers: dict[str, SealedTracker]


class BaselineFiles:
    """A directory of one owner."""

    def __init__(self, directory: Path | str, owner: OwnerId) -> None:
        """Use `directory`/owner-N, and make it. Raises: InvalidConfig when that is not possible."""
        self._directory = Path(directory) / f"owner-{owner}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise InvalidConfig("baseline.dir", f"{self._directory} cannot be made: {problem}") from problem

    def hold(self, key: str, words: Words) -> Words:
        """A copy of `words` in the file of `key`; writes to it reach the file. An empty tracker has none."""
        if not len(words):
            return np.array(words)
        path = self._file(key)
        temporary = path.with_suffix(f".{os.getpid()}")
        mapped = np.memmap(temporary, dtype=words.dtype, mode="w+", shape=words.shape)
        np.copyto(mapped, words)
        os.replace(temporary, path)
        return mapped

    def seal(self, version: Version, candidate: CandidateId, digest: bytes, trackers: Mapping[str, Words]) -> None:
        """All words are those of the committed `candidate`: say so, after they reached the disk's cache."""
        sealed = {key: _sealed(words) for key, words in trackers.items()}
        temporary = self._directory / f"{SEAL}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(Seal(version, candidate, digest, sealed)))
        os.replace(temporary, self._directory / SEAL)

    def break_seal(self) -> None:
        """The words are about to change. Idempotent."""
        (self._directory / SEAL).unlink(missing_ok=True)

    def recover(
        self, version: Version, candidate: CandidateId, digest: bytes, keys: Iterable[str]
    ) -> dict[str, Words] | None:
        """The words of every key, if they are sealed as what the record says; None otherwise."""
        path = self._directory / SEAL
        try:
            seal = msgspec.json.decode(path.read_bytes(), type=Seal)
        except (OSError, msgspec.DecodeError):
            return None
        wanted = set(keys)
        if (seal.version, seal.candidate, seal.digest) != (version, candidate, digest):
            return None
        if seal.trackers.keys() != wanted:
            return None
        found = {key: self._words(key, tracker) for key, tracker in seal.trackers.items()}
        words = {key: each for key, each in found.items() if each is not None}
        return words if len(words) == len(wanted) else None

    def _words(self, key: str, tracker: SealedTracker) -> Words | None:
        """The mapped words of one key, if they are the sealed ones."""
        if not tracker.count:
            return np.empty(0, dtype=tracker.dtype)
        path, dtype = self._file(key), np.dtype(tracker.dtype)
        if not path.exists() or path.stat().st_size != tracker.count * dtype.itemsize:
            return None
        words = np.memmap(path, dtype=dtype, mode="r+", shape=(tracker.count,))
        return words if _sealed(words) == tracker else None

    def _file(self, key: str) -> Path:
        return self._directory / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.words"


def _sealed(words: Words) -> SealedTracker:
    data = np.ascontiguousarray(words)
    return SealedTracker(words.dtype.str, len(words), blake2b(data.data, digest_size=16).digest())
