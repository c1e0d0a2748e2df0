"""What an optimizer step changes: scattered elements, one, all, the same flip in every tensor, a shared scale, nothing.

A change of the shared scale moves every residual tensor at once. The same flip in every tensor is what a step does to
tied ones. A candidate is always drawn from the committed weights that it was trained from.

Paper: Section 5 (changed set, residual conversion)   Spec: Changes
"""

from __future__ import annotations

import numpy as np

from nemo_dcr.bits import Words
from nemo_dcr.ids import CandidateId
from nemo_dcr.testing.local_source import SCALE, LocalSource

KINDS = ("some", "one", "all", "alike", "some", "one", "scale", "none")
RATES = {"some": 0.3, "all": 1.0}


def draw_candidate(source: LocalSource, name: CandidateId, base: CandidateId, seed: int) -> None:
    """Make up the weights of a candidate; the seed chooses the kind of change and where it is."""
    kind = KINDS[seed % len(KINDS)]
    if kind == "scale" and not source.scaled:
        kind = "some"
    source.rng = np.random.default_rng([seed, len(source.weights)])
    source.draw(name, base, RATES.get(kind, 0.0))
    new, old = source.weights[name], source.weights[base]
    changed = [each for each in sorted(new) if each != SCALE and len(new[each])]
    if kind == "one":
        _flip(new[changed[seed % len(changed)]], seed)
    if kind == "alike":
        for each in changed:
            _flip(new[each], 0)
    if SCALE in new and kind not in RATES:
        new[SCALE] = old[SCALE] + old[SCALE].dtype.type(1 + seed if kind == "scale" else 0)


def _flip(words: Words, at: int) -> None:
    words[at % len(words)] ^= words.dtype.type(1)
