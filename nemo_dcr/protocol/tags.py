"""What receivers and owners claim about their own weights: the receiver's tag and the owner's tracker tag.

A claim is local and conservative: it is lowered before the first write that breaks it and raised only after the last
write of a complete set took effect. Whether a `done` set became the committed version is known only from the record.

Paper: Section 6.3; Appendix B   Spec: None, Clean, Dirty, Done   Proofs: version_alignment   Conditions: SC3, SC7
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_dcr.ids import NO_ATTEMPT, NO_CANDIDATE, AttemptId, CandidateId, Version

FIRST_VERSION = Version(0)


class TagKind(StrEnum):
    """What a receiver claims about its own storage (D7)."""

    NONE = "none"
    """Nothing: raw, or a mixture that no overwrite repairs. Only dense attempts and restores take it."""
    CLEAN = "clean"
    """Exactly `version`."""
    DIRTY = "dirty"
    """Starts from `version`; some items of `candidate` are written."""
    DONE = "done"
    """`version` plus all items of `candidate`, flushed under `attempt`; not yet known to be committed."""


@dataclass(frozen=True, slots=True)
class Tag:
    """The four-valued tag; unused fields keep their defaults."""

    kind: TagKind = TagKind.NONE
    version: Version = FIRST_VERSION
    candidate: CandidateId = NO_CANDIDATE
    attempt: AttemptId = NO_ATTEMPT

    def __str__(self) -> str:
        match self.kind:
            case TagKind.NONE:
                return "none"
            case TagKind.CLEAN:
                return f"clean({self.version})"
            case TagKind.DIRTY:
                return f"dirty({self.version},{self.candidate})"
            case TagKind.DONE:
                return f"done({self.version},{self.candidate},{self.attempt})"


class TrackerKind(StrEnum):
    """What an owner's trackers and residual baseline hold."""

    AT = "at"
    """Exactly `version`."""
    UPDATING = "updating"
    """Between `version` and the frozen candidate, item by item; repeat the update."""
    LOST = "lost"
    """Unknown, after a crash (D12)."""


@dataclass(frozen=True, slots=True)
class TrackerTag:
    """Version tag of an owner's baseline; `version` is the old one while updating and unused when lost."""

    kind: TrackerKind = TrackerKind.LOST
    version: Version = FIRST_VERSION

    def __str__(self) -> str:
        return "lost" if self.kind is TrackerKind.LOST else f"{self.kind.value}({self.version})"
