"""A validated run as a log for TLC (spec/tlc.py trace): the constants, and each line as steps with what it shows.

Only runs that are behaviours of the specification step by step become logs: those in which a divergence changed the
state, or a call or look was older than the state (hindsight), are validated by the follower alone.

Spec: TraceDeltaRefit
"""

from __future__ import annotations

from typing import Any

from model_tests import model
from model_tests.digest_classes import items_of
from model_tests.follower import Follower
from model_tests.trace_files import Line

HARMLESS = frozenset({"DV2", "DV15"})
"""Divergences in which a line changes nothing in the model, and is no step of it."""
CANDIDATES = {"Prepare": 2, "KillCandidate": 1, "UpdateBaseline": 1, "EndTransition": 1}
"""Which parameter of an action is a candidate."""
PHASES = {
    "preparing": ["running"],
    "acked": ["acked", "fenced"],
    "stopping": ["ready"],
    "surveying": ["ready"],
    "out": ["out"],
}
ACTION_PHASES = {
    "SendCommit": ["committing"],
    "ResolveCommit": ["ready", "fenced"],
    "RollForward": ["ready", "fenced"],
}


class Shown:
    """What lines say about their actors, in the words of the model. Feed it every line of a run."""

    def __init__(self) -> None:
        self._epochs: dict[str, int] = {}
        self._control = {"epoch": 0, "last": 0, "records": 0}

    def line(self, name: str, line: Line, follower: Follower) -> dict[str, Any]:
        """Kind and name of the actor, and its observation."""
        post = line.emitted.post
        if line.node == "control":
            for key in ("epoch", "last"):
                if key in post:
                    self._control[key] = int(post[key])  # type: ignore[arg-type]
            if "version" in post:
                self._control["records"] = int(post["version"]) + 1  # type: ignore[arg-type]
            return {"k": "control", "n": "", "o": dict(self._control)}
        if "gate" in post:
            tag = follower.tag(str(post["tag"]))
            told = {"kind": tag.kind, "ver": tag.ver, "cand": {"cand": tag.cand}, "att": tag.att}
            stored = items_of(follower.names, follower.config.items, str(post.get("stored", "")))
            words = [{"i": i, "c": {"set": [{"cand": c} for c in sorted(of)]}} for i, of in sorted(stored.items())]
            o = {"att": post["att"], "tag": told, "gate": post["gate"], "stored": {"set": words}}
            return {"k": "receiver", "n": name, "o": o}
        if "tracker" in post:
            kind, _, version = str(post["tracker"]).removesuffix(")").partition("(")
            frozen = {"cand": follower.candidate(str(post["frozen"]))}
            o = {"att": post["att"], "frozen": frozen, "kind": kind, "ver": int(version or 0)}
            return {"k": "owner", "n": name, "o": o}
        phase = str(post["phase"])
        self._epochs[name] = int(post.get("epoch", self._epochs.get(name, 0)))  # type: ignore[arg-type]
        phases = ACTION_PHASES.get(line.action) or PHASES[phase]
        return {
            "k": "coordinator",
            "n": name,
            "o": {"epoch": 0 if phase == "out" else self._epochs[name], "phases": {"set": phases}},
        }


def step_data(step: model.Step) -> dict[str, Any]:
    """A step of the model with marked candidates and sets."""
    action, parameters = step
    data = [_data(each) for each in parameters]
    if action in CANDIDATES:
        data[CANDIDATES[action]] = {"cand": data[CANDIDATES[action]]}
    return {"a": action, "p": data}


def _data(parameter: Any) -> Any:
    if isinstance(parameter, frozenset):
        return {"set": [list(member) for member in sorted(parameter)]}
    return parameter


def log_of(run: Any) -> dict[str, Any]:
    """A run as a log.

    Raises: ValueError when it needed a divergence or hindsight.
    """
    if beyond := sorted(set(run.excuses) - HARMLESS):
        raise ValueError(f"not step by step a behaviour of the specification: {', '.join(beyond)}")
    config = run.config
    steps: list[dict[str, Any]] = []
    for number, (line, taken, shown) in enumerate(zip(run.lines, run.steps, run.shown, strict=True), 1):
        place = {"line": number, "where": f"{line.where}: {line.action} of {line.node}"}
        data = [{**step_data(step), "k": "", "n": "", "o": "", **place} for step in taken]
        if data:
            data[-1].update(shown)
        steps += data
    requests = {str(line.emitted.args["request"]) for line in run.lines if line.action == "AdmitRequest"}
    return {
        "receivers": list(config.receivers),
        "owners": list(config.owners),
        "owner_of": dict(config.owner_of),
        "coordinators": list(config.coordinators),
        "gate": config.gate_mode,
        "requests": sorted(requests),
        "attempts": max((line.emitted.attempt for line in run.lines), default=1),
        "changes": [sorted(config.changes[c]) for c in range(1, config.max_candidate + 1)],
        "steps": steps,
    }
