"""The mutants of the specification on the model: one weakened guard each, by the names of Mutants.tla.

The table of models.json says which operator a mutant replaces, within which bounds, and what must fall.
Not handled: mutants of the implementation (mutants); those that only a liveness property notices.

Spec: Mutants
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from model_tests.model_decisions import Here
from model_tests.model_state import UNKNOWN, BaselineCall, clean, dirty, version_of


def _always(*_: Any) -> bool:
    return True


def _retry_new_cand(s: Here, o: str) -> int:
    if s.own[o].filling != UNKNOWN or s.step == s.config.max_candidate:
        return 0
    return s.own[o].frozen or int(s.step == 0)


def _base_before_commit(s: Here, c: str) -> set[BaselineCall]:
    at = s.coord[c]
    early = BaselineCall("update", s.row(at.att).cand, version_of(at.view) + 1) if at.phase == "committing" else None
    return set() if early is None else {early}


MUTANTS: dict[str, Callable[..., Any]] = {
    "MutRetryXor": lambda s, mode: "xor" if mode in ("xor", "overwrite") else "set",
    "MutNoDedup": _always,
    "MutDedupAcrossAttempts": lambda s, r: s.rcv[r].seen,
    "MutNoEndpointFence": lambda s, r, t: s.rcv[r].att != 0 and not s.rcv[r].stopped,
    "MutNoDrain": _always,
    "MutRestoreNotDrained": lambda s, r: s.rcv[r].drained or s.mode_at(r) == "restore",
    "MutNotSticky": lambda s, r: False,
    "MutPrepareNotMonotone": lambda s, r, t: t != s.rcv[r].att,
    "MutNoEligRecheck": _always,
    "MutOtherCandidate": lambda s, tag, v, cand: tag.kind in ("dirty", "done") and tag.ver == v,
    "MutDoneIsClean": lambda s, tag, att: tag.kind == "done",
    "MutAbortNoDirty": lambda s, r, t: (
        clean(s.base_version(t)) if s.rcv[r].tag.kind in ("dirty", "done") else s.rcv[r].tag
    ),
    "MutTagNotLowered": lambda s, r: s.rcv[r].tag,
    "MutDenseDirty": lambda s, r: dirty(s.base_version(s.rcv[r].att), s.row(s.rcv[r].att).cand),
    "MutNoIncCheck": _always,
    "MutJoinNoRestore": lambda s, r: clean(len(s.chain) - 1),
    "MutRetryNewCand": _retry_new_cand,
    "MutNoManifest": _always,
    "MutOneManifest": lambda s, r: any(s.is_complete(r, o) for o in s.config.owners),
    "MutForeignManifest": lambda s, r, t: not s.rcv[r].stopped,
    "MutEndEarly": _always,
    "MutNoPayloadDigest": _always,
    "MutNoSetDigest": _always,
    "MutAckBeforeFlush": _always,
    "MutCommitPartialAcks": lambda s, t: any(s.is_acked(m, t) for m in s.row(t).req),
    "MutAckOfAnyAttempt": lambda s, m, t: any((a.receiver, a.inc) == m for a in s.sent("ack")),
    "MutJoinMidAttempt": lambda s, t: s.members(s.config.receivers),
    "MutNoCAS": _always,
    "MutNoEpochCommit": _always,
    "MutNoEpochPrepare": _always,
    "MutNoDeadlineWait": lambda s, t: s.late,
    "MutCommitDead": _always,
    "MutDropAlive": lambda s, cand: cand != 0,
    "MutBaseBeforeCommit": _base_before_commit,
    "MutUpdNoMatch": lambda s, o, cand: s.own[o].frozen != 0,
    "MutEndBeforeBase": _always,
    "MutFillEarly": _always,
    "MutRestoreStaleBase": _always,
    "MutNoTagCheck": _always,
    "MutRebuildFromCand": _always,
    "MutStreamUnfrozen": lambda s, o, cand: s.own[o].frozen != 0,
    "MutSkipRollForward": lambda s, c: False,
    "MutGateNotClosed": lambda s, t: False,
    "MutGateEarly": _always,
    "MutNoQuiesce": lambda s, r: not s.rcv[r].gate,
    "MutFlushOpenGate": _always,
    "MutOpenNoFence": _always,
}


@contextmanager
def weakened(guard: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """The model with one guard replaced; `guard` is in snake case."""
    owner = next(part for part in Here.__mro__ if guard in vars(part))
    before = vars(owner)[guard]
    setattr(owner, guard, replacement)
    try:
        yield
    finally:
        setattr(owner, guard, before)
