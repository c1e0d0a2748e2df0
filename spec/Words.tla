------------------------------- MODULE Words -------------------------------
(* The words of one item, and what the records of a payload do to them.                                       *)
(*                                                                                                            *)
(* An item is a vector of bits, one for each candidate, written as the set of the bits that are 1. Candidate c *)
(* changes bit c and no other, so a wrong baseline, a wrong resident version, a record that was applied twice *)
(* or not at all shows as a wrong set. Bit 0 belongs to no candidate: it is 1 in raw or damaged storage only.  *)
(* One bit may stand for any set of stored bits, since real records act on each bit alone (PROOFS.md L5, L6). *)
(*                                                                                                            *)
(* Paper: Section 3 (canonical coordinates); Appendix D (XOR and overwrite)                                   *)
EXTENDS Naturals

Junk == 0                                                    \* the bit that no version has
Raw == {Junk}                                                \* storage of a process that loaded nothing we know

Flip(a, b) == (a \ b) \cup (b \ a)                           \* exclusive or; also the changed set of two contents

Xor(word, delta) == Flip(word, delta)                        \* repeated, it takes itself back
Overwrite(word, delta, target) == (word \ delta) \cup (target \cap delta)   \* bits outside delta stay as they are
=============================================================================
