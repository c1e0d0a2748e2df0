"""What a run directory tells, as values: transitions with their attempts, gates, takeovers, and rates of change.

Everything comes from the chronicle and the change log; neither traces nor the commit record are read. A transition is
the attempts of one candidate that could commit, in order, and what became of it. Restores and finishing attempts are
recoveries. Of a long run only the latest transitions are kept, and timings of their attempts only.
Not handled: a run that is going on while it is read (it is told up to its last whole line).

Paper: Appendix C (timed window); Section 8.7 (failures and recovery)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import NO_ATTEMPT, AttemptId, CandidateId, Version
from nemo_dcr.record import DELTA_MODES
from nemo_dcr.runtime.change_log import DIRECTORY as CHANGES
from nemo_dcr.runtime.change_log import read_changes
from nemo_dcr.runtime.change_rates import RunRates, run_rates
from nemo_dcr.runtime.chronicle import (
    DIRECTORY,
    AttemptBegan,
    AttemptOver,
    CandidateGivenUp,
    CommitResolved,
    GateMoved,
    LifeBegan,
    Measured,
    SteppedAside,
    TookOver,
    TransitionOver,
    VersionDurable,
    read_life,
)
from nemo_dcr.runtime.timings import Timings

_DELTA = frozenset(mode.value for mode in DELTA_MODES)


@dataclass(slots=True)
class Attempt:
    """One attempt, as the coordinator that ran it told it."""

    began: AttemptBegan
    over: AttemptOver | None = None
    """None: its coordinator told no end."""
    nodes: dict[str, Timings] = field(default_factory=dict)
    """What each node measured, by name; empty for attempts of transitions that are too old."""

    @property
    def failed(self) -> str:
        """Why it failed; empty when it was acknowledged."""
        return "its coordinator told no end" if self.over is None else self.over.reason

    def slowest(self, stage: str) -> float:
        """Seconds of a stage on the node that took longest."""
        return max((timings.seconds.get(stage, 0.0) for timings in self.nodes.values()), default=0.0)

    def count(self, name: str, *, senders: bool = True) -> int:
        """A count, summed over the owners; over the receivers without `senders`."""
        return sum(timings.counts.get(name, 0) for node, timings in self.nodes.items() if is_owner(node) == senders)


@dataclass(slots=True)
class Transition:
    """One candidate: its attempts, and what became of it."""

    candidate: CandidateId
    attempts: list[Attempt] = field(default_factory=list)
    durable: VersionDurable | None = None
    ended: float | None = None
    given_up: CandidateGivenUp | None = None

    @property
    def name(self) -> str:
        """What people call it."""
        return f"version {self.durable.version}" if self.durable else f"candidate {self.candidate}"

    @property
    def committed(self) -> Attempt | None:
        """The attempt that was committed, when its beginning was told."""
        wanted = None if self.durable is None else self.durable.attempt
        return next((attempt for attempt in self.attempts if attempt.began.attempt == wanted), None)

    @property
    def seconds(self) -> float | None:
        """From the first attempt to the end of the transition; None while it has none."""
        return None if self.ended is None or not self.attempts else self.ended - self.attempts[0].began.at


@dataclass(slots=True)
class RunStory:
    """A whole run."""

    transitions: list[Transition] = field(default_factory=list)
    """The latest, oldest first; the first version, which nobody trained, is none of them."""
    left_out: int = 0
    """Older transitions that are not told."""
    recoveries: list[Attempt] = field(default_factory=list)
    """Restores and finishing attempts."""
    gates: dict[str, list[GateMoved]] = field(default_factory=dict)
    """By receiver, in order of time."""
    takeovers: list[tuple[str, TookOver | SteppedAside]] = field(default_factory=list)
    """Coordinator and what it told, in order of time."""
    conflicts: int = 0
    """Compare-and-sets that did not commit."""
    rates: RunRates | None = None
    begin: float = 0.0
    end: float = 0.0
    """Times of the first and of the last entry, seconds since the epoch."""


def is_owner(node: str) -> bool:
    """Receivers are called `instance/rank`, owners `owner-N`."""
    return "/" not in node


def find_run(directory: Path) -> Path:
    """The directory itself, or `run` in it, whichever holds a chronicle. Raises: InvalidConfig."""
    for place in (directory, directory / "run"):
        if any((place / DIRECTORY).glob("*.ndjson")):
            return place
    raise InvalidConfig(
        "RUN_DIR",
        f"neither {directory / DIRECTORY} nor {directory / 'run' / DIRECTORY} holds a chronicle; name the directory "
        f"that the processes of a run were given",
    )


def read_run(directory: Path, last: int) -> RunStory:
    """The story of a run, with its latest `last` transitions.

    Raises: InvalidConfig when there is no chronicle; OperatorNeeded when a whole line of a file is damaged.
    """
    place = find_run(directory)
    paths = sorted((place / DIRECTORY).glob("*.ndjson"))
    story = _Reader().read(paths)
    story.left_out = max(0, len(story.transitions) - last)
    story.transitions = story.transitions[-last:]
    wanted = {attempt.began.attempt: attempt for each in story.transitions for attempt in each.attempts}
    wanted.update({attempt.began.attempt: attempt for attempt in story.recoveries[-last:]})
    _read_timings(paths, wanted)
    if (place / CHANGES).is_dir():
        story.rates = run_rates(read_changes(place / CHANGES))
    return story


class _Reader:
    """Takes every entry but timings, and puts them in order."""

    def __init__(self) -> None:
        self._attempts: dict[AttemptId, Attempt] = {}
        self._overs: dict[AttemptId, AttemptOver] = {}
        self._durable: dict[Version, VersionDurable] = {}
        self._ended: dict[CandidateId, float] = {}
        self._given_up: dict[CandidateId, CandidateGivenUp] = {}
        self._story = RunStory(begin=float("inf"), end=float("-inf"))
        self._gates: defaultdict[str, list[GateMoved]] = defaultdict(list)

    def read(self, paths: Iterable[Path]) -> RunStory:
        for path in paths:
            self._read(path)
        story = self._story
        transitions: dict[CandidateId, Transition] = {}
        for number, attempt in sorted(self._attempts.items()):
            attempt.over = self._overs.get(number)
            candidate = attempt.began.candidate
            if attempt.began.mode in _DELTA and candidate:
                transitions.setdefault(candidate, Transition(candidate)).attempts.append(attempt)
            else:
                story.recoveries.append(attempt)
        for durable in self._durable.values():
            if durable.candidate in transitions:
                transitions[durable.candidate].durable = durable
        for candidate, transition in transitions.items():
            transition.ended = self._ended.get(candidate)
            transition.given_up = self._given_up.get(candidate)
        story.transitions = list(transitions.values())
        story.gates = {node: sorted(moves, key=lambda move: move.at) for node, moves in sorted(self._gates.items())}
        story.takeovers.sort(key=lambda told: told[1].at)
        if story.begin > story.end:
            story.begin = story.end = 0.0
        return story

    def _read(self, path: Path) -> None:
        node, story = path.stem, self._story
        for entry in read_life(path):
            story.begin, story.end = min(story.begin, entry.at), max(story.end, entry.at)
            match entry:
                case LifeBegan():
                    node = entry.node
                    if not is_owner(node):
                        # A life that was killed tells no end: its gate is drawn as open until the next life begins.
                        closed = GateMoved(at=entry.at, attempt=NO_ATTEMPT, is_open=False, tag="none", version=None)
                        self._gates[node].append(closed)
                case AttemptBegan():
                    self._attempts[entry.attempt] = Attempt(entry)
                case AttemptOver():
                    self._overs[entry.attempt] = entry
                case VersionDurable():
                    self._durable[entry.version] = entry
                case TransitionOver():
                    self._ended.setdefault(entry.candidate, entry.at)
                case CandidateGivenUp():
                    self._given_up[entry.candidate] = entry
                case CommitResolved():
                    story.conflicts += entry.outcome != "committed"
                case TookOver() | SteppedAside():
                    story.takeovers.append((node, entry))
                case GateMoved():
                    self._gates[node].append(entry)
                case Measured():
                    pass


def _read_timings(paths: Iterable[Path], wanted: dict[AttemptId, Attempt]) -> None:
    """Give the attempts what their nodes measured; of several entries the last sums, and the intervals of all."""
    for path in paths:
        for entry in read_life(path):
            if isinstance(entry, Measured) and entry.attempt in wanted:
                nodes, timings = wanted[entry.attempt].nodes, entry.timings
                known = nodes.get(timings.node)
                spans = timings.spans if known is None else (*known.spans, *timings.spans)
                nodes[timings.node] = replace(timings, spans=spans)
