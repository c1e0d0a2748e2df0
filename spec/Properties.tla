----------------------------- MODULE Properties -----------------------------
(* What DeltaRefit promises: invariants, step properties, liveness, and the refinement of Refit.               *)
(*                                                                                                            *)
(* Each has a name that the code, the tests, PROOFS.md and the mutants use, and says why it matters.           *)
(*                                                                                                            *)
(* Paper: Proposition 1, Appendix B. Proofs: PROOFS.md section 5                                               *)
EXTENDS DeltaRefit

StillBound(m, t) == rcv[m[1]].inc = m[2] /\ rcv[m[1]].att = t          \* same process, not prepared again since

(* A version is what its receivers really store: the point of the whole protocol. *)
CommitExact == chain # <<>> => \A m \in K.req : StillBound(m, K.att) => store[m[1]] = Committed(Len(chain) - 1)

(* Nobody is bound to a version that it did not acknowledge, payload by payload. *)
CommitAcked == \A k \in DOMAIN chain : \A m \in chain[k].req :
  \E a \in Sent("ack") :
    a.att = chain[k].att /\ a.receiver = m[1] /\ a.inc = m[2] /\ (a.proved \/ a.payloads = Expected(a.att))

(* A receiver's claim is what later XOR records build on. *)
CleanExact == \A r \in Receivers : rcv[r].tag.kind = "clean" =>
  rcv[r].tag.ver < Len(chain) /\ store[r] = Committed(rcv[r].tag.ver)

(* An acknowledged set is complete before anybody knows whether it is committed. *)
DoneExact == \A r \in Receivers : rcv[r].tag.kind = "done" => store[r] = content[rcv[r].tag.cand]

(* What an overwrite retry relies on: outside the changed set nothing was touched. *)
DirtyRepairable == \A r \in Receivers : rcv[r].tag.kind = "dirty" => \A i \in Items :
  LET old == Committed(rcv[r].tag.ver)[i] IN Flip(store[r][i], old) \subseteq Flip(content[rcv[r].tag.cand][i], old)

(* Change detection compares with the committed weights, and training goes on from them. *)
BaselineBound == \A o \in Owners :
  LET v == own[o].ver now == Len(chain) - 1 IN
  /\ own[o].kind = "at" =>
       /\ \A i \in ItemsOf(o) : base[i] = Committed(v)[i]
       /\ v = now \/ chain = <<>> \/ (v = now - 1 /\ own[o].frozen = K.cand)
  /\ own[o].filling # Unknown => own[o].filling = now /\ Source(o) = K.cand
  /\ own[o].frozen \notin {0, K.cand} =>
       \A i \in ItemsOf(o) : Flip(content[own[o].frozen][i], content[K.cand][i]) \subseteq {own[o].frozen}
  /\ own[o].frozen = 0 => own[o].live = K.cand

(* Every payload ever sent, also by a zombie, is the difference that its attempt promised. *)
PayloadBound == \A p \in Sent("payload") :
  LET old == Committed(BaseVersion(p.att))[p.item] new == content[Row(p.att).cand][p.item] IN
  CASE ModeOf(p.att) = "restore" -> p.target = old
    [] ModeOf(p.att) = "dense" -> p.target = new
    [] OTHER -> p.delta = Flip(old, new) /\ p.target = new

(* No write of an attempt that was replaced can still land. *)
FenceSafe == \A r \in Receivers : \A p \in rcv[r].pending : p.att = rcv[r].att

(* One chain: each version follows its predecessor, comes from one attempt, and none of them was given up. *)
SingleCommit == \A k \in DOMAIN chain :
  /\ chain[k].base = IF k = 1 THEN 0 ELSE k - 2
  /\ chain[k].cand \notin dead
  /\ k > 1 => /\ chain[k].att > chain[k-1].att /\ chain[k].cand > chain[k-1].cand
              /\ \A i \in Items : Flip(content[chain[k].cand][i], content[chain[k-1].cand][i]) \subseteq {chain[k].cand}

(* A request never sees a mixture. *)
GateSafe == \A r \in Receivers : rcv[r].gate \/ rcv[r].requests # {} =>
  rcv[r].tag.kind = "clean" /\ rcv[r].tag.ver < Len(chain) /\ store[r] = Committed(rcv[r].tag.ver)

(* Who is bound to a version does not go back to serving the one before. *)
GateFresh == chain # <<>> => \A m \in K.req :
  StillBound(m, K.att) /\ rcv[m[1]].gate => rcv[m[1]].tag = Clean(Len(chain) - 1)

(* Synchronous refits: no service between prepare and the end of the transition, so no old version during it. *)
GateTransition == GateMode = "sync" => \A r \in Receivers :
  rcv[r].gate /\ rcv[r].att # 0 =>
    /\ ModeAt(r) \in Delta => \E k \in DOMAIN chain : chain[k].att = rcv[r].att
    /\ ModeAt(r) \in Delta => \A o \in Owners : own[o].frozen # Row(rcv[r].att).cand

(* Who takes over and reads knows the outcome for good: the record changes under nobody but the active coordinator. *)
TakeoverDecides == \A c \in Coordinators :
  coord[c].epoch = epoch /\ coord[c].phase \notin {"out", "acquiring", "committing"} => coord[c].view = Len(chain)

(* A replaced coordinator fences nobody: later attempts belong to epochs at least as new. *)
AttemptOrder == \A t \in 2..Last : Row(t-1).epoch <= Row(t).epoch

Monotone == [][chain' # chain => \E k \in {chain'[Len(chain')]} : chain' = Append(chain, k)]_vars
FenceMono == [][\A r \in Receivers : rcv'[r].inc = rcv[r].inc => rcv'[r].att >= rcv[r].att]_vars
AckKept == [][Sent("ack") \subseteq Sent("ack")']_vars
DeadKept == [][dead \subseteq dead']_vars

(* Liveness, with finitely many faults. *)
TransitionEnds == \A o \in Owners, c \in 1..MaxCandidate : own[o].frozen = c ~> own[o].frozen # c
AllServe == <>[](\A r \in Receivers : rcv[r].gate /\ rcv[r].tag = Clean(Len(chain) - 1))

(* Level 0. *)
Abstract == INSTANCE Refit WITH Hosts <- Receivers, bits <- store, open <- [r \in Receivers |-> rcv[r].gate],
                                history <- [k \in DOMAIN chain |-> content[chain[k].cand]],
                                bound <- {m[1] : m \in {n \in K.req : StillBound(n, K.att)}}
RefinesRefit == Abstract!Spec
RefitSteps == [][Abstract!Next]_(Abstract!vars)              \* the same without the first state, for warm starts
=============================================================================
