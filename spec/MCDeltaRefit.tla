---------------------------- MODULE MCDeltaRefit ----------------------------
(* Bounds for the model checker, and nothing else: constants, a start after the first commit, how many faults. *)
EXTENDS Properties, TLC

CONSTANTS r1, r2, r3, o1, o2, c1, c2, i1, i2, q1,
          MaxAttempt, MaxFaults, MaxRestart, MaxOwnerRestart, MaxEpoch, MaxDead, MaxAttemptToFail, MayLose, MayFail

OneOwner == [i \in Items |-> o1]
TwoOwners == [i \in Items |-> IF i = i1 THEN o1 ELSE o2]
All == [c \in 1..MaxCandidate |-> Items]
Nothing == [c \in 1..MaxCandidate |-> {}]
Alternating == [c \in 1..MaxCandidate |-> IF c = 1 THEN {i1} ELSE Items]
SecondOnly == [c \in 1..MaxCandidate |-> IF c = 1 THEN {} ELSE Items]
Sound == {"sound"}
AnyArrival == {"sound", "damaged", "foreign"}
AnyOf(S) == SUBSET S \ {{}}
Largest(S) == IF S = {} THEN {} ELSE {S}

Sum(f, S) == LET RECURSIVE Add(_)
                 Add(T) == IF T = {} THEN 0 ELSE LET x == CHOOSE y \in T : TRUE IN f[x] + Add(T \ {x})
             IN Add(S)
Restarts == Sum([r \in Receivers |-> rcv[r].inc - 1], Receivers)
OwnerRestarts == Sum([o \in Owners |-> own[o].inc - 1], Owners)
Takeovers == IF epoch = 0 THEN 0 ELSE epoch - 1
Faults == Restarts + OwnerRestarts + Takeovers + Cardinality(dead)

(* Each of these takes the place of the action whose name it carries, by the cfg. *)
Unbounded == INSTANCE DeltaRefit
BoundedStartReceiver(r, known) ==
  Restarts < MaxRestart /\ Faults < MaxFaults /\ ~known /\ Unbounded!StartReceiver(r, known)
BoundedStartOwner(o) == OwnerRestarts < MaxOwnerRestart /\ Faults < MaxFaults /\ Unbounded!StartOwner(o)
BoundedAcquireEpoch(c) == epoch < MaxEpoch /\ (epoch = 0 \/ Faults < MaxFaults) /\ Unbounded!AcquireEpoch(c)
BoundedKillCandidate(c, cand) == Cardinality(dead) < MaxDead /\ Faults < MaxFaults /\ Unbounded!KillCandidate(c, cand)
MayGoWrong(c) == coord[c].att <= MaxAttemptToFail              \* out of the blue, only the first attempts do
BoundedPrepare(c, mode, cand) ==                             \* again after a lost reply
  Last < MaxAttempt /\ (coord[c].phase # "prepared" \/ MayGoWrong(c)) /\ Unbounded!Prepare(c, mode, cand)
BoundedFailAttempt(c) == coord[c].phase = "running" /\ (MayGoWrong(c) \/ IsStuck(c)) /\ Unbounded!FailAttempt(c)
BoundedResolveCommit(c) ==                                   \* a late commit
  /\ coord[c].phase = "committing" /\ (K.att = coord[c].att \/ MayGoWrong(c) \/ ~CanCommit(coord[c].att))
  /\ Unbounded!ResolveCommit(c)
BoundedLoseBaseline(o) == MayLose /\ Unbounded!LoseBaseline(o)
BoundedFailOwner(o) == MayFail /\ Unbounded!FailOwner(o)
BoundedFailReceiver(r) == MayFail /\ Unbounded!FailReceiver(r)

AttemptsSuffice == Last < MaxAttempt                          \* for liveness: the bound on attempts cuts nothing off

Same == Permutations(Receivers) \cup Permutations(Items)
SameReceivers == Permutations(Receivers)

(* A start after the first commit, with everybody serving version 0. SanityBootstrapped shows that the cold start reaches it. *)
Everyone == {<<r, 1>> : r \in Receivers}
StartBootstrapped ==
  /\ epoch = 1 /\ dead = {} /\ late = {} /\ step = 0
  /\ table = <<[epoch |-> 1, cand |-> 0, mode |-> "restore", view |-> 0, req |-> Everyone, owners |-> [o \in Owners |-> 1]]>>
  /\ chain = <<[cand |-> 0, att |-> 1, req |-> Everyone, epoch |-> 1, base |-> 0]>>
  /\ net = {[type |-> "ack", att |-> 1, receiver |-> r, inc |-> 1, proved |-> TRUE, payloads |-> {}] : r \in Receivers}
  /\ content = [c \in 0..MaxCandidate |-> [i \in Items |-> {}]]
  /\ own = [o \in Owners |-> [inc |-> 1, att |-> 1, fenced |-> 0, status |-> "stopped", kind |-> "at", ver |-> 0,
                              filling |-> Unknown, frozen |-> 0, began |-> 0, live |-> 0]]
  /\ base = [i \in Items |-> {}]
  /\ rcv = [r \in Receivers |-> [NewReceiver(1, Clean(0), TRUE) EXCEPT !.att = 1, !.stopped = FALSE, !.gate = TRUE, !.acked = TRUE]]
  /\ store = [r \in Receivers |-> [i \in Items |-> {}]]
  /\ coord = [c \in Coordinators |-> IF c = c1 THEN [phase |-> "fenced", epoch |-> 1, view |-> 1, att |-> 1]
                                     ELSE [phase |-> "out", epoch |-> 0, view |-> 0, att |-> 0]]

WarmSpec == StartBootstrapped /\ [][Next]_vars
FairWarmSpec == WarmSpec /\ Fairness
=============================================================================
