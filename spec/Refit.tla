------------------------------- MODULE Refit -------------------------------
(* Level 0: what a refit is, on one page.                                                                     *)
(*                                                                                                            *)
(* There is a history of committed policies. Each receiver has stored bits and a gate. While its gate is      *)
(* closed a receiver may hold anything: an old policy, a new one, or a mixture. One atomic step makes a new    *)
(* policy the committed one and binds receivers to it: each of them holds exactly its bits at that moment, and *)
(* is not written while it stays bound. A gate opens over one whole committed policy: the last one where the   *)
(* receiver is bound, possibly an older one where it was left out. So no request ever sees a mixture.          *)
(*                                                                                                            *)
(* DeltaRefit refines this module; TLC checks the refinement as the properties RefinesRefit and RefitSteps.    *)
(*                                                                                                            *)
(* Paper: Section 3 (problem), Section 6.3 (joint commit)                                                      *)
EXTENDS Naturals, Sequences

CONSTANT Hosts                         \* the receivers

VARIABLES history,                     \* sequence of the contents of all committed policies
          bound,                       \* receivers of the last commit that still live and joined nothing newer
          bits,                        \* bits[r]: what receiver r stores
          open                         \* open[r]: r answers requests

vars == <<history, bound, bits, open>>

Init == history = <<>> /\ bound = {} /\ open = [r \in Hosts |-> FALSE]

OnlyAt(r) == \A s \in Hosts \ {r} : bits'[s] = bits[s] /\ open'[s] = open[s]

CommitPolicy == /\ Len(history') = Len(history) + 1
                /\ history' = Append(history, history'[Len(history')])
                /\ \A r \in bound' : ~open[r] /\ bits[r] = history'[Len(history')]
                /\ UNCHANGED <<bits, open>>

Write(r) == /\ ~open[r] /\ r \notin bound /\ UNCHANGED <<history, bound, open>> /\ OnlyAt(r)

OpenGate(r) == /\ \E k \in DOMAIN history : bits[r] = history[k] /\ (r \in bound => k = Len(history))
               /\ open' = [open EXCEPT ![r] = TRUE] /\ UNCHANGED <<history, bound, bits>>

Release(r) == /\ open' \in {open, [open EXCEPT ![r] = FALSE]}  \* r joins something newer, or just closes its gate
              /\ bound' \in {bound, bound \ {r}} /\ UNCHANGED <<history, bits>>

Crash(r) == /\ ~open'[r] /\ bound' = bound \ {r}              \* the process is gone, whatever it did; a new one starts
            /\ OnlyAt(r) /\ UNCHANGED history

Next == CommitPolicy \/ \E r \in Hosts : Write(r) \/ OpenGate(r) \/ Release(r) \/ Crash(r)

Spec == Init /\ [][Next]_vars
=============================================================================
