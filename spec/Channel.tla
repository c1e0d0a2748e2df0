------------------------------ MODULE Channel ------------------------------
(* The network: every call, payload, manifest and acknowledgement that was ever sent.                          *)
(*                                                                                                            *)
(* Nothing leaves `net`. So a message may be received late, more than once, in any order, or never: loss,      *)
(* duplication, reordering and delay are free and without bound. A message is a record with a field `type`;    *)
(* what a call says beyond its attempt is read from the attempt table, whose rows never change.                *)
(*                                                                                                            *)
(* Paper: Appendix B (control calls), Section 7 (delivery)                                                     *)
VARIABLE net

Send(message) == net' = net \cup {message}
IsSent(message) == message \in net
Sent(type) == {message \in net : message.type = type}
=============================================================================
