"""Traces of a run in one causal order: from files of one process life each, or from a cluster in memory.

Lamport clocks order the lines of processes that call each other. Some order comes from elsewhere and has no clock
(divergence DV3 and the trainer): a payload is accepted after it was published, a manifest is seen after it was closed,
the optimizer steps only when no rank of the trainer holds the last candidate any more, and a process starts after its
predecessor ended and shortly before it first has to do with another one.

A line that is missing shows: by a gap in the numbers of its process, or by a trace without an end of a process that
nobody declared to be killed.

Paper: Appendix B   Spec: Next
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nemo_dcr.errors import InternalError
from nemo_dcr.runtime.trace_file import KILLED, Killed, read_killed, read_log
from nemo_dcr.trace import Action, Emit, Event

LAST = 1 << 62
"""Later than any clock."""


@dataclass(frozen=True)
class Line:
    """One line of a trace, in the order of the run."""

    node: str
    incarnation: int
    emitted: Emit
    where: str
    """Where it was read, for messages."""

    @property
    def action(self) -> str:
        """Its action."""
        return self.emitted.action.value


class TraceIncomplete(Exception):
    """Lines of a run are missing, or can not be brought into an order."""


def read_directory(directory: Path) -> list[Line]:
    """All lines of a run directory, one file for each process life, in causal order.

    Raises: TraceIncomplete.
    """
    killed, lives = read_killed(directory), dict[tuple[str, int], list[tuple[Event, str]]]()
    over = set[tuple[str, int]]()
    paths = sorted(path for path in directory.glob("*.ndjson") if path.name != KILLED)
    if not paths:
        raise TraceIncomplete(f"{directory}: no traces")
    for path in paths:
        try:
            log = read_log(path)
        except InternalError as problem:
            raise TraceIncomplete(str(problem)) from problem
        if not log.events:
            continue
        life = (log.events[0].node, int(log.events[0].incarnation))
        if not log.ended and Killed(log.events[0].node, log.events[0].incarnation) not in killed:
            raise TraceIncomplete(f"{path}: after line {len(log.events)} there is no end, and nobody killed {life[0]}")
        if any((event.node, event.incarnation) != life for event in log.events):
            raise TraceIncomplete(f"{path}: not the lines of one process life")
        if not log.ended:
            over.add(life)
        lives[life] = [(event, f"{path.name}:{number}") for number, event in enumerate(log.events, 1)]
    return merged(lives, killed=over)


def merged(
    lives: Mapping[tuple[str, int], Sequence[tuple[Event, str]]], *, killed: Collection[tuple[str, int]] = ()
) -> list[Line]:
    """One causal order of the lines of several process lives.

    An owner that was `killed` may have closed a set without telling; then its last line is made up from who saw it.

    Raises: TraceIncomplete when a line waits for one that does not come.
    """
    lives = with_unsaid_ends(lives, killed)
    waits = _Waits(lives)
    places = dict.fromkeys(lives, 0)
    order: list[Line] = []
    while left := [life for life in lives if places[life] < len(lives[life])]:
        ready = [life for life in left if waits.is_ready(life, places)]
        if not ready:
            stuck = [lives[life][places[life]][1] for life in left]
            raise TraceIncomplete(f"these lines wait for others that are missing: {', '.join(stuck)}")
        life = min(ready, key=lambda life: (waits.clock(life, places[life]), life))
        event, where = lives[life][places[life]]
        places[life] += 1
        waits.done(event)
        order.append(Line(event.node, int(event.incarnation), _emit(event), where))
    return order


def with_unsaid_ends(
    lives: Mapping[tuple[str, int], Sequence[tuple[Event, str]]], killed: Collection[tuple[str, int]]
) -> Mapping[tuple[str, int], Sequence[tuple[Event, str]]]:
    """The same with the EndStream that a killed owner did not come to write, when somebody saw the manifest."""
    seen = {
        (int(event.args["owner"]), event.attempt): event.args["count"]
        for events in lives.values()
        for event, _ in events
        if event.action == "SeeManifest"
    }
    found = dict(lives)
    for life in killed:
        events = lives[life]
        last = events[-1][0]
        count = (
            seen.get((int(last.node.removeprefix("owner ")), last.attempt)) if last.action == "EmitPayload" else None
        )
        if count is not None:
            end = replace(last, seq=last.seq + 1, clock=last.clock + 1, action="EndStream", args={"count": count})
            found[life] = [*events, (end, f"{events[-1][1]} (then killed)")]
    return found


def _emit(event: Event) -> Emit:
    return Emit(Action(event.action), event.attempt, event.args, event.post)


class _Waits:
    """What a line waits for that no clock tells."""

    def __init__(self, lives: Mapping[tuple[str, int], Sequence[tuple[Event, str]]]) -> None:
        self._lives = lives
        self._published: set[tuple[Any, ...]] = set()
        self._mentioned: dict[tuple[str, int], int] = defaultdict(lambda: LAST)
        self._steps: dict[str, list[tuple[tuple[str, int], int]]] = defaultdict(list)
        prepared = {
            event.attempt: event.clock for events in lives.values() for event, _ in events if event.action == "Prepare"
        }
        for life, events in lives.items():
            last_end = 0
            for place, (event, _) in enumerate(events):
                for member in str(event.args.get("required") or "").split(","):
                    receiver, _, incarnation = member.rpartition("@")
                    self._mention(receiver, incarnation, event.clock)
                if event.action == "StartAttempt":
                    for owner in str(event.args.get("owners") or "").split(","):
                        number, _, incarnation = owner.rpartition("@")
                        self._mention(f"owner {number}", incarnation, prepared.get(event.attempt, event.clock))
                if event.action in ("EndTransition", "DropCandidate", "LoseBaseline", "StartOwner"):
                    last_end = place + 1
                if event.action == "BeginTransition":
                    self._steps[str(event.post["frozen"])].append((life, last_end))

    def _mention(self, node: str, incarnation: str, clock: int) -> None:
        if incarnation:
            key = (node, int(incarnation))
            self._mentioned[key] = min(self._mentioned[key], clock)

    def clock(self, life: tuple[str, int], place: int) -> int:
        """When a line took place; a start as late as possible."""
        events = self._lives[life]
        event = events[place][0]
        earlier = [
            each[-1][0].clock for other, each in self._lives.items() if other[0] == life[0] and other[1] < life[1]
        ]
        if event.action in ("StartReceiver", "StartOwner") and event.clock < max(earlier, default=LAST):
            following = events[place + 1][0].clock if place + 1 < len(events) else LAST
            # A life that ended at once has nothing that follows; the next one still starts after it.
            later = [self.clock(other, 0) + 1 for other in self._lives if other[0] == life[0] and other[1] > life[1]]
            return max(event.clock, min(following, self._mentioned[life], *later) - 1)
        return event.clock

    def is_ready(self, life: tuple[str, int], places: Mapping[tuple[str, int], int]) -> bool:
        """Nothing that the next line of this life waits for is missing."""
        event = self._lives[life][places[life]][0]
        before = [other for other in self._lives if other[0] == life[0] and other[1] < life[1]]
        if event.action in ("StartReceiver", "StartOwner"):
            return all(places[other] == len(self._lives[other]) for other in before)
        if event.action in ("Accept", "SeeManifest", "IgnoreDuplicate", "IgnoreStale"):
            return self._is_out(event)
        if event.action == "BeginTransition":
            return all(places[other] >= end for other, end in self._steps[str(event.post["frozen"])])
        return True

    def _is_out(self, event: Event) -> bool:
        if "owner" not in event.args:
            return True
        return self._key(event.args["owner"], event) in self._published

    def done(self, event: Event) -> None:
        """A line has its place."""
        if event.action in ("EmitPayload", "EndStream"):
            self._published.add(self._key(int(event.node.removeprefix("owner ")), event))

    @staticmethod
    def _key(owner: int, event: Event) -> tuple[Any, ...]:
        return (owner, event.attempt, event.args.get("payload"))


def stamped(lines: Iterable[Line]) -> dict[tuple[str, int], list[tuple[Event, str]]]:
    """The lines of a run that has one order, as traces of its process lives: the clock is the place."""
    lives: dict[tuple[str, int], list[tuple[Event, str]]] = defaultdict(list)
    for clock, line in enumerate(lines, 1):
        life = (line.node, line.incarnation)
        e = line.emitted
        event = Event(
            1, line.node, line.incarnation, len(lives[life]), clock, e.action.value, e.attempt, e.args, e.post
        )  # type: ignore[arg-type]
        lives[life].append((event, f"{line.node}@{line.incarnation}:{event.seq + 1}"))
    return dict(lives)
