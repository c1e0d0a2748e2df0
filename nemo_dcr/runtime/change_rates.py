"""Change rates of a run by kind of tensor, from what its owners wrote (Figure 2 of the paper).

A kind is a canonical name with its numbers left out, so that the same projection of all layers is one row. A
rate is changed canonical elements over all elements of the kind. A version that an owner did not compare, or did not
live to see, has no rate.
Not handled: reading the files (see change_log).

Paper: Section 1 (Figure 2); Appendix D (N_src, N_chg)
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.runtime.change_log import OwnerChanges

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class VersionRates:
    """What one committed version changed."""

    version: Version
    candidate: str
    changed_elements: int
    """N_chg: source elements."""
    source_elements: int
    """N_src."""
    kinds: dict[str, int]
    """Changed canonical elements by kind; all kinds are there."""
    missing: tuple[OwnerId, ...]
    """Owners without figures; the numbers above are without them, and there is no rate."""


@dataclass(frozen=True, slots=True)
class RunRates:
    """What the owners of a run wrote."""

    elements: dict[str, int]
    """Canonical elements by kind, sorted."""
    versions: tuple[VersionRates, ...]


def kind_of(name: str) -> str:
    """A canonical name with its numbers left out."""
    return _NUMBER.sub("*", name)


def run_rates(files: Iterable[OwnerChanges]) -> RunRates:
    """Unite the files of all owners; of several lives of an owner the latest one that has a version counts."""
    lives: dict[OwnerId, list[OwnerChanges]] = defaultdict(list)
    for file in sorted(files, key=lambda file: file.holding.incarnation, reverse=True):
        lives[file.holding.owner].append(file)
    elements: Counter[str] = Counter()
    for files_of_owner in lives.values():
        for name, count in files_of_owner[0].holding.elements.items():
            elements[kind_of(name)] += count
    versions = sorted({version for each in lives.values() for file in each for version in file.versions})
    return RunRates(dict(sorted(elements.items())), tuple(_version(version, lives, elements) for version in versions))


def _version(version: Version, lives: dict[OwnerId, list[OwnerChanges]], elements: Iterable[str]) -> VersionRates:
    kinds, changed, source, missing, candidate = Counter(dict.fromkeys(elements, 0)), 0, 0, [], ""
    for owner, files in sorted(lives.items()):
        file = next((file for file in files if version in file.versions), None)
        if file is None or not file.versions[version].compared:
            missing.append(owner)
            continue
        row = file.versions[version]
        candidate = row.candidate
        changed += row.changed_elements
        source += file.holding.source_elements
        for name, count in row.changed.items():
            kinds[kind_of(name)] += count
    return VersionRates(version, candidate, changed, source, dict(sorted(kinds.items())), tuple(missing))


def rate(changed: int, elements: int, row: VersionRates) -> float | None:
    """A fraction; None where it is not known."""
    return changed / elements if elements and not row.missing else None
