"""Six faults planted in the implementation, each of which the state machine has to find by itself.

Faults and seeds were written down before the machine met the first of them, and neither was changed afterwards: what is
not found is a weakness of the machine. One patch was completed: taking the first of the two fences out planted nothing.
There is one fault for each of: codec, mask of the first copy, deduplication, fence on the late path, commit, restore.
A canary counts how often the fault made a difference, so that a fault that plants nothing shows.
`python -m model_tests.planted EXAMPLES NAME...` hunts them one after the other; all of them without a name.
Not handled: weakened guards of the protocol, one by one (mutants).

Paper: Section 6.1 (active masks), 6.3 (fence, commit, restore); Appendix D (locations)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import Phase

from model_tests.engines import tables
from model_tests.follower import Rejected
from model_tests.machine import RULES, Machine, run_machine
from model_tests.pair import Differs, PropertyFalls, Unsettled
from model_tests.trace_export import LineRejected
from nemo_dcr import control_rules
from nemo_dcr.codec import payload
from nemo_dcr.errors import InternalError, NemoDcrError
from nemo_dcr.ids import NO_ATTEMPT, PayloadKey
from nemo_dcr.protocol import endpoint_fence, endpoint_guards
from nemo_dcr.protocol.endpoint_state import EndpointState
from nemo_dcr.receiver.place import DenseScratchPlacer, Pass, _source_words
from nemo_dcr.record import CommitRequest, Facts
from nemo_dcr.source.direct import AffineUnit, Emission
from tests.conftest import settings
from tests.unit.protocol.invariants import InvariantBroken

Patch = Callable[["Canary"], Any]


class Canary:
    """Counts how often a fault made a difference to what the sound code would have done."""

    def __init__(self) -> None:
        self.sang = 0

    def note(self, differs: bool) -> None:
        """The patched line ran."""
        self.sang += bool(differs)


@dataclass(frozen=True)
class Planted:
    """One fault."""

    what: str
    seed: int
    patch: Patch
    """Plants it, as a context."""


def _codec(canary: Canary) -> Any:
    sound = payload.decode_locations

    def decode(*args: Any) -> Any:
        indices = sound(*args)
        if indices is not None and len(indices) >= 3:
            indices = np.array(indices)
            canary.note(indices[-1] != indices[-2] + 1)
            indices[-1] = indices[-2] + 1
        return indices

    return mock.patch.object(payload, "decode_locations", decode)


def _mask(canary: Canary) -> Any:
    sound = DenseScratchPlacer._mask

    def mask(self: Any, name: str, step: Any, number: int, source: Any) -> Any:
        if step.repeats and self._pass is Pass.PLACEHOLDER:
            own = _source_words(source) != self._placeholder
            canary.note(bool((own != sound(self, name, step, number, source)).any()))
            return own
        return sound(self, name, step, number, source)

    return mock.patch.object(DenseScratchPlacer, "_mask", mask)


def _deduplication(canary: Canary) -> Any:
    sound = endpoint_guards.not_duplicate

    def not_duplicate(state: EndpointState, key: PayloadKey) -> bool:
        canary.note(not sound(state, key))
        return True

    return mock.patch.object(endpoint_guards, "not_duplicate", not_duplicate)


@contextmanager
def _late_fence(canary: Canary) -> Iterator[None]:
    sound = endpoint_fence._install_or_refuse

    def is_newer(state: EndpointState, attempt: int) -> bool:
        installing = state.install.attempt if state.install else state.attempt
        return attempt > max(state.attempt, installing)

    def install(state: EndpointState, call: Any) -> Any:
        canary.note(call.attempt <= state.fenced)
        after, refusal, effects = sound(replace(state, fenced=NO_ATTEMPT), call)
        return replace(after, fenced=state.fenced), refusal, effects

    first = mock.patch.object(endpoint_guards, "is_newer", is_newer)
    with first, mock.patch.object(endpoint_fence, "_install_or_refuse", install):
        yield


def _commit(canary: Canary) -> Any:
    sound = control_rules.why_not_commit

    def why_not(facts: Facts, request: CommitRequest, now: float) -> Any:
        why = sound(replace(facts, epoch=request.epoch), request, now)
        canary.note(why != sound(facts, request, now))
        return why

    return mock.patch.object(control_rules, "why_not_commit", why_not)


def _restore(canary: Canary) -> Any:
    def committed(self: AffineUnit, trackers: Any) -> Emission:
        baseline, resident = [trackers.words(t.key) for t in self.tasks], [t.words() for t in self.tasks]
        canary.note(any(b.tobytes() != r.tobytes() for b, r in zip(baseline, resident, strict=True)))
        return Emission(self._everything(resident), 0, 0)

    return mock.patch.object(AffineUnit, "committed", committed)


PLANTED = {
    "codec": Planted("the last of three or more gap-coded locations is decoded as the next neighbour", 5101, _codec),
    "mask": Planted("a copy that repeats a target makes its own mask instead of keeping the first one's", 5202, _mask),
    "deduplication": Planted("a payload that was accepted before is accepted again", 5303, _deduplication),
    "late fence": Planted("a prepare that comes after the stop of its attempt is installed", 5404, _late_fence),
    "commit": Planted("the control plane takes the commit of a coordinator that was replaced", 5505, _commit),
    "restore": Planted("a restore sends the resident weights instead of the baseline", 5606, _restore),
}


SEEN = (Rejected, Differs, PropertyFalls, InvariantBroken, Unsettled, LineRejected)
"""How the machine says that something is wrong; anything else that is raised is no find."""


@dataclass(frozen=True)
class Found:
    """What the machine said of a fault."""

    fault: str
    by: str
    """Type of the exception, or nothing when the fault was not found."""
    detail: str
    examples: int
    planted: int
    """How often it made a difference."""


def hunt(name: str, examples: int) -> Found:
    """Plant a fault and let the machine look for it, as long as CI lets it."""
    planted, canary = PLANTED[name], Canary()

    class Planter(Machine):
        pass

    chosen = settings(
        settings.get_profile("ci"), max_examples=examples, phases=[Phase.generate], stateful_step_count=RULES
    )
    tables()  # the loaders are sound
    before = Machine.totals["examples"]
    by = detail = ""
    try:
        with planted.patch(canary):
            run_machine(Planter, chosen, with_seed=planted.seed)
    except (*SEEN, NemoDcrError, InternalError) as problem:
        by, detail = type(problem).__name__, str(problem)[:300]
    return Found(name, by, detail, Machine.totals["examples"] - before, canary.sang)


if __name__ == "__main__":
    hunted = [hunt(name, int(sys.argv[1])) for name in sys.argv[2:] or PLANTED]
    print("\n".join(json.dumps(found.__dict__) for found in hunted))
    sys.exit(0 if all(found.by for found in hunted) else 1)
