"""Mutants: the model with one guard weakened. Each breaks an invariant with a finite counterexample, or is proved safe.

`breaks` names a claim that the weakened model does not keep; the claim is the one that says why the guard is there. A
mutant without it is proved to keep everything: the guard is defence in depth, or serves progress, and `covered_by`
names the unit test that looks after it. Names are those of Mutants.tla where it has the mutant.

Spec: Mutants   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof.mutant import Mutant
from spec.proof.receiver_mutants import ACKNOWLEDGEMENTS, ATTEMPTS, GATES
from spec.proof.record_mutants import BASELINES, COMMITS

MUTANTS: dict[str, Mutant] = {each.name: each for each in (*ATTEMPTS, *ACKNOWLEDGEMENTS, *COMMITS, *BASELINES, *GATES)}
