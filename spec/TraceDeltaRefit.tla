--------------------------- MODULE TraceDeltaRefit ---------------------------
(* Traces of running code as behaviours of DeltaRefit, many in one run of TLC.                                  *)
(*                                                                                                            *)
(* Each line of a trace names an action with its parameters and says what the actor looks like after it. A log *)
(* is accepted when it can be followed to its end: `Reached` prints each place that is reached, and the runner  *)
(* (spec/tlc.py trace) reads how far each log got. All properties are checked on the way. The candidates of a   *)
(* log have numbers of their own, so that `Changes` speaks for all logs at once.                               *)
(*                                                                                                            *)
(* Docs: docs/trace.md                                                                                        *)
EXTENDS Properties, TLC

CONSTANT TraceLogs            \* a sequence of logs: [before |-> candidates of the logs before, steps |-> a sequence of steps]
VARIABLES log, at             \* which log, and how many of its steps were taken

ASSUME TLCSet(99, TraceLogs)  \* a constant from the cfg is evaluated at each use, this one is not
Logs == TLCGet(99)

(* One step e: action e.a with parameters e.p. *)
Takes(e) == LET p == e.p IN
  CASE e.a = "AcquireEpoch" -> AcquireEpoch(p[1])
    [] e.a = "BecomeCoordinator" -> BecomeCoordinator(p[1])
    [] e.a = "StartAttempt" -> StartAttempt(p[1])
    [] e.a = "CompleteAttempt" -> CompleteAttempt(p[1])
    [] e.a = "FailAttempt" -> FailAttempt(p[1])
    [] e.a = "SendCommit" -> SendCommit(p[1])
    [] e.a = "ResolveCommit" -> ResolveCommit(p[1])
    [] e.a = "StepDown" -> StepDown(p[1])
    [] e.a = "RollForward" -> RollForward(p[1])
    [] e.a = "Bootstrap" -> Bootstrap(p[1])
    [] e.a = "Conflict" -> Conflict(p[1])
    [] e.a = "Prepare" -> Prepare(p[1], p[2], p[3]) /\ table'[Len(table')].req = p[4]
    [] e.a = "KillCandidate" -> KillCandidate(p[1], p[2])
    [] e.a = "Commit" -> Commit(p[1])
    [] e.a = "StartOwner" -> StartOwner(p[1])
    [] e.a = "BeginTransition" -> BeginTransition(p[1])
    [] e.a = "EndStream" -> EndStream(p[1])
    [] e.a = "FailOwner" -> FailOwner(p[1])
    [] e.a = "BaselineFilled" -> BaselineFilled(p[1])
    [] e.a = "LoseBaseline" -> LoseBaseline(p[1])
    [] e.a = "DropCandidate" -> DropCandidate(p[1])
    [] e.a = "RefusePrepare" -> RefusePrepare(p[1])
    [] e.a = "IgnoreStale" -> IgnoreStale(p[1])
    [] e.a = "OwnerPrepare" -> OwnerPrepare(p[1], p[2])
    [] e.a = "StopOwner" -> StopOwner(p[1], p[2])
    [] e.a = "EmitPayload" -> EmitPayload(p[1], p[2])
    [] e.a = "CopyItem" -> CopyItem(p[1], p[2])
    [] e.a = "RebuildBaseline" -> RebuildBaseline(p[1], p[2])
    [] e.a = "UpdateBaseline" -> UpdateBaseline(p[1], p[2])
    [] e.a = "EndTransition" -> EndTransition(p[1], p[2])
    [] e.a = "StartReceiver" -> StartReceiver(p[1], p[2])
    [] e.a = "StartApply" -> StartApply(p[1])
    [] e.a = "Flush" -> Flush(p[1])
    [] e.a = "FailReceiver" -> FailReceiver(p[1])
    [] e.a = "IgnoreDuplicate" -> IgnoreDuplicate(p[1])
    [] e.a = "EndpointPrepare" -> EndpointPrepare(p[1], p[2])
    [] e.a = "CloseGate" -> CloseGate(p[1], p[2])
    [] e.a = "OpenApply" -> OpenApply(p[1], p[2])
    [] e.a = "StopAndWait" -> StopAndWait(p[1], p[2])
    [] e.a = "OpenGate" -> OpenGate(p[1], p[2]) /\ rcv'[p[1]].tag = Clean(p[3])
    [] e.a = "FinishRestore" -> FinishRestore(p[1], p[2])
    [] e.a = "StartRestore" -> StartRestore(p[1], p[2], p[3])
    [] e.a = "Accept" -> Accept(p[1], p[2], p[3], p[4])
    [] e.a = "SeeManifest" -> SeeManifest(p[1], p[2], p[3])
    [] e.a = "ApplyItem" -> ApplyItem(p[1], p[2])
    [] e.a = "AdmitRequest" -> AdmitRequest(p[1], p[2])
    [] e.a = "FinishRequest" -> FinishRequest(p[1], p[2])

(* Whose words an oracle saw in the storage of rank e.n: s.c are the candidates of this log that item s.i is equal to.  *)
Candidates == {0} \cup {c \in 1..step' : c > Logs[log].before}
Stored(e) == \A s \in e.o.stored :
  LET held == {c \in Candidates : content'[c][s.i] = store'[e.n][s.i]} IN
  held \subseteq s.c /\ (held = {} => s.c = {} \/ Raw \subseteq store'[e.n][s.i])

(* What the line says about its actor e.n after the step; e.k is "" where the line is not at its end. *)
Shows(e) ==
  CASE e.k = "receiver" -> /\ rcv'[e.n].att = e.o.att /\ rcv'[e.n].tag = e.o.tag /\ rcv'[e.n].gate = e.o.gate
                           /\ Stored(e)
    [] e.k = "owner" -> /\ own'[e.n].att = e.o.att /\ own'[e.n].frozen = e.o.frozen
                        /\ own'[e.n].kind = e.o.kind /\ own'[e.n].ver = e.o.ver
    [] e.k = "coordinator" -> coord'[e.n].epoch = e.o.epoch /\ coord'[e.n].phase \in e.o.phases
    [] e.k = "control" -> epoch' = e.o.epoch /\ Len(table') = e.o.last /\ Len(chain') = e.o.records
    [] OTHER -> TRUE

TraceInit ==
  /\ log \in 1..Len(Logs) /\ at = -1 /\ Init

(* Before the first line: candidates of this log come after those of the logs before. *)
Load ==
  /\ at = -1 /\ at' = 0
  /\ step' = Logs[log].before
  /\ own' = [o \in Owners |-> [own[o] EXCEPT !.began = Logs[log].before]]
  /\ UNCHANGED <<control, content, base, rcv, store, coord, net, log>>

Follow ==
  /\ at >= 0 /\ at < Len(Logs[log].steps)
  /\ LET e == Logs[log].steps[at + 1] IN Takes(e) /\ Shows(e)
  /\ at' = at + 1 /\ UNCHANGED log

TraceSpec == TraceInit /\ [][Load \/ Follow]_<<vars, log, at>>

Reached == PrintT(<<"AT", log, at>>)                         \* a constraint that is always true
=============================================================================
