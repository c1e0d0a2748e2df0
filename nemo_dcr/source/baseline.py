"""The committed source baseline B^v in host memory: one tracker of flat words for each key, with a version tag.

A tracker is `committed(v)`, `updating(v)` while v is copied over it, or `lost`. It changes only after the joint commit
of v, in place and tracker by tracker; an interrupted update is repeated and ends in the same bits, because it copies
the whole frozen candidate. The same copy turns a lost tracker into the committed version, which is the only way to
rebuild one: never from a candidate that is not committed.
Not handled: durability (a crashed owner starts with lost trackers, unless baseline_files kept them); whether a commit
happened (the caller knows).

Paper: Section 5 (task tracker, residual baseline); Figure B.3   Spec: UpdateBaseline, CopyItem, RebuildBaseline
Proofs: baseline_follows_commit   Conditions: SC3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, Version
from nemo_dcr.kernels import hot
from nemo_dcr.kernels.plain import Indices


class BaselineState(StrEnum):
    """What a tracker holds."""

    COMMITTED = "committed"
    UPDATING = "updating"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class BaselineTag:
    """State and version of a tracker, or of a whole baseline."""

    state: BaselineState
    version: Version | None
    """None when lost."""

    def __str__(self) -> str:
        return str(self.state) if self.version is None else f"{self.state}({self.version})"


LOST = BaselineTag(BaselineState.LOST, None)


def committed(version: Version) -> BaselineTag:
    """The tag of a tracker that holds `version`."""
    return BaselineTag(BaselineState.COMMITTED, version)


def unite_tags(tags: Iterable[BaselineTag]) -> BaselineTag | None:
    """The tag of several trackers together; None for no tracker.

    Lost if any is lost. Different versions or an update in progress give `updating` the newest version.
    """
    found = set(tags)
    if not found:
        return None
    if any(tag.version is None for tag in found):
        return LOST
    if len(found) == 1:
        return found.pop()
    newest = max(tag.version for tag in found if tag.version is not None)
    return BaselineTag(BaselineState.UPDATING, newest)


def can_rebuild(*, open_candidate: CandidateId, committed_candidate: CandidateId) -> bool:
    """May resident weights become the baseline of the committed version (D12)?

    Yes without a transition, when they are the committed version, and after the commit of the open candidate.
    """
    return open_candidate in (NO_CANDIDATE, committed_candidate)


Copied = Callable[[str], object]
"""Told the name of a canonical tensor once all that an owner holds of it is at the new version. It is called from the
copying thread, between two copies; what it raises ends the copy, which can be repeated."""


Hold = Callable[[str, Words], Words]
"""Makes the copy of a tracker's words that the baseline keeps."""


def untold(name: str) -> None:
    """Nobody wants to know."""


class Baseline:
    """Trackers by key. All keys exist from the start and are lost until captured or updated."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tags: dict[str, BaselineTag] = dict.fromkeys(keys, LOST)
        self._words: dict[str, Words] = {}
        self._hold: Hold = lambda key, words: np.array(words)

    def keep_in(self, hold: Hold) -> None:
        """From now on a tracker that is made lies where `hold` puts it."""
        self._hold = hold

    def adopt(self, key: str, words: Words, version: Version) -> None:
        """Take words that lie where this baseline keeps them, and are proved to be `version`."""
        self._words[key] = words
        self._tags[key] = committed(version)

    def __iter__(self) -> Iterator[str]:
        """Keys in the order in which they were given."""
        return iter(self._tags)

    @property
    def tag(self) -> BaselineTag | None:
        """The tag of all trackers together; None when there is no tracker."""
        return unite_tags(self._tags.values())

    @property
    def nbytes(self) -> int:
        """Host bytes of all trackers."""
        return sum(words.nbytes for words in self._words.values())

    def tag_of(self, key: str) -> BaselineTag:
        """The tag of one tracker."""
        return self._tags[key]

    def words(self, key: str) -> Words:
        """The words of one committed tracker; the caller does not write to them.

        Raises: ConditionViolated (SC3) while the tracker is lost or being updated.
        """
        tag = self._tags[key]
        if tag.state is not BaselineState.COMMITTED:
            raise ConditionViolated("SC3", key, f"the tracker is {tag}; finish the update or rebuild it")
        return self._words[key]

    def lose(self) -> None:
        """Drop every tracker, as after a crash of the owner."""
        self._tags = dict.fromkeys(self._tags, LOST)
        self._words.clear()

    def capture(self, key: str, words: Words, version: Version) -> None:
        """Take a copy of `words`, which are version `version`, whatever the tracker held."""
        self._tags[key] = LOST
        self._words[key] = self._hold(key, words)
        self._tags[key] = committed(version)

    def update(self, key: str, words: Words, version: Version) -> None:
        """Copy the committed candidate's `words` over the tracker, in place. Repeatable.

        Raises: ConditionViolated (SC3) unless the tracker is lost, at version - 1 or in this update;
        ConditionViolated (SC4) when width or length changed.
        """
        if not self._begin(key, version):
            return
        held = self._words.get(key)
        if held is None:
            self._words[key] = self._hold(key, words)
        elif held.dtype != words.dtype or held.shape != words.shape:
            raise ConditionViolated("SC4", key, "the candidate has another width or length than the tracker")
        else:
            np.copyto(held, words)
        self._tags[key] = committed(version)

    def update_at(self, key: str, indices: Indices, values: Words, version: Version) -> None:
        """Write the changed `values` at `indices` of the tracker, in place. Repeatable.

        Raises: ConditionViolated (SC3) unless the tracker is at version - 1 or in this update.
        """
        if key not in self._words:
            raise ConditionViolated("SC3", key, "the tracker is lost and changes alone do not rebuild it")
        if self._begin(key, version):
            hot.loops().overwrite_scatter(self._words[key], indices, values)
            self._tags[key] = committed(version)

    def _begin(self, key: str, version: Version) -> bool:
        """Tag the tracker as updating; False when it already holds `version`."""
        tag = self._tags[key]
        updating = BaselineTag(BaselineState.UPDATING, version)
        if tag == committed(version):
            return False
        if tag not in (LOST, updating, committed(Version(version - 1))):
            raise ConditionViolated("SC3", key, f"the tracker is {tag} and cannot become version {version}")
        self._tags[key] = updating
        return True
