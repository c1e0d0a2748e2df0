"""Names of the unbounded proof without an operator of that name in the specification: where it says what they say.

Every other link is mechanical: snake_case in spec/proof, CamelCase in the modules. Quoted names have to exist in the
specification; a line that is not needed any more is an error too.
"""

from __future__ import annotations

WRITTEN = "what an action writes, named so that a mutant can swap it: "
FREE = "bounds a choice that the proof leaves free: "

GUARDS = {
    # control plane
    "commit_matches": "`RecordMatches` in `CanCommit`; the proof has two compares of two things",
    "prepare_not_dead": "`NotDead` in `CanPrepare`; one operator serves both there",
    "takes_whole_instances": FREE + "a receiver of `Receivers` is a whole instance there",
    "has_answered": FREE + "`Members` takes the incarnations that live",
    "owner_has_answered": FREE + "the owners of a row of `table` are those that live",
    "is_bound": WRITTEN + "`CommittedMembers`",
    # coordinators
    "reads_after_epoch": "the phase of `coord` between `AcquireEpoch` and `BecomeCoordinator`",
    "may_commit": "the guard of `SendCommit`",
    "expires": WRITTEN + "`Expired`",
    "record_is_committed": "`RollForwardCalls` takes the record that was read",
    # owners
    "streams_undisturbed": "the second part of `MayUpdateBaseline`",
    "moves_forward": "the last line of `MayUpdateBaseline`",
    "copy_source": WRITTEN + "`Source`",
    "loses_baseline": WRITTEN + "`StartOwner` and `LoseBaseline`",
    "may_freeze": "the first line of `NextCandidate`",
    "everybody_thawed": "the condition on all owners in `NextCandidate`",
    # receivers
    "all_manifests": "the quantifier of `IsStaged`; a mutant leaves owners out",
    "not_stopped": "one condition of `MayFlush`",
    "open_is_current": "`IsCurrent` in `IsOfAckedAttempt`",
    "open_is_due": "the phase in `MaySendOpen`",
    "transition_ended": "`NeedsRollForward` in `MaySendOpen`",
    "becomes_clean": WRITTEN + "`TagAtInstall`",
    "keeps_pending": WRITTEN + "`StopAndWait` empties the queue",
    "lowers_tag": WRITTEN + "`StartApply`; `DirtyTag` says to what",
    "sent_as_xor": "`Encoding` item by item",
}
"""Guards of the proof, by name."""

PROPERTIES = {
    "baseline_follows": "the second line of `BaselineBound`: the previous version only while its transition is open",
    "instance_serves_one": "ranks are one receiver there: `GateSafe` says it",
    "abort_safe": "`SingleCommit`: no committed candidate is in `dead`",
}
"""Properties of the proof, by name."""

UNPROVED = {
    "StillBound": "a part of `CommitExact` and `GateFresh`",
    "Abstract": "the instance of `Refit` for the refinement",
    "AttemptOrder": "an order of epochs along the table, which the proof has no need of: `prepare_holds_epoch`",
    "RefitSteps": "a refinement; its parts are CommitExact, GateSafe and Monotone",
    "RefinesRefit": "as RefitSteps",
    "TransitionEnds": "liveness",
    "AllServe": "liveness",
    "AttemptsSuffice": "a statement about bounds of a run",
}
"""Operators of Properties.tla that the proof does not claim."""

UNTRACED = {
    "ReadRecord": "no line: what a coordinator believes is in the state after its next line",
    "ConfirmRestore": "no line: `FinishRestore` follows it",
    "StartStream": "no line: `EmitPayload` or `EndStream` follow it",
    "ReloadWeights": "no line: the next `BeginTransition` shows it",
    "ReportThawed": "no line: a report of an owner",
    "BeginDrain": "no line: `StopAndWait` follows it",
    "ReportPrepared": "no line: a report of a receiver",
    "ReportQuiet": "no line: a report of a receiver",
}
"""Steps of the proof that write no line of a trace; the quoted lines are those around them."""
