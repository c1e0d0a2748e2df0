"""The model: all actions of all actors, with the names that traces and DeltaRefit.tla use.

Paper: Section 6.3; Algorithms B.1, B.2   Spec: Next of DeltaRefit   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from spec.proof import control, coordinator, owners, receivers
from spec.proof.dsl import Action, action_name

TRACED: dict[str, Action] = {
    action_name(action): action for module in (control, coordinator, owners, receivers) for action in module.ACTIONS
}
"""Actions that write a line of a trace, by the name in that line."""

UNTRACED: dict[str, Action] = {
    action_name(action): action for module in (coordinator, owners, receivers) for action in module.UNTRACED
}
"""Steps that the code takes without a line: a read, a report, the begin of a stream or of a drain."""

ACTIONS: dict[str, Action] = {**TRACED, **UNTRACED}
