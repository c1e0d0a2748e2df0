------------------------------- MODULE Sanity -------------------------------
(* Claims that must be violated: each says that something good or instructive never happens.                    *)
(*                                                                                                            *)
(* A guard that is too strong passes every safety check. These, action coverage and liveness notice it.        *)
EXTENDS MCDeltaRefit

CommittedRows == {Row(chain[k].att) : k \in DOMAIN chain}

SanityTwoCommits == Len(chain) < 3
SanityOverwriteRetry == \A row \in CommittedRows : row.mode # "overwrite"
SanityDenseAttempt == \A row \in CommittedRows : row.mode # "dense"
SanityRollForwardAfterFailover ==                             \* another coordinator finishes what the record says
  \A c \in Coordinators : ~(NeedsRollForward(c) /\ coord[c].phase = "fenced" /\ ModeOf(coord[c].att) = "finish")
SanityFailoverEnds == ~(Len(chain) = 2 /\ epoch = 2 /\ K.epoch = 1 /\ IsIdle /\ \A r \in Receivers : rcv[r].gate)
SanityRejoined == \A k \in DOMAIN chain : k > 1 => \A m \in chain[k].req : m[2] = 1
SanityLateMeetsNewer ==                                 \* a payload waits while a newer attempt asks for its place
  \A r \in Receivers : \A p \in rcv[r].pending : \A t \in 1..Last : ~(t > p.att /\ IsAsked(r, t))
SanityAbort == ~(\E c \in dead : \A o \in Owners : own[o].frozen = 0 /\ own[o].began = c)
SanityAbortThenCommit == ~(dead # {} /\ Len(chain) = 2)
SanityDrain == \A r \in Receivers : ~(rcv[r].att # 0 /\ IsStaged(r) /\ ~rcv[r].gate /\ rcv[r].requests # {})
SanityAsyncApply == GateMode = "async" => \A r \in Receivers : rcv[r].tag.kind # "dirty"
SanityZombieCommit ==                                 \* a commit request of a replaced coordinator is on its way
  \A m \in Sent("commit") : m.epoch = epoch \/ \E k \in DOMAIN chain : chain[k].att = m.att
SanityPartialWrite == \A r \in Receivers : ~(rcv[r].stopped /\ rcv[r].tag.kind = "dirty")
SanityExcluded == \A k \in DOMAIN chain : Cardinality(chain[k].req) = Cardinality(Receivers)
SanityBootstrapped ==                                         \* the cold start reaches what the warm start begins with
  ~(/\ Len(chain) = 1 /\ Last = 1 /\ step = 0
    /\ \A r \in Receivers : rcv[r].gate /\ rcv[r].tag = Clean(0) /\ rcv[r].loaded /\ rcv[r].acked)
SanityTornBaseline == \A o \in Owners :
  ~(own[o].kind = "updating" /\ ~AllCopied(o) /\ \E i \in ItemsOf(o) : base[i] = content[Source(o)][i])
=============================================================================
