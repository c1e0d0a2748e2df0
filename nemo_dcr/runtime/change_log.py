"""What changed in each committed version, by tensor: one file of JSON lines for each life of an owner.

The first line says what the owner answers for, each further line tells one version that it took over. Lines are about
commits: a candidate that was given up has none, and of several attempts of one candidate the last complete one counts,
which found the same changes as the others. An owner that compared nothing, because its baseline was lost, says so.
A killed process may leave a torn last line, which is dropped when it is read; a disk that is full ends the file and
not the owner.
Not handled: rates over a time in which an owner was down; its versions are missing.

Paper: Section 1 (Figure 2); Appendix D (N_src, N_chg, D_chg)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import CandidateId, Incarnation, OwnerId, Version
from nemo_dcr.runtime.line_file import LineFile, whole_lines
from nemo_dcr.source.delta import Counts

DIRECTORY = "changes"
"""Where the files lie in a run directory."""


@dataclass(frozen=True, slots=True)
class Holding:
    """The first line of a file."""

    owner: OwnerId
    incarnation: Incarnation
    source_elements: int
    """N_src: unique source elements that it compares."""
    elements: dict[str, int]
    """Canonical elements that it answers for, by canonical name."""


@dataclass(frozen=True, slots=True)
class Changes:
    """One committed version at one owner."""

    version: Version
    candidate: CandidateId
    compared: bool
    """False when everything was sent without a comparison; then nothing below means anything."""
    changed_elements: int
    """N_chg: source elements that changed."""
    changed: dict[str, int]
    """Canonical elements with other bits, by canonical name; tensors without a change are left out."""


class ChangeLog:
    """Appends to the file of one owner's life."""

    def __init__(self, directory: Path, holding: Holding) -> None:
        """Make the file in `directory`, and the directory."""
        self._file = LineFile(directory / f"owner-{holding.owner}-{holding.incarnation}.ndjson", "changes")
        self._file.append(holding)

    def append(self, version: Version, candidate: CandidateId, counts: Counts) -> None:
        """`candidate` is committed as `version`; `counts` are those of its last complete stream."""
        changed = dict(counts.changed_by_tensor) if counts.compared else {}
        row = Changes(version, candidate, counts.compared, counts.changed_elements if counts.compared else 0, changed)
        self._file.append(row)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()


@dataclass(frozen=True, slots=True)
class OwnerChanges:
    """One file."""

    holding: Holding
    versions: Mapping[Version, Changes]


def read_changes(directory: Path) -> list[OwnerChanges]:
    """Every file of a directory, sorted by name.

    Raises: OperatorNeeded when a line but the last of a file is damaged.
    """
    found = []
    for path in sorted(directory.glob("owner-*.ndjson")):
        lines = list(whole_lines(path))
        if not lines:
            continue
        try:
            holding = msgspec.json.decode(lines[0], type=Holding)
            rows = [msgspec.json.decode(line, type=Changes) for line in lines[1:]]
        except msgspec.MsgspecError as problem:
            raise OperatorNeeded(
                f"{path} is damaged: {problem}", "move it away; its owner's figures are lost"
            ) from None
        found.append(OwnerChanges(holding, {row.version: row for row in rows}))
    return found
