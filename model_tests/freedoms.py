"""Edges of the specification that the code can not take: each kind with its name, its divergence and a predicate.

The specification allows more than the code does, where that makes it shorter (spec/README.md, divergences). A schedule
that meets an edge of the code's can not be refused here; an edge that the code does not take has to be of one of these
kinds. Steps that change nothing are edges too.

Not handled: how an edge is tried (replay).

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from model_tests import model
from model_tests.model import Config, Here, State, Step
from model_tests.model_state import stream_call
from model_tests.replay import Unrealised

CALLS = frozenset({"prepare", "stop", "apply", "close", "open"})
Predicate = Callable[[Here, Step, State], bool]


@dataclass(frozen=True)
class Freedom:
    """One kind of edges that only the specification has."""

    name: str
    divergence: str
    why: str
    holds: Predicate
    exact: bool = True
    """No edge of this kind is ever taken by the code."""
    hides: bool = False
    """States behind such an edge may be out of the code's reach."""


def _copied_already(s: Here, step: Step, after: State) -> bool:
    if step[0] != "CopyItem":
        return False
    o, i = step[1]
    return s.base[i] == s.content[s.source(o)][i]


def _answered(s: Here, step: Step, after: State) -> bool:
    if step[0] != "IgnoreStale":
        return False
    (e,) = step[1]
    stale = [m for m in s.attempt_calls() if s.is_stale(e, m.att)]
    return all(_is_answered(s, e, m) if m.type in CALLS else not _arrives(s, e, m) for m in stale)


def _is_answered(s: Here, e: str, m: Any) -> bool:
    """The call was not made to this process, or it answers it, as a repeated one or because it takes it."""
    is_receiver = e in s.rcv
    own = s.rcv[e] if is_receiver else s.own[e]
    if (is_receiver and e not in {name for name, _ in s.row(m.att).req}) or (
        not is_receiver and m.type not in ("prepare", "stop")
    ):
        return True
    if not (s.is_member(e, m.att) if is_receiver else s.is_owner_member(e, m.att)):
        return False
    if m.att > own.att:
        return m.type == "stop" or m.att > own.fenced
    if m.att < own.att:
        return False
    match m.type:
        case "prepare" | "stop":
            return True
        case "open":
            return bool(s.may_open_gate(e, m))
        case "close":
            return not own.stopped and not own.gate
        case _:
            return not own.stopped


def _arrives(s: Here, e: str, m: Any) -> bool:
    """Payloads and manifests reach every receiver; one that was accepted before is a duplicate."""
    if e not in s.rcv:
        return False
    return m.type == "end" or not s.payload_is_current(e, m.att) or s.not_duplicate(e, m)


def _nothing_asked(s: Here, step: Step, after: State) -> bool:
    if step[0] != "Conflict":
        return False
    (c,) = step[1]
    return not any(m.epoch == s.coord[c].epoch and not s.can_commit(m.att) for m in s.sent("commit"))


def _says_again(s: Here, step: Step, after: State) -> bool:
    return step[0] == "RollForward" and after.net == s.net and not s.prepare_holds_epoch(step[1][0])


def _stays_closed(s: Here, step: Step, after: State) -> bool:
    if step[0] != "OpenGate":
        return False
    return s.mode_of(step[1][1]) == "restore" and after.net != s.net and any(p.frozen for p in s.own.values())


def _not_streaming(s: Here, step: Step, after: State) -> bool:
    if step[0] != "FailOwner":
        return False
    own = s.own[step[1][0]]
    return own.status == "prepared" and not s.told(stream_call(own.att), s.may_start_stream(own.att))


def _proved(s: Here, step: Step, after: State) -> bool:
    action, parameters = step
    if action in ("EmitPayload", "EndStream", "FailOwner"):
        t = s.own[parameters[0]].att
    elif action == "OpenApply":
        t = parameters[1]
    elif action == "CompleteAttempt":
        t = s.coord[parameters[0]].att
        return s.mode_of(t) == "restore" and s.is_all_proved(t) and not s.all_prepared(t)
    else:
        return False
    return t > 0 and s.mode_of(t) == "restore" and s.is_all_proved(t)


def _killed(s: Here, step: Step, after: State) -> bool:
    if step[0] != "StartAttempt":
        return False
    (c,) = step[1]
    return s.prepare_holds_epoch(c) and s.row(s.coord[c].att).cand in s.dead


FREEDOMS = (
    Freedom(
        "one_event",
        "DV24",
        "the code never rests between two steps of one event (docs/trace.md, Steps), where others may act in the model",
        lambda s, step, after: False,
        hides=True,
    ),
    Freedom(
        "answered",
        "DV25",
        "a call that is repeated, or of an attempt that comes, is answered; in the specification it is stale",
        _answered,
        exact=False,
    ),
    Freedom(
        "copied_already",
        "DV25",
        "the code copies an item once; the specification again and again, which changes nothing",
        _copied_already,
        exact=False,
    ),
    Freedom(
        "nothing_asked",
        "DV25",
        "a replaced coordinator has to ask to be refused",
        _nothing_asked,
        exact=False,
    ),
    Freedom(
        "says_again",
        "DV2",
        "a replaced coordinator that looks again steps down; in the specification it may say once more what it said",
        _says_again,
        exact=False,
    ),
    Freedom(
        "only_streams_fail",
        "DV11",
        "an owner fails while it streams, and may not stream before all are prepared",
        _not_streaming,
        exact=False,
        hides=True,
    ),
    Freedom(
        "stays_closed",
        "DV26",
        "after a restore within a transition the code goes on with the candidate before it opens the gates",
        _stays_closed,
        exact=False,
        hides=True,
    ),
    Freedom(
        "proved_sends_nothing",
        "DV27",
        "a restore that every member proved is over when all are prepared: nothing is opened or sent",
        _proved,
        hides=True,
    ),
    Freedom(
        "one_request",
        "DV28",
        "a coordinator that killed a candidate gave its prepared attempt up before",
        _killed,
        hides=True,
    ),
)


def kind_of(config: Config, before: State, step: Step, after: State, failure: Unrealised | None = None) -> str | None:
    """The kind of an edge; None when it has no name. `failure`: why the code did not take it."""
    if failure is not None and failure.one_event:
        return "one_event"
    s = model.here(config, before)
    return next((freedom.name for freedom in FREEDOMS if freedom.holds(s, step, after)), None)
