"""What Hypothesis draws for a run of the state machine: loaders, shards, sizes and the gate.

Spec: Receivers, Owners, GateMode
"""

from __future__ import annotations

from hypothesis import strategies as st

from model_tests.engines import TABLES
from model_tests.nodes import Draw
from nemo_dcr.config import GateMode

SEEDS = st.integers(0, 1 << 16)
"""Chooses among what is possible at that moment."""


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """What the two sides are made of."""
    owners, seed = draw(st.integers(1, 2)), draw(SEEDS)
    return Draw(
        table=(draw(st.integers(0, TABLES - 1)) + seed) % TABLES,  # a varied seed takes another table
        seed=seed,
        instances=draw(st.integers(1, 3)),
        ranks=draw(st.integers(1, 2)),
        owners=owners,
        gate=draw(st.sampled_from((GateMode.SYNC, GateMode.ASYNC))),
        residual=owners == 1 and draw(st.booleans()),
        chunk=draw(st.sampled_from((64, 1, 16, 512))),
        loaded=draw(st.booleans()),
    )
