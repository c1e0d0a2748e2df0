"""The order of process lives that no clock tells: a life starts after its predecessor, also if that ended at once."""

from __future__ import annotations

from typing import Any

from model_tests.trace_files import merged
from nemo_dcr.ids import AttemptId, Incarnation
from nemo_dcr.trace import Event


def event(node: str, incarnation: int, seq: int, clock: int, action: str, **args: Any) -> tuple[Event, str]:
    made = Event(1, node, Incarnation(incarnation), seq, clock, action, AttemptId(7), args, {"frozen": ""})
    return made, f"{node}@{incarnation}:{seq + 1}"


def test_a_life_that_was_killed_at_its_first_line_does_not_push_the_next_one_to_the_end() -> None:
    """The second life has nothing that follows; the attempt names the third one, which comes before it."""
    lives = {
        ("owner 0", 1): [event("owner 0", 1, 0, 1, "StartOwner"), event("owner 0", 1, 1, 40, "OwnerPrepare")],
        ("owner 0", 2): [event("owner 0", 2, 0, 1, "StartOwner")],
        ("owner 0", 3): [event("owner 0", 3, 0, 1, "StartOwner"), event("owner 0", 3, 1, 90, "OwnerPrepare")],
        ("control", 0): [event("control", 0, 0, 60, "Prepare"), event("control", 0, 1, 95, "Commit")],
        ("coordinator", 5): [event("coordinator", 5, 0, 61, "StartAttempt", owners="0@3", required="e0/0@1")],
    }
    order = [(line.node, line.incarnation, line.action) for line in merged(lives)]
    assert order == [
        ("owner 0", 1, "StartOwner"),
        ("owner 0", 1, "OwnerPrepare"),
        ("owner 0", 2, "StartOwner"),
        ("owner 0", 3, "StartOwner"),
        ("control", 0, "Prepare"),
        ("coordinator", 5, "StartAttempt"),
        ("owner 0", 3, "OwnerPrepare"),
        ("control", 0, "Commit"),
    ]
