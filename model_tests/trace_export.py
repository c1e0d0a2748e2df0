"""Validates traces against the specification: constants and names from the lines, then the model takes every line.

    python -m model_tests.trace_export validate DIRECTORY...       (traces/ of a run, one file for each process life)
    python -m model_tests.trace_export export DIRECTORY FILE.json  (the same, and as a log for spec/tlc.py trace)

What a trace does not tell is made up in the way that forbids most: a candidate changes what its complete streams sent.
Whoever ran the cluster may know better and say so (`changes`). An item is one tensor of one owner; a tensor that an
owner sends in several payloads of one attempt is left out (`parts`). The model takes all items of a directory, the
proved model two of each owner, because the rows of its relations grow with the square of them.

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_tests import model
from model_tests.follower import Follower, Names, Rejected
from model_tests.model_properties import STATE_PROPERTIES, STEP_PROPERTIES
from model_tests.model_state import Config, Map, State
from model_tests.trace_files import Line, TraceIncomplete, read_directory
from model_tests.trace_logs import Shown, log_of

Changes = Callable[[str, str], frozenset[str]]
ITEMS_EACH = 2
"""Tensors of each owner that the proved model looks at in a run of a real checkpoint."""


class LineRejected(Exception):
    """A line of a run is no step of the specification."""

    def __init__(self, line: Line, number: int, why: str) -> None:
        super().__init__(
            f"rejected at line {number} ({line.where}): {line.action} of {line.node}: {why}\n  {line.emitted}"
        )
        self.line, self.number, self.why = line, number, why


@dataclass(frozen=True)
class Validated:
    """A run that the specification accepts."""

    config: Config
    first: State
    steps: tuple[tuple[model.Step, ...], ...]
    """Of each line."""
    lines: tuple[Line, ...]
    shown: tuple[dict[str, Any], ...]
    """What each line says about its actor, for TLC."""
    excuses: Counter[str]
    actions: frozenset[str]


def coordinator_name(line: Line) -> str:
    """Every life of a coordinator is one of its own in the model."""
    return f"{line.node}@{line.incarnation}"


def constants(
    lines: Sequence[Line], changes: Changes | None = None, *, items_each: int | None = None
) -> tuple[Config, Names]:
    """Constants and names of a run, projected to `items_each` tensors of each owner, or with all of them."""
    receivers = tuple(dict.fromkeys(line.node for line in lines if line.action == "StartReceiver"))
    owners = tuple(dict.fromkeys(line.node for line in lines if line.action == "StartOwner"))
    known = {*receivers, *owners, "control"}
    lives = {coordinator_name(line): line.node for line in lines if line.node not in known}
    tensors: dict[tuple[str, str], None] = {}
    parts: Counter[tuple[str, int, str]] = Counter()
    for line in lines:
        for name in _sent(line):
            tensors[line.node, name] = None
            parts[line.node, line.emitted.attempt, name] += 1
        if line.action == "CopyItem":
            tensors[line.node, str(line.emitted.args["name"])] = None
    split = {(node, name) for (node, _, name), count in parts.items() if count > 1}
    kept = {owner: [key for key in tensors if key[0] == owner and key not in split] for owner in owners}
    items = {key: f"{key[0]}/{key[1]}" for keys in kept.values() for key in _spread(keys, items_each)}
    gates = {str(line.emitted.args["gate"]) for line in lines if line.action == "StartAttempt"}
    config = Config(
        receivers=receivers,
        owners=owners,
        items=tuple(items.values()),
        owner_of=Map({item: node for (node, _), item in items.items()}),
        coordinators=tuple(lives),
        max_candidate=0,
        changes=Map({}),
        gate_mode="async" if gates == {"async"} else "sync",
    )
    acquired = {
        int(line.emitted.post["epoch"]): coordinator_name(line)  # type: ignore[arg-type]
        for line in lines
        if line.action == "BecomeCoordinator"
    }
    names = Names(
        items=items,
        left_out=frozenset({*tensors} - {*items}),
        acquirers=acquired,
        changes=changes or told_changes(lines, items),
    )
    return config, names


def _spread(keys: list[tuple[str, str]], count: int | None) -> list[tuple[str, str]]:
    """So many of them, from the first to the last, which an owner sends far from each other."""
    if count is None or len(keys) <= count:
        return keys
    return [keys[place * (len(keys) - 1) // max(1, count - 1)] for place in range(count)]


def _sent(line: Line) -> list[str]:
    return [name for name in str(line.emitted.args["names"]).split(",") if name] if line.action == "EmitPayload" else []


def told_changes(lines: Sequence[Line], items: dict[tuple[str, str], str]) -> Changes:
    """What each candidate changes by its XOR and overwrite streams: exactly that for owners with a complete one."""
    of = {
        line.emitted.attempt: str(line.emitted.args["candidate"])
        for line in lines
        if line.action == "Prepare" and line.emitted.args["mode"] in ("xor", "overwrite")
    }
    sent: dict[str, set[str]] = defaultdict(set)
    for line in lines:
        if line.emitted.attempt in of:
            sent[of[line.emitted.attempt]] |= {items[line.node, n] for n in _sent(line) if (line.node, n) in items}
    everything = frozenset(items.values())
    return lambda new, old: frozenset(sent[new]) if new in of.values() else everything


def validate(lines: Sequence[Line], changes: Changes | None = None, *, every: bool = True) -> Validated:
    """Let the model take every line, and see that every property of the specification holds.

    Args:
        every: look after every line; otherwise only after those in which a tag, gate, tracker or record changes.

    Raises: LineRejected.
    """
    config, names = constants(lines, changes)
    follower = Follower(config, names)
    first, taken, actions = follower.state, list[tuple[model.Step, ...]](), set[str]()
    observer, shown = Shown(), list[dict[str, Any]]()
    coordinators = set(config.coordinators)
    for number, line in enumerate(lines, 1):
        node = coordinator_name(line) if coordinator_name(line) in coordinators else line.node
        before = follower.state
        try:
            steps = follower.line(node, line.emitted, line.incarnation)
        except Rejected as rejected:
            raise LineRejected(line, number, rejected.why) from rejected
        changed = follower.state is not before and (every or _claims(follower.state) != _claims(before))
        if changed and (fallen := fallen_properties(follower.config, before, follower.state)):
            raise LineRejected(line, number, f"after it {', '.join(fallen)} does not hold")
        taken.append(tuple(steps))
        shown.append(observer.line(names.node(node), line, follower))
        actions |= {name for name, _ in steps}
    return Validated(
        follower.config, first, tuple(taken), tuple(lines), tuple(shown), follower.excuses, frozenset(actions)
    )


def fallen_properties(config: Config, before: State, after: State) -> list[str]:
    """Properties that do not hold in a state, or between it and the one before."""
    fallen = [name for name, holds in STATE_PROPERTIES.items() if not holds(config, after)]
    return fallen + [name for name, holds in STEP_PROPERTIES.items() if not holds(config, before, after)]


def _claims(state: State) -> object:
    receivers = [(r.inc, r.att, r.tag, r.gate) for r in state.rcv.values()]
    return state.chain, receivers, [(o.kind, o.ver, o.frozen, o.filling) for o in state.own.values()]


def main(arguments: Sequence[str]) -> int:
    """Validate or export directories; 1 when one is rejected, by the model or by the proved model."""
    from model_tests import proved_lines  # it reads lines as this module does

    if len(arguments) == 3 and arguments[0] == "export":
        log = log_of(validate(read_directory(Path(arguments[1])), every=False))
        Path(arguments[2]).write_text(json.dumps(log), encoding="utf-8")
        return 0
    if len(arguments) < 2 or arguments[0] != "validate":
        sys.stderr.write(__doc__ or "")
        return 2
    status = 0
    for name in arguments[1:]:
        try:
            lines = read_directory(Path(name))
            found = validate(lines, every=False)
            proved_lines.validate(lines, items_each=ITEMS_EACH)
        except (LineRejected, TraceIncomplete) as problem:
            sys.stdout.write(f"{name}: {problem}\n")
            status = 1
        else:
            excuses = ", ".join(f"{number} of {kind}" for kind, number in sorted(found.excuses.items())) or "none"
            sys.stdout.write(
                f"{name}: accepted, {len(found.lines)} lines, {sum(map(len, found.steps))} steps, "
                f"{len(found.actions)} actions, divergences used: {excuses}\n"
            )
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
