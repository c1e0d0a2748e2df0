----------------------------- MODULE DeltaRefit -----------------------------
(* Level 1: Algorithms B.1 (one attempt) and B.2 (retry, joint commit, failover) with crashes.                 *)
(*                                                                                                            *)
(* One action is one line of a trace (docs/trace.md) and one step of one process; the name of an action, in    *)
(* snake case, is the name of the code that takes it. Guards are named operators and have the names of the     *)
(* predicates in nemo_dcr/protocol and nemo_dcr/control_rules.py. Bounds are in MCDeltaRefit; nothing here      *)
(* knows that it is being checked.                                                                             *)
(*                                                                                                            *)
(* A call needs no action of its own: once the condition to send it held, it is in `net`, see `Told`. Crashes,  *)
(* lost messages and passing time need none either: a process that crashed takes no step until it starts       *)
(* again, a lost message is one that nobody receives, a deadline is an attempt that fails.                     *)
(*                                                                                                            *)
(* Paper: Sections 6.1 to 6.3; Algorithms B.1, B.2. Decisions: D1 to D31 in docs/decisions/0002.               *)
EXTENDS Integers, Sequences, FiniteSets, Words, Channel

CONSTANTS Receivers,          \* engine instances; the ranks of one act together
          Owners,             \* trainer ranks that own items
          Items,              \* canonical tensors
          OwnerOf,            \* [Items -> Owners]
          Coordinators,       \* processes that may coordinate
          AttemptIds,         \* 1 .. n, n as large as wanted
          MaxCandidate,       \* candidates are 1 .. MaxCandidate; 0 is the weights that training started from
          Changes,            \* [1..MaxCandidate -> SUBSET Items]: the items that a candidate changes
          GateMode,           \* "sync" or "async"
          Requests,           \* names of requests that may run at a receiver
          Arrivals            \* how payloads may arrive, a subset of {"sound", "damaged", "foreign"}

VARIABLES
  chain,      \* control plane: every commit record, the last one is K; empty before the first
  epoch,      \* control plane: the epoch of the active coordinator
  table,      \* control plane: row t is attempt t
  dead,       \* control plane: candidates that were given up for ever
  late,       \* attempts whose commit deadline has passed
  content,    \* content[c][i]: the words of candidate c
  step,       \* the candidate that the trainer made last
  own,        \* owners
  base,       \* base[i]: the committed source baseline (tracker or residual) of item i
  rcv,        \* receivers
  store,      \* store[r][i]: stored words
  coord       \* coordinators

control == <<chain, epoch, table, dead, late>>
trainer == <<content, step>>
vars == <<control, trainer, own, base, rcv, store, coord, net>>

----------------------------------------------------------------------------
(* Names *)

None == [kind |-> "none", ver |-> 0, cand |-> 0, att |-> 0]             \* what a receiver claims about its storage
Clean(v) == [kind |-> "clean", ver |-> v, cand |-> 0, att |-> 0]
Dirty(v, c) == [kind |-> "dirty", ver |-> v, cand |-> c, att |-> 0]
Done(v, c, t) == [kind |-> "done", ver |-> v, cand |-> c, att |-> t]

Delta == {"xor", "overwrite", "dense"}                                       \* modes that may end in a commit
Unknown == -1                                                                \* no version, no known weights

ItemsOf(o) == {i \in Items : OwnerOf[i] = o}
NoRecord == [cand |-> 0, att |-> 0, req |-> {}, epoch |-> 0, base |-> 0]
RecordOf(n) == IF n = 0 THEN NoRecord ELSE chain[n]                    \* the record that one with n records sees
VersionOf(n) == IF n = 0 THEN 0 ELSE n - 1
K == RecordOf(Len(chain))
Committed(v) == content[IF v < Len(chain) THEN chain[v + 1].cand ELSE 0]  \* the words of version v
Last == Len(table)

Row(t) == table[t]
ModeOf(t) == Row(t).mode
BaseVersion(t) == VersionOf(Row(t).view)
ModeAt(r) == IF rcv[r].att = 0 THEN "none" ELSE ModeOf(rcv[r].att)

SameIncarnation(a, b) == a = b
IsMember(r, t) == \E m \in Row(t).req : m[1] = r /\ SameIncarnation(m[2], rcv[r].inc)
IsOwnerMember(o, t) == Row(t).owners[o] = own[o].inc

Told(message, condition) == IsSent(message) \/ condition                       \* it was sent, or may be sent now

----------------------------------------------------------------------------
(* Guards of the control plane (control_rules) *)

HoldsEpoch(e) == e = epoch
PrepareHoldsEpoch(c) == HoldsEpoch(coord[c].epoch)
CommitHoldsEpoch(t) == HoldsEpoch(Row(t).epoch)
RecordMatches(view) == view = Len(chain)
IsLatest(t) == t = Last
InTime(t) == t \notin late
NotDead(cand) == cand \notin dead
NotCommitted(cand) == cand # K.cand
MayXor(cand) == \A t \in 1..Last : ~(ModeOf(t) \in Delta /\ Row(t).cand = cand)
NoRecordYet == chain = <<>>

CanPrepare(c, mode, cand) ==
  /\ PrepareHoldsEpoch(c) /\ RecordMatches(coord[c].view)
  /\ mode \in Delta => NotDead(cand) /\ NotCommitted(cand)
  /\ mode = "xor" => MayXor(cand)
CanCommit(t) ==
  /\ CommitHoldsEpoch(t) /\ RecordMatches(Row(t).view) /\ IsLatest(t)
  /\ NotDead(Row(t).cand) /\ InTime(t)
CanKill(c, cand) == PrepareHoldsEpoch(c) /\ NotCommitted(cand)
CanBootstrap(c) == PrepareHoldsEpoch(c) /\ NoRecordYet /\ IsLatest(coord[c].att)

----------------------------------------------------------------------------
(* Guards of a receiver (protocol/endpoint_guards, protocol/alignment) *)

IsNewer(r, t) == t > rcv[r].att /\ t > rcv[r].fenced
IsCurrent(r, t) == t = rcv[r].att
IsRunning(r, t) == IsCurrent(r, t) /\ ~rcv[r].stopped
IsDrained(r) == rcv[r].drained
IsCommittedDone(tag, att) == tag.kind = "done" /\ tag.att = att
IsMixture(tag, v, cand) == tag.kind \in {"dirty", "done"} /\ tag.ver = v /\ tag.cand = cand
HoldsRecord(tag, view) == tag = Clean(VersionOf(view)) \/ IsCommittedDone(tag, RecordOf(view).att)
Fits(tag, mode, view, cand) ==
  \/ mode \in {"dense", "restore"}
  \/ HoldsRecord(tag, view)
  \/ mode = "overwrite" /\ IsMixture(tag, VersionOf(view), cand)
IsEligible(r, t) == Fits(rcv[r].tag, ModeOf(t), Row(t).view, Row(t).cand)
IsProved(r, t) == ModeOf(t) = "restore" /\ BaseVersion(t) = 0 /\ rcv[r].loaded
ClosesGate(t) == ModeOf(t) = "restore" \/ (GateMode = "sync" /\ ModeOf(t) # "finish")
MayCloseGate(r, t) == IsRunning(r, t) /\ ~rcv[r].acked         \* a late call must not close a gate that opened again
StagedFirst(t) == GateMode = "async" /\ ModeOf(t) # "restore"
IsQuiet(r) == ~rcv[r].gate /\ rcv[r].requests = {}
IsIntact(how) == how # "damaged"
EndIsCurrent(r, t) == IsRunning(r, t)
PayloadIsCurrent(r, t) == IsRunning(r, t)
NotDuplicate(r, p) == \A d \in rcv[r].seen : d.item # p.item
MayWrite(r) == rcv[r].open /\ IsQuiet(r)
FlushPermitted(r) == MayWrite(r)
SeenOf(r, o) == {d \in rcv[r].seen : OwnerOf[d.item] = o}
ItemNames(digests) == {d.item : d \in digests}
SameSet(a, b) == a = b
ManifestAgrees(r, o) == \A e \in rcv[r].ends : e.owner = o => SameSet(SeenOf(r, o), e.payloads)
IsComplete(r, o) == \E e \in rcv[r].ends : e.owner = o /\ ItemNames(e.payloads) = ItemNames(SeenOf(r, o))
IsStaged(r) == \A o \in Owners : IsComplete(r, o)
NothingPending(r) == rcv[r].pending = {}
MayFlush(r) ==
  /\ ModeAt(r) \in Delta \cup {"restore"} /\ ~rcv[r].stopped /\ ~rcv[r].acked
  /\ FlushPermitted(r) /\ IsStaged(r) /\ NothingPending(r) /\ \A o \in Owners : ManifestAgrees(r, o)
MayAdmit(r) == rcv[r].gate
IsOfAckedAttempt(r, t) == IsCurrent(r, t) /\ (ModeOf(t) = "finish" \/ rcv[r].acked)
MayOpenGate(r, m) ==
  /\ IsOfAckedAttempt(r, m.att)
  /\ rcv[r].tag = Clean(m.ver) \/ IsCommittedDone(rcv[r].tag, m.record)
MayFinishRestore(r, t) == IsRunning(r, t) /\ ModeOf(t) = "restore" /\ rcv[r].acked

(* What a receiver becomes; also swapped one by one by the mutants. *)
StartTag(r) == None
DirtyTag(r) ==
  LET t == rcv[r].att v == BaseVersion(t) c == Row(t).cand tag == rcv[r].tag IN
  IF ModeOf(t) \in {"dense", "restore"} THEN None
  ELSE IF tag = Clean(v) \/ IsMixture(tag, v, c) THEN Dirty(v, c) ELSE None
TagAtInstall(r, t) ==
  IF IsCommittedDone(rcv[r].tag, RecordOf(Row(t).view).att) THEN Clean(BaseVersion(t)) ELSE rcv[r].tag
SeenAtInstall(r) == {}
StoppedByStop(r) == TRUE
GateAfterFlush(r) == rcv[r].gate

----------------------------------------------------------------------------
(* Guards of an owner (protocol/owner_state) *)

HoldsVersion(o, v) == own[o].kind = "at" /\ own[o].ver = v
HasFollowed(o, v) == HoldsVersion(o, v)
RestoreBase(o, v) == HoldsVersion(o, v)
DeltaBase(o, v) == HoldsVersion(o, v)
IsFrozen(o, cand) == cand # 0 /\ own[o].frozen = cand
UpdateMatches(o, cand) == IsFrozen(o, cand)
OwnerIsNewer(o, t) == t > own[o].att /\ t > own[o].fenced
OwnerIsDrained(o) == own[o].status \notin {"prepared", "streaming", "failed"}
MayStream(o, t) ==
  CASE ModeOf(t) = "finish"  -> TRUE
    [] ModeOf(t) = "dense"   -> IsFrozen(o, Row(t).cand) /\ own[o].kind # "updating"
    [] ModeOf(t) = "restore" -> RestoreBase(o, BaseVersion(t))
    [] OTHER                 -> IsFrozen(o, Row(t).cand) /\ DeltaBase(o, BaseVersion(t))
MayUpdateBaseline(o, m) ==
  /\ UpdateMatches(o, m.cand) /\ own[o].status # "streaming" /\ own[o].filling = Unknown
  /\ own[o].kind = "lost" \/ own[o].ver < m.ver
IsCommittedResident(o, cand) == own[o].frozen = 0 /\ own[o].began = step /\ own[o].live = cand
MayRebuild(o, cand) == own[o].kind = "lost" /\ own[o].filling = Unknown /\ IsCommittedResident(o, cand)
MayEndTransition(o, m) == IsFrozen(o, m.cand) /\ HasFollowed(o, m.ver)
IsDead(cand) == cand \in dead
MayDrop(o) ==
  /\ IsDead(own[o].frozen) /\ own[o].filling = Unknown /\ own[o].kind # "updating"
  /\ own[o].status \notin {"streaming", "failed"}
NextCandidate(o) ==                                            \* the candidate that o freezes now, 0 for none
  IF own[o].frozen # 0 \/ own[o].filling # Unknown THEN 0
  ELSE IF own[o].began < step THEN step                         \* another rank made the optimizer step already
  ELSE IF step < MaxCandidate /\ \A p \in Owners : own[p].frozen = 0 /\ own[p].began = step /\ own[p].filling = Unknown
  THEN step + 1
  ELSE 0

(* The records of one item, formed by its owner. A payload is named by attempt and item (D31). *)
Encoding(mode) == IF mode = "xor" THEN "xor" ELSE "set"
Everything == 0..MaxCandidate
Payload(o, t, i) ==
  LET mode == ModeOf(t) new == content[own[o].frozen][i] IN
  [type |-> "payload", att |-> t, item |-> i, enc |-> Encoding(mode),
   delta |-> IF mode \in {"dense", "restore"} THEN Everything ELSE Flip(base[i], new),
   target |-> IF mode = "restore" THEN base[i] ELSE new]
IsEmitted(t, i) == \E p \in Sent("payload") : p.att = t /\ p.item = i
AllEmitted(o, t) == \A i \in ItemsOf(o) : IsEmitted(t, i) \/ Payload(o, t, i).delta = {}
Digest(p) == [item |-> p.item, enc |-> p.enc, delta |-> p.delta, target |-> p.target]
Listed(o, t) == {Digest(p) : p \in {q \in Sent("payload") : q.att = t /\ OwnerOf[q.item] = o}}
Source(o) == IF own[o].frozen # 0 THEN own[o].frozen ELSE own[o].live     \* what a copy into the baseline reads
AllCopied(o) == \A i \in ItemsOf(o) : base[i] = content[Source(o)][i]

----------------------------------------------------------------------------
(* What a coordinator sees and decides (protocol/decision, membership, attempt). Reports may be old when it     *)
(* acts on them; nothing trusts them: every call is checked again where it takes effect.                        *)

Runs(c, t) == coord[c].phase = "running" /\ coord[c].att = t
IsRun(t) == \E c \in Coordinators : Runs(c, t)
IsPrepared(m, t) == LET r == m[1] IN
  /\ SameIncarnation(m[2], rcv[r].inc) /\ IsRunning(r, t)
  /\ StagedFirst(t) \/ ModeOf(t) = "finish" \/ IsQuiet(r)
AllPrepared(t) ==
  /\ \A m \in Row(t).req : IsPrepared(m, t)
  /\ \A o \in Owners : IsOwnerMember(o, t) /\ own[o].att = t /\ own[o].status # "stopped"
AllEnded(t) == \A o \in Owners : \E e \in Sent("end") : e.att = t /\ e.owner = o
TakesPart(m, t) == SameIncarnation(m[2], rcv[m[1]].inc) /\ IsRunning(m[1], t)
AllStaged(t) == AllEnded(t) /\ \A m \in Row(t).req : TakesPart(m, t) /\ IsStaged(m[1])
AllQuiet(t) == \A m \in Row(t).req : TakesPart(m, t) /\ IsQuiet(m[1])
IsAcked(m, t) == \E a \in Sent("ack") : a.att = t /\ a.receiver = m[1] /\ SameIncarnation(m[2], a.inc)
HasAllAcks(t) == \A m \in Row(t).req : IsAcked(m, t)
Expected(t) == UNION {e.payloads : e \in {f \in Sent("end") : f.att = t}}
DigestAgrees(t) == \A a \in Sent("ack") : a.att = t /\ ~a.proved => SameSet(a.payloads, Expected(t))
IsAllProved(t) == \A m \in Row(t).req : \E a \in Sent("ack") : a.att = t /\ a.receiver = m[1] /\ a.proved
IsOver(t) == \/ ModeOf(t) = "finish" /\ AllPrepared(t)
             \/ ModeOf(t) = "restore" /\ HasAllAcks(t) /\ IsAllProved(t)
             \/ ModeOf(t) # "finish" /\ HasAllAcks(t) /\ AllEnded(t) /\ DigestAgrees(t)
CommittedMembers(t) == Row(t).req
Expired(t) == late \cup {t}

Members(S) == {<<r, rcv[r].inc>> : r \in S}
SomeOf(S) == SUBSET S \ {{}}
Holders(c) == Members({r \in Receivers : HoldsRecord(rcv[r].tag, coord[c].view)})
InHand(c, r) == coord[c].phase = "fenced" /\ rcv[r].att = coord[c].att        \* its next call is on the way
Strays(c) == Members({r \in Receivers : ~InHand(c, r)}) \ (IF coord[c].view = 0 THEN {} ELSE Holders(c))
Closed(c) == {m \in Holders(c) : ~rcv[m[1]].gate /\ ~InHand(c, m[1])}
EligibleFor(c, mode, cand) == Members({r \in Receivers : Fits(rcv[r].tag, mode, coord[c].view, cand)})
AllHold(v) == \A o \in Owners : HoldsVersion(o, v)
OpenCandidate(c, cand) == cand # 0 /\ cand # RecordOf(coord[c].view).cand /\ \E o \in Owners : own[o].frozen = cand
IsIdle == \A o \in Owners : own[o].frozen = 0
NeedsRollForward(c) ==
  /\ RecordOf(coord[c].view).cand # 0 /\ \E o \in Owners : own[o].frozen = RecordOf(coord[c].view).cand
AllFollowed(v, cand) == \A o \in Owners : HasFollowed(o, v) \/ (own[o].kind = "lost" /\ own[o].frozen # cand)
ModeFor(c, cand) ==
  IF ~AllHold(VersionOf(coord[c].view)) THEN "dense" ELSE IF MayXor(cand) THEN "xor" ELSE "overwrite"
IsConfirmed(c) == IsLatest(coord[c].att) /\ RecordMatches(coord[c].view) /\ PrepareHoldsEpoch(c)

MayAsk(c) == coord[c].phase \in {"ready", "prepared", "fenced"}
(* Which attempts c may ask for now, as sets of required receivers. *)
WantsDelta(c, mode, cand) ==
  IF /\ coord[c].view > 0 /\ ~NeedsRollForward(c)
     /\ OpenCandidate(c, cand) /\ \A o \in Owners : own[o].frozen = cand
     /\ mode = ModeFor(c, cand)
  THEN SomeOf(EligibleFor(c, mode, cand)) ELSE {}
WantsRestore(c) ==
  IF /\ \A o \in Owners : RestoreBase(o, VersionOf(coord[c].view))
     /\ ~NeedsRollForward(c)
     /\ \A cand \in 1..step : OpenCandidate(c, cand) => NotDead(cand) /\ EligibleFor(c, ModeFor(c, cand), cand) = {}
  THEN SomeOf(Strays(c)) ELSE {}
WantsFinish(c) ==
  IF coord[c].view = 0 THEN {}
  ELSE IF NeedsRollForward(c) THEN IF coord[c].phase = "fenced" THEN {} ELSE SomeOf(Holders(c))
  ELSE IF IsIdle /\ AllHold(VersionOf(coord[c].view)) /\ Strays(c) = {} THEN SomeOf(Closed(c)) ELSE {}
Wants(c, mode, cand) ==
  IF ~MayAsk(c) THEN {}
  ELSE IF mode \in Delta THEN WantsDelta(c, mode, cand)
  ELSE IF cand # 0 THEN {}
  ELSE IF mode = "restore" THEN WantsRestore(c) ELSE WantsFinish(c)
Modes == Delta \cup {"restore", "finish"}

(* Calls that follow from what it saw. *)
StreamCall(t) == [type |-> "stream", att |-> t]
CloseCall(t) == [type |-> "close", att |-> t]
ApplyCall(t) == [type |-> "apply", att |-> t]
PrepareCall(t) == [type |-> "prepare", att |-> t]
StopCall(t) == [type |-> "stop", att |-> t]
CommitCall(t) == [type |-> "commit", att |-> t, epoch |-> Row(t).epoch, view |-> Row(t).view]
UpdateCall(n) == [type |-> "update", cand |-> RecordOf(n).cand, ver |-> VersionOf(n)]
EndCall(n) == [type |-> "end transition", cand |-> RecordOf(n).cand, ver |-> VersionOf(n)]
OpenCall(t, n) == [type |-> "open", att |-> t, ver |-> VersionOf(n), record |-> RecordOf(n).att]
RestoredCall(t) == [type |-> "restored", att |-> t]

RollForwardCalls(c) ==                                 \* after its commit, its finish attempt, or with nobody to fence
  IF NeedsRollForward(c) /\ (coord[c].phase = "fenced" \/ (coord[c].phase = "ready" /\ Holders(c) = {}))
  THEN {UpdateCall(coord[c].view)} ELSE {}

MayStartStream(t) == IsRun(t) /\ AllPrepared(t)
MayCloseGates(t) == IsRun(t) /\ StagedFirst(t) /\ AllStaged(t)
MayOpenApply(t) == IsRun(t) /\ AllQuiet(t) /\ (IF StagedFirst(t) THEN AllStaged(t) ELSE AllPrepared(t))
MaySendEnd(c) == coord[c].phase = "fenced" /\ AllFollowed(VersionOf(coord[c].view), RecordOf(coord[c].view).cand)
MaySendOpen(c) ==
  /\ coord[c].phase = "fenced" /\ coord[c].view > 0 /\ ~NeedsRollForward(c)
  /\ ModeOf(coord[c].att) = "restore" => IsSent(RestoredCall(coord[c].att))
MaySendRestored(c) ==                                          \* the record was read again and is unchanged (D19)
  coord[c].phase = "fenced" /\ ModeOf(coord[c].att) = "restore" /\ coord[c].view > 0 /\ IsConfirmed(c)

EndCalls == Sent("end transition") \cup {EndCall(coord[c].view) : c \in {d \in Coordinators : MaySendEnd(d)}}
OpenCalls == Sent("open") \cup {OpenCall(coord[c].att, coord[c].view) : c \in {d \in Coordinators : MaySendOpen(d)}}
RestoredCalls == Sent("restored") \cup {RestoredCall(coord[c].att) : c \in {d \in Coordinators : MaySendRestored(d)}}

----------------------------------------------------------------------------
(* Actions of the control plane. Each is one atomic durable step, asked for by coordinator c. *)

AcquireEpoch(c) ==
  /\ epoch' = epoch + 1
  /\ coord' = [coord EXCEPT ![c] = [phase |-> "acquiring", epoch |-> epoch + 1, view |-> 0, att |-> 0]]
  /\ UNCHANGED <<chain, table, dead, late, trainer, own, base, rcv, store, net>>

Prepare(c, mode, cand) ==
  /\ CanPrepare(c, mode, cand)
  /\ \E R \in Wants(c, mode, cand) :
       table' = Append(table, [epoch |-> coord[c].epoch, cand |-> cand, mode |-> mode, view |-> coord[c].view,
                               req |-> R, owners |-> [o \in Owners |-> own[o].inc]])
  /\ coord' = [coord EXCEPT ![c].phase = "prepared", ![c].att = Last + 1]
  /\ UNCHANGED <<chain, epoch, dead, late, trainer, own, base, rcv, store, net>>

Commit(t) ==
  /\ t <= Last /\ IsSent(CommitCall(t)) /\ CanCommit(t)
  /\ chain' = Append(chain, [cand |-> Row(t).cand, att |-> t, req |-> CommittedMembers(t),
                             epoch |-> Row(t).epoch, base |-> BaseVersion(t)])
  /\ UNCHANGED <<epoch, table, dead, late, trainer, own, base, rcv, store, coord, net>>

KillCandidate(c, cand) ==
  /\ MayAsk(c) /\ OpenCandidate(c, cand) /\ cand \notin dead /\ CanKill(c, cand)
  /\ dead' = dead \cup {cand}
  /\ UNCHANGED <<chain, epoch, table, late, trainer, own, base, rcv, store, coord, net>>

Bootstrap(c) ==
  /\ coord[c].phase = "fenced" /\ ModeOf(coord[c].att) = "restore" /\ coord[c].view = 0 /\ CanBootstrap(c)
  /\ chain' = Append(chain, [cand |-> 0, att |-> coord[c].att, req |-> Row(coord[c].att).req,
                             epoch |-> coord[c].epoch, base |-> 0])
  /\ coord' = [coord EXCEPT ![c].view = Len(chain) + 1]
  /\ UNCHANGED <<epoch, table, dead, late, trainer, own, base, rcv, store, net>>

Conflict(c) ==                                               \* a request of c is refused; nothing changes
  /\ \/ coord[c].phase \in {"ready", "fenced"} /\ ~PrepareHoldsEpoch(c)
     \/ {m \in Sent("commit") : m.epoch = coord[c].epoch /\ ~CanCommit(m.att)} # {}
  /\ UNCHANGED vars

----------------------------------------------------------------------------
(* Actions of a coordinator *)

BecomeCoordinator(c) ==                                      \* it holds an epoch, and only then reads the record
  /\ coord[c].phase = "acquiring"
  /\ coord' = [coord EXCEPT ![c].phase = "ready", ![c].view = Len(chain)]
  /\ UNCHANGED <<control, trainer, own, base, rcv, store, net>>

StartAttempt(c) ==
  /\ coord[c].phase = "prepared"
  /\ coord' = [coord EXCEPT ![c].phase = "running"]
  /\ Send(PrepareCall(coord[c].att))
  /\ UNCHANGED <<control, trainer, own, base, rcv, store>>

CompleteAttempt(c) ==
  /\ coord[c].phase = "running" /\ IsOver(coord[c].att)
  /\ coord' = [coord EXCEPT ![c].phase = IF ModeOf(coord[c].att) \in Delta THEN "acked" ELSE "fenced"]
  /\ UNCHANGED <<control, trainer, own, base, rcv, store, net>>

FailAttempt(c) ==                                            \* a deadline, a refusal, a lost member, an abort
  /\ coord[c].phase = "running"
  /\ coord' = [coord EXCEPT ![c].phase = "ready"]
  /\ Send(StopCall(coord[c].att))
  /\ UNCHANGED <<control, trainer, own, base, rcv, store>>

SendCommit(c) ==
  /\ coord[c].phase = "acked" /\ HasAllAcks(coord[c].att) /\ Row(coord[c].att).view = coord[c].view
  /\ coord' = [coord EXCEPT ![c].phase = "committing"]
  /\ Send(CommitCall(coord[c].att))
  /\ UNCHANGED <<control, trainer, own, base, rcv, store>>

ResolveCommit(c) ==
  /\ coord[c].phase = "committing"
  /\ \/ K.att = coord[c].att                                 \* by the reply or by a read
        /\ coord' = [coord EXCEPT ![c].phase = "fenced", ![c].view = Len(chain)]
        /\ UNCHANGED late
     \/ K.att # coord[c].att /\ PrepareHoldsEpoch(c)         \* read after the deadline, so it is final
        /\ coord' = [coord EXCEPT ![c].phase = "ready", ![c].view = Len(chain)]
        /\ late' = Expired(coord[c].att)
  /\ UNCHANGED <<chain, epoch, table, dead, trainer, own, base, rcv, store, net>>

StepDown(c) ==
  /\ coord[c].phase \in {"ready", "fenced", "committing"} /\ ~PrepareHoldsEpoch(c)
  /\ coord' = [coord EXCEPT ![c] = [phase |-> "out", epoch |-> 0, view |-> 0, att |-> 0]]
  /\ UNCHANGED <<control, trainer, own, base, rcv, store, net>>

RollForward(c) ==
  /\ \E m \in RollForwardCalls(c) : Send(m)
  /\ UNCHANGED <<control, trainer, own, base, rcv, store, coord>>

----------------------------------------------------------------------------
(* Actions of an owner *)

StartOwner(o) ==                                             \* after a crash: the baseline is lost, the candidate is not (A7)
  /\ own' = [own EXCEPT ![o] = [@ EXCEPT !.inc = @ + 1, !.att = 0, !.fenced = 0, !.status = "idle",
                                         !.kind = "lost", !.ver = 0, !.filling = Unknown]]
  /\ base' = [i \in Items |-> IF OwnerOf[i] = o THEN Raw ELSE base[i]]
  /\ UNCHANGED <<control, trainer, rcv, store, coord, net>>

BeginTransition(o) ==                                        \* the first owner stands for the optimizer step of all
  LET c == NextCandidate(o) IN
  /\ c # 0
  /\ own' = [own EXCEPT ![o].frozen = c, ![o].began = c]
  /\ IF c <= own[o].began \/ c > step
       THEN /\ content' = [content EXCEPT ![c] = [i \in Items |->
                 Flip(content[own[OwnerOf[i]].live][i], IF i \in Changes[step + 1] THEN {step + 1} ELSE {})]]
            /\ step' = step + 1
       ELSE UNCHANGED trainer
  /\ UNCHANGED <<control, base, rcv, store, coord, net>>

OwnerPrepare(o, t) ==
  /\ IsSent(PrepareCall(t)) /\ IsOwnerMember(o, t) /\ OwnerIsNewer(o, t) /\ OwnerIsDrained(o) /\ MayStream(o, t)
  /\ own' = [own EXCEPT ![o].att = t, ![o].status = "prepared"]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

EmitPayload(o, i) ==
  LET t == own[o].att IN
  /\ own[o].status \in {"prepared", "streaming", "failed"} /\ ModeOf(t) # "finish"
  /\ OwnerOf[i] = o /\ ~IsEmitted(t, i) /\ MayStream(o, t) /\ Payload(o, t, i).delta # {}
  /\ Told(StreamCall(t), MayStartStream(t))
  /\ net' = net \cup {StreamCall(t), Payload(o, t, i)}
  /\ own' = [own EXCEPT ![o].status = IF @ = "failed" THEN @ ELSE "streaming"]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord>>

EndStream(o) ==                                              \* END, or a manifest in an object store: last, even if empty
  LET t == own[o].att IN
  /\ own[o].status \in {"prepared", "streaming"} /\ ModeOf(t) # "finish" /\ MayStream(o, t)
  /\ Told(StreamCall(t), MayStartStream(t)) /\ AllEmitted(o, t)
  /\ net' = net \cup {StreamCall(t), [type |-> "end", att |-> t, owner |-> o, payloads |-> Listed(o, t)]}
  /\ own' = [own EXCEPT ![o].status = "ended"]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord>>

StopOwner(o, t) ==
  /\ \/ /\ t = own[o].att /\ ~OwnerIsDrained(o)
        /\ \/ IsSent(StopCall(t)) \/ own[o].status = "failed" \/ IsDead(own[o].frozen)
           \/ \E u \in 1..Last : IsSent(PrepareCall(u)) /\ IsOwnerMember(o, u) /\ OwnerIsNewer(o, u)
        /\ own' = [own EXCEPT ![o].status = "stopped"]
     \/ /\ IsSent(StopCall(t)) /\ IsOwnerMember(o, t) /\ OwnerIsNewer(o, t)      \* keeps a late prepare of t out
        /\ own' = [own EXCEPT ![o].fenced = t]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

FailOwner(o) ==
  /\ own[o].status \in {"prepared", "streaming"}
  /\ own' = [own EXCEPT ![o].status = "failed"]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

UpdateBaseline(o, cand) ==
  /\ \E m \in Sent("update") :
       /\ m.cand = cand /\ ~HoldsVersion(o, m.ver) /\ MayUpdateBaseline(o, m)
       /\ own' = [own EXCEPT ![o].kind = "updating", ![o].filling = m.ver]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

RebuildBaseline(o, c) ==
  LET n == coord[c].view IN
  /\ MayAsk(c) /\ n > 0 /\ MayRebuild(o, RecordOf(n).cand)
  /\ own' = [own EXCEPT ![o].filling = VersionOf(n)]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

CopyItem(o, i) ==
  /\ own[o].filling # Unknown /\ OwnerOf[i] = o
  /\ base' = [base EXCEPT ![i] = content[Source(o)][i]]
  /\ UNCHANGED <<control, trainer, own, rcv, store, coord, net>>

BaselineFilled(o) ==
  /\ own[o].filling # Unknown /\ AllCopied(o)
  /\ own' = [own EXCEPT ![o].kind = "at", ![o].ver = own[o].filling, ![o].filling = Unknown]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

LoseBaseline(o) ==
  /\ own[o].kind # "lost" \/ own[o].filling # Unknown
  /\ own' = [own EXCEPT ![o].kind = "lost", ![o].ver = 0, ![o].filling = Unknown]
  /\ base' = [i \in Items |-> IF OwnerOf[i] = o THEN Raw ELSE base[i]]
  /\ UNCHANGED <<control, trainer, rcv, store, coord, net>>

EndTransition(o, cand) ==
  /\ own[o].frozen # 0
  /\ \E m \in EndCalls :
       /\ m.cand = cand /\ MayEndTransition(o, m)
       /\ own' = [own EXCEPT ![o].frozen = 0, ![o].live = cand]
       /\ net' = net \cup {m}
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord>>

DropCandidate(o) ==                                          \* and the committed version is loaded again
  /\ own[o].frozen # 0 /\ MayDrop(o)
  /\ own' = [own EXCEPT ![o].frozen = 0]
  /\ UNCHANGED <<control, trainer, base, rcv, store, coord, net>>

----------------------------------------------------------------------------
(* Actions of a receiver *)

NewReceiver(inc, tag, known) ==
  [inc |-> inc, att |-> 0, fenced |-> 0, stopped |-> TRUE, drained |-> TRUE, tag |-> tag, loaded |-> known,
   gate |-> FALSE, requests |-> {}, seen |-> {}, ends |-> {}, pending |-> {}, open |-> FALSE, writing |-> FALSE, acked |-> FALSE]

StartReceiver(r, known) ==                                   \* known: it loaded the checkpoint that training began with
  /\ rcv' = [rcv EXCEPT ![r] = NewReceiver(@.inc + 1, StartTag(r), known)]
  /\ store' = [store EXCEPT ![r] = IF known THEN content[0] ELSE [i \in Items |-> Raw]]
  /\ UNCHANGED <<control, trainer, own, base, coord, net>>

Ack(r, t, proved, payloads) ==
  [type |-> "ack", att |-> t, receiver |-> r, inc |-> rcv[r].inc, proved |-> proved, payloads |-> payloads]

IsAsked(r, t) == IsSent(PrepareCall(t)) /\ IsMember(r, t) /\ IsNewer(r, t)

Installed(r, t, proved) ==
  [rcv[r] EXCEPT !.att = t, !.tag = TagAtInstall(r, t), !.gate = @ /\ ~ClosesGate(t), !.seen = SeenAtInstall(r),
                 !.ends = {}, !.open = FALSE, !.writing = FALSE, !.acked = proved, !.stopped = FALSE,
                 !.drained = (ModeOf(t) = "finish" \/ proved)]

EndpointPrepare(r, t) ==
  /\ IsAsked(r, t) /\ ModeOf(t) # "restore" /\ IsDrained(r) /\ IsEligible(r, t)
  /\ rcv' = [rcv EXCEPT ![r] = Installed(r, t, FALSE)]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

StartRestore(r, t, proved) ==                                \* proved: storage is known to be the baseline
  /\ IsAsked(r, t) /\ ModeOf(t) = "restore" /\ IsDrained(r) /\ (proved => IsProved(r, t))
  /\ rcv' = [rcv EXCEPT ![r] = Installed(r, t, proved)]
  /\ net' = IF proved THEN net \cup {Ack(r, t, TRUE, {})} ELSE net
  /\ UNCHANGED <<control, trainer, own, base, store, coord>>

Refuses(e, t) ==
  IF e \in Receivers THEN IsAsked(e, t) /\ ~IsEligible(e, t)
  ELSE IsSent(PrepareCall(t)) /\ IsOwnerMember(e, t) /\ OwnerIsNewer(e, t) /\ ~MayStream(e, t)

RefusePrepare(e) ==                                          \* the coordinator learns it and fails the attempt
  {t \in 1..Last : Refuses(e, t)} # {} /\ UNCHANGED vars

CloseGate(r, t) ==
  /\ MayCloseGate(r, t) /\ rcv[r].gate /\ StagedFirst(t)
  /\ Told(CloseCall(t), MayCloseGates(t)) /\ Send(CloseCall(t))
  /\ rcv' = [rcv EXCEPT ![r].gate = FALSE]
  /\ UNCHANGED <<control, trainer, own, base, store, coord>>

OpenApply(r, t) ==
  /\ IsRunning(r, t) /\ ~rcv[r].open /\ ModeOf(t) # "finish"
  /\ Told(ApplyCall(t), MayOpenApply(t)) /\ Send(ApplyCall(t))
  /\ rcv' = [rcv EXCEPT ![r].open = TRUE]
  /\ UNCHANGED <<control, trainer, own, base, store, coord>>

(* A damaged payload has wrong bits and shows it; a foreign one is whole, but not the one that the owner listed. *)
Arrived(p, how) ==
  CASE how = "sound"   -> p
    [] how = "damaged" -> [p EXCEPT !.delta = @ \cup Raw, !.target = @ \cup Raw]
    [] how = "foreign" -> IF p.enc = "xor" THEN [p EXCEPT !.delta = {}] ELSE [p EXCEPT !.target = Flip(@, p.delta)]

Accept(r, t, i, how) ==
  /\ PayloadIsCurrent(r, t) /\ ~rcv[r].acked /\ IsIntact(how)
  /\ \E p \in Sent("payload") :
       /\ p.att = t /\ p.item = i /\ NotDuplicate(r, p)
       /\ rcv' = [rcv EXCEPT ![r].seen = @ \cup {Digest(Arrived(p, how))}, ![r].pending = @ \cup {Arrived(p, how)}]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

SeeManifest(r, t, o) ==
  /\ EndIsCurrent(r, t) /\ ~rcv[r].acked /\ \A f \in rcv[r].ends : f.owner # o
  /\ \E e \in Sent("end") :
       /\ e.att = t /\ e.owner = o
       /\ rcv' = [rcv EXCEPT ![r].ends = @ \cup {[owner |-> o, payloads |-> e.payloads]}]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

AttemptCalls == {m \in net : m.type \in {"prepare", "stop", "apply", "close", "open", "payload", "end"}}

IgnoreDuplicate(r) ==
  {p \in Sent("payload") : PayloadIsCurrent(r, p.att) /\ ~NotDuplicate(r, p)} # {} /\ UNCHANGED vars

IsStale(e, t) ==
  IF e \in Receivers THEN ~IsRunning(e, t) \/ rcv[e].acked
  ELSE t # own[e].att \/ own[e].status \in {"ended", "stopped", "failed"}

IgnoreStale(e) ==                                            \* a call or payload of an attempt that is not running here
  {m \in AttemptCalls : IsStale(e, m.att)} # {} /\ UNCHANGED vars

StartApply(r) ==                                             \* the tag is lowered before the first write (D25)
  /\ IsRunning(r, rcv[r].att) /\ ~rcv[r].writing /\ ~NothingPending(r) /\ MayWrite(r)
  /\ rcv' = [rcv EXCEPT ![r].writing = TRUE, ![r].tag = DirtyTag(r), ![r].loaded = FALSE]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

ApplyItem(r, i) ==                                           \* a permitted write takes effect
  /\ rcv[r].writing /\ MayWrite(r)
  /\ \E p \in rcv[r].pending :
       /\ p.item = i
       /\ store' = [store EXCEPT ![r][i] = IF p.enc = "xor" THEN Xor(@, p.delta) ELSE Overwrite(@, p.delta, p.target)]
       /\ rcv' = [rcv EXCEPT ![r].pending = @ \ {p}]
  /\ UNCHANGED <<control, trainer, own, base, coord, net>>

Flush(r) ==
  LET t == rcv[r].att IN
  /\ MayFlush(r)
  /\ rcv' = [rcv EXCEPT ![r].acked = TRUE, ![r].gate = GateAfterFlush(r),
                        ![r].tag = IF ModeOf(t) = "restore" THEN @ ELSE Done(BaseVersion(t), Row(t).cand, t)]
  /\ Send(Ack(r, t, FALSE, rcv[r].seen))
  /\ UNCHANGED <<control, trainer, own, base, store, coord>>

FailReceiver(r) ==                                           \* a loader condition, a bad payload, a post-apply check
  /\ rcv[r].att # 0 /\ ModeAt(r) # "finish" /\ ~rcv[r].stopped /\ ~rcv[r].acked
  /\ rcv' = [rcv EXCEPT ![r].stopped = TRUE]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

StopAndWait(r, t) ==                                         \* the queue is dropped, issued writes have taken effect
  /\ \/ /\ t = rcv[r].att /\ ~IsDrained(r)
        /\ \/ IsSent(StopCall(t)) \/ rcv[r].stopped
           \/ \E u \in 1..Last : IsAsked(r, u) /\ IsEligible(r, u)
        /\ rcv' = [rcv EXCEPT ![r].stopped = StoppedByStop(r), ![r].drained = TRUE, ![r].pending = {}]
     \/ /\ IsSent(StopCall(t)) /\ IsMember(r, t) /\ IsNewer(r, t)                \* keeps a late prepare of t out
        /\ rcv' = [rcv EXCEPT ![r].fenced = t]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

OpenGate(r, t) ==
  /\ ~rcv[r].gate
  /\ \E m \in OpenCalls :
       /\ m.att = t /\ MayOpenGate(r, m)
       /\ rcv' = [rcv EXCEPT ![r].gate = TRUE, ![r].tag = Clean(m.ver)]
       /\ net' = net \cup {m}
  /\ UNCHANGED <<control, trainer, own, base, store, coord>>

AdmitRequest(r, q) ==
  /\ MayAdmit(r) /\ q \notin rcv[r].requests
  /\ rcv' = [rcv EXCEPT ![r].requests = @ \cup {q}]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

FinishRequest(r, q) ==
  /\ q \in rcv[r].requests
  /\ rcv' = [rcv EXCEPT ![r].requests = @ \ {q}]
  /\ UNCHANGED <<control, trainer, own, base, store, coord, net>>

FinishRestore(r, t) ==
  /\ MayFinishRestore(r, t) /\ rcv[r].tag # Clean(BaseVersion(t)) /\ RestoredCall(t) \in RestoredCalls
  /\ rcv' = [rcv EXCEPT ![r].tag = Clean(BaseVersion(t))]
  /\ Send(RestoredCall(t))
  /\ UNCHANGED <<control, trainer, own, base, store, coord>>

----------------------------------------------------------------------------
Init ==
  /\ chain = <<>> /\ epoch = 0 /\ table = <<>> /\ dead = {} /\ late = {} /\ net = {} /\ step = 0
  /\ content = [c \in 0..MaxCandidate |-> [i \in Items |-> {}]]
  /\ own = [o \in Owners |-> [inc |-> 1, att |-> 0, fenced |-> 0, status |-> "idle", kind |-> "at", ver |-> 0,
                              filling |-> Unknown, frozen |-> 0, began |-> 0, live |-> 0]]
  /\ base = [i \in Items |-> {}]
  /\ rcv = [r \in Receivers |-> NewReceiver(1, None, TRUE)]
  /\ store = [r \in Receivers |-> [i \in Items |-> {}]]
  /\ coord = [c \in Coordinators |-> [phase |-> "out", epoch |-> 0, view |-> 0, att |-> 0]]

Next ==
  \/ \E c \in Coordinators :
       \/ AcquireEpoch(c) \/ BecomeCoordinator(c) \/ StartAttempt(c) \/ CompleteAttempt(c) \/ FailAttempt(c)
       \/ SendCommit(c) \/ ResolveCommit(c) \/ StepDown(c) \/ RollForward(c) \/ Bootstrap(c) \/ Conflict(c)
       \/ \E mode \in Modes, cand \in 0..MaxCandidate : Prepare(c, mode, cand)
       \/ \E cand \in 1..MaxCandidate : KillCandidate(c, cand)
  \/ \E t \in AttemptIds : Commit(t)
  \/ \E o \in Owners :
       \/ StartOwner(o) \/ BeginTransition(o) \/ EndStream(o) \/ FailOwner(o) \/ BaselineFilled(o) \/ LoseBaseline(o)
       \/ DropCandidate(o) \/ RefusePrepare(o) \/ IgnoreStale(o)
       \/ \E t \in AttemptIds : OwnerPrepare(o, t) \/ StopOwner(o, t)
       \/ \E i \in Items : EmitPayload(o, i) \/ CopyItem(o, i)
       \/ \E c \in Coordinators : RebuildBaseline(o, c)
       \/ \E cand \in 1..MaxCandidate : UpdateBaseline(o, cand) \/ EndTransition(o, cand)
  \/ \E r \in Receivers :
       \/ \E known \in BOOLEAN : StartReceiver(r, known)
       \/ StartApply(r) \/ Flush(r) \/ FailReceiver(r) \/ RefusePrepare(r) \/ IgnoreDuplicate(r) \/ IgnoreStale(r)
       \/ \E t \in AttemptIds :
            \/ EndpointPrepare(r, t) \/ CloseGate(r, t) \/ OpenApply(r, t) \/ StopAndWait(r, t)
            \/ OpenGate(r, t) \/ FinishRestore(r, t)
            \/ \E proved \in BOOLEAN : StartRestore(r, t, proved)
            \/ \E i \in Items, how \in Arrivals : Accept(r, t, i, how)
            \/ \E o \in Owners : SeeManifest(r, t, o)
       \/ \E i \in Items : ApplyItem(r, i)
       \/ \E q \in Requests : AdmitRequest(r, q) \/ FinishRequest(r, q)

----------------------------------------------------------------------------
(* Fairness: a process that can go on does so in the end. Nothing promises that a fault, an abort, a new        *)
(* candidate or a request happens.                                                                             *)

IsStuck(c) ==                                                \* the attempt of c can not be acknowledged any more
  LET t == coord[c].att IN
  \/ \E m \in Row(t).req : LET r == m[1] IN
       \/ ~SameIncarnation(m[2], rcv[r].inc) \/ rcv[r].att > t \/ rcv[r].fenced >= t
       \/ IF rcv[r].att = t THEN rcv[r].stopped /\ ~rcv[r].acked ELSE ~IsEligible(r, t)
  \/ \E o \in Owners :
       \/ ~IsOwnerMember(o, t) \/ own[o].att > t \/ own[o].fenced >= t
       \/ own[o].att = t /\ own[o].status \in {"stopped", "failed"}
       \/ ~MayStream(o, t) /\ ~(own[o].att = t /\ own[o].status = "ended")

CoordinatorProgress(c) ==
  \/ BecomeCoordinator(c) \/ StartAttempt(c) \/ CompleteAttempt(c) \/ SendCommit(c) \/ ResolveCommit(c)
  \/ RollForward(c) \/ Bootstrap(c)
  \/ (coord[c].phase = "running" /\ IsStuck(c) /\ FailAttempt(c))
  \/ \E mode \in Modes, cand \in 0..MaxCandidate : Prepare(c, mode, cand)
  \/ \E o \in Owners : RebuildBaseline(o, c)
OwnerProgress(o) ==
  \/ EndStream(o) \/ BaselineFilled(o) \/ DropCandidate(o) \/ (own[o].began < step /\ BeginTransition(o))
  \/ \E t \in AttemptIds : OwnerPrepare(o, t) \/ StopOwner(o, t)
  \/ \E i \in Items : EmitPayload(o, i) \/ CopyItem(o, i)
  \/ \E cand \in 1..MaxCandidate : UpdateBaseline(o, cand) \/ EndTransition(o, cand)
ReceiverProgress(r) ==
  \/ StartApply(r) \/ Flush(r)
  \/ \E t \in AttemptIds :
       \/ EndpointPrepare(r, t) \/ StartRestore(r, t, FALSE) \/ CloseGate(r, t) \/ OpenApply(r, t) \/ StopAndWait(r, t)
       \/ OpenGate(r, t) \/ FinishRestore(r, t)
       \/ \E i \in Items : Accept(r, t, i, "sound")
       \/ \E o \in Owners : SeeManifest(r, t, o)
  \/ \E i \in Items : ApplyItem(r, i)

Fairness ==
  /\ WF_vars(\E t \in AttemptIds : Commit(t))
  /\ \A c \in Coordinators : WF_vars(CoordinatorProgress(c))
  /\ \A o \in Owners : WF_vars(OwnerProgress(o))
  /\ \A r \in Receivers : WF_vars(ReceiverProgress(r)) /\ WF_vars(\E q \in Requests : FinishRequest(r, q))

Spec == Init /\ [][Next]_vars
FairSpec == Spec /\ Fairness
=============================================================================
