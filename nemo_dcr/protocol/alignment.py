"""Version alignment: which storage an attempt's records lead to exactly the next version (SC7).

XOR needs storage that is exactly the committed version. An overwrite attempt also repairs a mixture of that version and
this very candidate: every bit in which the two differ is in the changed set. It does not repair a mixture with another
candidate (D8). Dense attempts and restores take any storage.

Paper: Section 6.3   Spec: Fits, HoldsRecord, IsMixture, IsCommittedDone
Proofs: version_alignment, retry_repairs   Conditions: SC7
"""

from __future__ import annotations

from nemo_dcr.ids import AttemptId, CandidateId, Version
from nemo_dcr.protocol.tags import Tag, TagKind
from nemo_dcr.record import AttemptMode


def is_committed_done(tag: Tag, record_attempt: AttemptId) -> bool:
    """A `done` tag whose attempt is the committed one is the committed version (D7)."""
    return tag.kind is TagKind.DONE and tag.attempt == record_attempt


def is_mixture(tag: Tag, version: Version, candidate: CandidateId) -> bool:
    """Storage is a mixture of `version` and `candidate`, all of one or the other included."""
    started = tag.kind in (TagKind.DIRTY, TagKind.DONE)
    return started and tag.version == version and tag.candidate == candidate


def holds_record(tag: Tag, version: Version, record_attempt: AttemptId) -> bool:
    """Storage is exactly the committed version."""
    return tag == Tag(TagKind.CLEAN, version) or is_committed_done(tag, record_attempt)


def is_eligible(
    tag: Tag, *, mode: AttemptMode, version: Version, record_attempt: AttemptId, candidate: CandidateId
) -> bool:
    """An attempt in `mode` on record (version, record_attempt) for `candidate` may write over storage with this tag."""
    if mode in (AttemptMode.DENSE, AttemptMode.RESTORE):
        return True
    if holds_record(tag, version, record_attempt):
        return True
    return mode is AttemptMode.OVERWRITE and is_mixture(tag, version, candidate)
