------------------------------ MODULE Mutants ------------------------------
(* One weakened guard each. A cfg replaces the guard by one of these, and the property that it names must fall. *)
(* The table of models.json says which guard, which property, and why it matters.                               *)
EXTENDS MCDeltaRefit

(* Attempts and retries *)
MutRetryXor(mode) == IF mode \in {"xor", "overwrite"} THEN "xor" ELSE "set"
MutNoDedup(r, p) == TRUE
MutDedupAcrossAttempts(r) == rcv[r].seen
MutNoEndpointFence(r, t) == rcv[r].att # 0 /\ ~rcv[r].stopped
MutNoDrain(r) == TRUE
MutRestoreNotDrained(r) == rcv[r].drained \/ ModeAt(r) = "restore"
MutNotSticky(r) == FALSE
MutPrepareNotMonotone(r, t) == t # rcv[r].att
MutNoEligRecheck(r, t) == TRUE
MutOtherCandidate(tag, v, cand) == tag.kind \in {"dirty", "done"} /\ tag.ver = v
MutDoneIsClean(tag, att) == tag.kind = "done"
MutAbortNoDirty(r, t) == IF rcv[r].tag.kind \in {"dirty", "done"} THEN Clean(BaseVersion(t)) ELSE rcv[r].tag
MutTagNotLowered(r) == rcv[r].tag
MutDenseDirty(r) == Dirty(BaseVersion(rcv[r].att), Row(rcv[r].att).cand)
MutNoIncCheck(a, b) == TRUE
MutJoinNoRestore(r) == Clean(Len(chain) - 1)
MutRetryNewCand(o) ==
  IF own[o].filling # Unknown \/ step = MaxCandidate THEN 0
  ELSE IF own[o].frozen # 0 THEN own[o].frozen ELSE IF step = 0 THEN 1 ELSE 0

(* The set that an acknowledgement speaks for *)
MutNoManifest(r, o) == TRUE
MutOneManifest(r) == \E o \in Owners : IsComplete(r, o)
MutForeignManifest(r, t) == ~rcv[r].stopped
MutEndEarly(o, t) == TRUE
MutNoPayloadDigest(how) == TRUE
MutNoSetDigest(a, b) == TRUE
MutAckBeforeFlush(r) == TRUE

(* Commit *)
MutCommitPartialAcks(t) == \E m \in Row(t).req : IsAcked(m, t)
MutAckOfAnyAttempt(m, t) == \E a \in Sent("ack") : a.receiver = m[1] /\ a.inc = m[2]
MutJoinMidAttempt(t) == Members(Receivers)
MutNoCAS(view) == TRUE
MutNoEpochCommit(t) == TRUE
MutNoEpochPrepare(c) == TRUE
MutNoDeadlineWait(t) == late
MutCommitDead(cand) == TRUE
MutDropAlive(cand) == cand # 0

(* Baseline *)
MutBaseBeforeCommit(c) ==
  IF coord[c].phase = "committing"
  THEN {[type |-> "update", cand |-> Row(coord[c].att).cand, ver |-> VersionOf(coord[c].view) + 1]} ELSE {}
MutUpdNoMatch(o, cand) == own[o].frozen # 0
MutEndBeforeBase(o, v) == TRUE
MutFillEarly(o) == TRUE
MutRestoreStaleBase(o, v) == TRUE
MutNoTagCheck(o, v) == TRUE
MutRebuildFromCand(o, cand) == TRUE
MutStreamUnfrozen(o, cand) == own[o].frozen # 0
MutSkipRollForward(c) == FALSE

(* Gate *)
MutGateNotClosed(t) == FALSE
MutGateEarly(r) == TRUE
MutNoQuiesce(r) == ~rcv[r].gate
MutFlushOpenGate(r) == TRUE
MutOpenNoFence(r, t) == TRUE

(* Progress only: killed by a liveness property *)
MutNeverFinish(c) == {}
MutNeverRestore(c) == {}
MutNeverRollForward(c) == {}
MutNeverOpen(c) == FALSE
MutLateClose(r, t) == IsRunning(r, t)
MutNeverDense(c, cand) == IF MayXor(cand) THEN "xor" ELSE "overwrite"
=============================================================================
