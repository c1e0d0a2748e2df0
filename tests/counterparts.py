"""Where a name of the specification and a name of the code belong together but do not have the same words, and why.

Every other link is mechanical: CamelCase in spec/, snake_case in the code. Quoted names in a reason have to exist on
the other side, so a reason cannot outlive what it speaks of; a line that is not needed any more is an error too.
"""

from __future__ import annotations

SPLIT = "stands alone so that a mutant weakens one use of it: "
HELPER = "says a part of a guard on the sets of the specification: "

GUARDS = {
    # control plane
    "CanPrepare": "`why_not_prepare` gives the reason",
    "CanCommit": "`why_not_commit` gives the reason",
    "CanKill": "`why_not_kill` gives the reason",
    "CanBootstrap": "`why_not_bootstrap` gives the reason",
    "PrepareHoldsEpoch": SPLIT + "`holds_epoch` in `why_not_prepare`",
    "CommitHoldsEpoch": SPLIT + "`holds_epoch` in `why_not_commit`",
    "NoRecordYet": "`record_matches` with no record, in `why_not_bootstrap`",
    "NotDead": "`Facts.candidate_dead`, read in `why_not_prepare` and `why_not_commit`",
    "NotCommitted": "one line of `why_not_prepare` and `why_not_kill`",
    "IsDead": "an owner is told by a call: `decision.decide` sends it only when `ControlView.candidate_dead`",
    # receiver
    "IsDrained": "`EndpointState.drained`",
    "Fits": "`alignment.is_eligible`; the guard of the endpoint has the name IsEligible",
    "EndIsCurrent": SPLIT + "`is_expected` in `endpoint_intake.see_manifest`",
    "PayloadIsCurrent": SPLIT + "`is_expected` in `endpoint_intake.accept`",
    "IsIntact": "`verify_payload`, before the machine hears of the payload",
    "MayWrite": "`may_apply` without the payloads that it is asked for",
    "FlushPermitted": SPLIT + "the first half of `may_flush`",
    "IsOfAckedAttempt": SPLIT + "the first half of `may_open_gate`",
    "SeenOf": HELPER + "`EndpointState.seen`",
    "ItemNames": HELPER + "the payload numbers in `EndpointState.seen`",
    "SameSet": HELPER + "`manifest_digest` and `applied_digest` stand for the sets",
    "StartTag": "`endpoint.start`",
    "TagAtInstall": "`endpoint_fence._install`",
    "SeenAtInstall": "`endpoint_fence._install`",
    "StoppedByStop": "`endpoint_fence._drain`",
    "GateAfterFlush": "`endpoint_intake.flushed` leaves the gate alone",
    # owner
    "RestoreBase": SPLIT + "`holds_version` in `may_stream` and `membership.all_hold`",
    "DeltaBase": SPLIT + "`holds_version` in `may_stream`",
    "UpdateMatches": SPLIT + "`is_frozen` in `may_update_baseline`",
    "OwnerIsDrained": "`OwnerState.status` is none of prepared, streaming, failed; `owner._stopped` makes it so",
    "IsCommittedResident": "`OwnerState.resident`, compared in `may_rebuild`",
    "NextCandidate": "the trainer decides it; `may_freeze` is the owner's part",
    "Encoding": "`choose_encoding`",
    "Everything": "`StartStream.every_element`",
    "Payload": "`DeltaOwner.stream`",
    "IsEmitted": HELPER + "`OwnerState.published`",
    "AllEmitted": HELPER + "the end of `DeltaOwner.stream`, then `StreamEnded`",
    "Digest": HELPER + "`PayloadPublished.digest`",
    "Listed": HELPER + "`manifest_digest` of `OwnerState.published`",
    "Source": "`CopyCandidate.candidate` or `RefillBaseline.candidate`",
    "AllCopied": "the copy feeds `owner_state.BaselineFilled` after its last `owner_state.ItemCopied`",
}
"""Operators of the guard sections that no predicate of the machines is named after: where the code has them."""

PREDICATES = {
    "why_not_prepare": "`CanPrepare`, with a reason",
    "why_not_commit": "`CanCommit`, with a reason",
    "why_not_kill": "`CanKill`, with a reason",
    "why_not_bootstrap": "`CanBootstrap`, with a reason",
    "is_addressed": "`IsMember`: a call reaches the incarnation that it names (`SameIncarnation`)",
    "raises_fence": "`IsNewer` in `StopAndWait`: no prepare waits in the specification",
    "owner_raises_fence": "`OwnerIsNewer` in `StopOwner`: no prepare waits in the specification",
    "is_expected": "`PayloadIsCurrent` and `EndIsCurrent`; which owners there are is a constant",
    "may_apply": "`MayWrite`; the payloads that it is asked for are any of the pending ones",
    "may_fail": "the first line of `FailReceiver`",
    "may_freeze": "`NextCandidate`",
    "may_step": "`NextCandidate`: the optimizer step is its part that makes a new candidate",
    "has_ended": "a repeated call changes nothing: `EndTransition` needs a frozen candidate",
    "is_ended": "`AllEnded`, one owner of it",
    "can_rebuild": "`MayRebuild`, seen from afar",
    "is_first_attempt": "`MayXor`, seen from afar in `ModeFor`",
    "is_fenced_by_own": 'the phase "fenced" in `RollForwardCalls`',
    "may_commit": "the guard of `SendCommit`",
    "restore_confirmed": "`IsConfirmed`",
}
"""Predicates of the machines that no operator is named after: where the specification has them."""

UNTESTED_PROPERTIES = {
    "RefinesRefit": "`RefitSteps` from the first state on; every cluster starts without a record, its gates closed",
    "AttemptsSuffice": "a statement about bounds of the model: `MaxAttempt` cuts no run of a liveness check off",
}
"""Checked properties of the specification that nothing in the simulated cluster is named after."""

PYTHON_MUTANTS = {
    "finish_restore_unchecked": "a late call is taken; `MayFinishRestore` has no weaker version in `Mutants`",
}
"""Weakenings of the machines that the specification does not have."""

MUTANTS_WITHOUT_TWIN: frozenset[str] = frozenset()
"""Mutants of the specification that are not tried on the code: none."""
