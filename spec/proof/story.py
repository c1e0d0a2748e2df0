"""One run through every action of the model: a cluster boots, refits, fails, recovers, aborts.

The story is told by steps of the model alone; each is checked by its guard. Its parts: bootstrap by restore; an XOR
attempt that breaks off half written; takeover; late and repeated payloads; overwrite retry; a commit whose reply is
lost; owner crash and roll forward; a lost baseline rebuilt; a dense attempt that a raw receiver joins; a restore and a
finish attempt; an abort.

Spec: the sanity claims of DeltaRefit   Proofs: none
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spec.proof.dsl import Concrete
from spec.proof.walk import World, choose_members, enabled, first, take, written_word

Watch = Callable[[str, tuple[Any, ...], Concrete, Concrete], None]


class Story:
    """A run that grows step by step; `watch` sees each step with the states before and after it."""

    def __init__(self, world: World, watch: Watch) -> None:
        self.world = world
        self.state = first(world)
        self.watch = watch
        self.told: list[str] = []
        self.receivers: list[str] = self.state.things["Receiver"]
        self.owners: list[str] = self.state.things["Owner"]
        self.elements: list[int] = self.state.things["Element"]
        self.payloads: list[Any] = self.state.things["Payload"]

    def do(self, name: str, *arguments: Any) -> None:
        """Take one step.

        Raises: NotEnabled when its guard is false.
        """
        before = self.state
        self.state = take(before, name, *arguments)
        self.told.append(name)
        self.watch(name, arguments, before, self.state)

    def ask(self, k: str, mode: str, candidate: int, members: list[str] | None = None) -> int:
        """Prepare and start an attempt; returns its id."""
        t = int(self.state.last_attempt()) + 1
        self.state = choose_members(self.state, t, members)
        self.do("Prepare", k, t, mode, candidate)
        self.do("StartAttempt", k, t)
        return t

    def drain(self, r: str) -> None:
        """Stop what the receiver has installed."""
        if not self.state.drained(r):
            self.do("BeginDrain", r)
            self.do("StopAndWait", r, self.state.att(r))

    def install(self, t: int, members: list[str]) -> None:
        """All members and owners install the attempt."""
        for r in members:
            self.drain(r)
            if self.state.mode(t) == "restore":
                proved = enabled(self.state, "StartRestore", (r, t, True))
                self.do("StartRestore", r, t, proved)
            else:
                self.do("EndpointPrepare", r, t)
        for o in self.owners:
            for u in self.state.things["Attempt"]:
                if self.state.owner_att(o, u) and (self.state.ready(o) or self.state.streaming(o)):
                    self.do("StopOwner", o, u)
            self.do("OwnerPrepare", o, t)

    def stream(self, t: int, owners: list[str] | None = None) -> None:
        """Owners publish everything and their manifests."""
        for o in owners or self.owners:
            self.do("StartStream", o, t)
            for p in self.payloads:
                if p[0] == o:
                    self.do("EmitPayload", o, t, p)
            self.do("EndStream", o, t)

    def take_in(self, r: str, t: int) -> None:
        """A receiver accepts everything that was sent, and the manifests."""
        for p in self.payloads:
            if self.state.sent(t, p) and not self.state.seen(r, p):
                self.do("Accept", r, t, p)
        for o in self.owners:
            self.do("SeeManifest", r, t, o)

    def quiet(self, t: int, members: list[str]) -> None:
        """All members say that they are quiet."""
        for r in members:
            self.do("ReportQuiet", r, t)

    def write(self, r: str, t: int, elements: list[int] | None = None) -> None:
        """A receiver writes what is pending."""
        if not self.state.permitted(r):
            self.do("OpenApply", r, t)
            self.do("StartApply", r)
        for e in self.elements if elements is None else elements:
            if self.state.pending(r, t, e):
                self.do("ApplyItem", r, t, e, written_word(self.state, r, t, e))

    def acknowledge(self, t: int, members: list[str]) -> None:
        """All members take in, write and flush the attempt."""
        self.quiet(t, members)
        for r in members:
            if not self.state.acked(r):
                self.take_in(r, t)
                self.write(r, t)
                self.do("Flush", r)

    def follow(self, k: str, v: int) -> None:
        """Baselines follow the record, and the transition ends."""
        self.do("RollForward", k, v)
        for o in self.owners:
            self.do("UpdateBaseline", o, v)
            self.fill(o)
            self.do("EndTransition", o, v)
            self.do("ReportThawed", o, v)

    def fill(self, o: str) -> None:
        """The running copy into the baseline of an owner goes through."""
        for e in self.elements:
            if self.state.owner_of(e) == o:
                self.do("CopyItem", o, e)
        self.do("BaselineFilled", o)

    def open(self, t: int, members: list[str]) -> None:
        """Gates open over the record."""
        for r in members:
            self.do("OpenGate", r, t, self.state.record_version(), self.state.record_attempt())

    def lead(self, k: str) -> None:
        """A coordinator takes over."""
        epoch = int(self.state.epoch()) + 1
        self.do("AcquireEpoch", epoch)
        self.do("BecomeCoordinator", k, epoch)


def tell(world: World, watch: Watch = lambda *step: None) -> Story:
    """The whole story.

    Raises: NotEnabled when a guard of the model is false where the story needs it.
    """
    story = Story(world, watch)
    boot(story)
    broken_attempt_and_retry(story)
    lost_reply_and_crashes(story)
    dense_attempt(story)
    restore_and_finish(story)
    abort(story)
    return story


def boot(story: Story) -> None:
    """The first record: one receiver is proved by what it loaded, the other is restored by payloads."""
    everyone = story.receivers
    story.lead("k0")
    story.do("StartReceiver", "i0", 1, 0, True)
    story.do("StartReceiver", "i1", 1, 0, False)
    t = story.ask("k0", "restore", 0)
    story.install(t, everyone)
    story.stream(t)
    story.acknowledge(t, everyone)
    story.do("CompleteAttempt", "k0", t)
    story.do("Bootstrap", "k0", t)
    story.do("ReadRecord", "k0")
    story.do("ConfirmRestore", "k0", t)
    for r in everyone:
        story.do("FinishRestore", r, t)
    for o in story.owners:
        story.do("ReportThawed", o, 0)
    story.open(t, everyone)
    story.do("AdmitRequest", "r0", "q0")


def broken_attempt_and_retry(story: Story) -> None:
    """XOR breaks off half written; another coordinator repairs it by overwrites over the mixture."""
    r0, r1 = story.receivers
    for o in story.owners:
        story.do("BeginTransition", o, 1)
    t = story.ask("k0", "by_xor", 1)
    story.install(t, story.receivers)
    story.do("CloseGate", r1, t)
    story.do("FinishRequest", "r0", "q0")
    story.stream(t, story.owners[:1])
    story.do("StartStream", "o1", t)
    story.do("EmitPayload", "o1", t, ("o1", 0))
    story.do("FailOwner", "o1")
    story.do("StopOwner", "o1", t)
    for r in story.receivers:
        for p in (("o0", 0), ("o0", 1), ("o1", 0)):
            story.do("Accept", r, t, p)
    story.do("IgnoreDuplicate", r0, t, ("o0", 0))
    story.quiet(t, story.receivers)
    story.write(r0, t)
    story.write(r1, t, story.elements[:1])
    story.do("FailReceiver", r1, t)
    story.do("FailAttempt", "k0", t)
    story.do("StopAndWait", r1, t)
    story.lead("k1")
    story.do("Conflict", "k0")
    retry = story.ask("k1", "overwrite", 1)
    story.install(retry, story.receivers)
    story.do("IgnoreStale", r0, t)
    story.stream(retry)
    story.acknowledge(retry, story.receivers)
    story.do("CompleteAttempt", "k1", retry)
    story.do("SendCommit", "k1", retry)


def lost_reply_and_crashes(story: Story) -> None:
    """The commit takes effect, its reply is late; an owner crashes; the record is rolled forward."""
    t = int(story.state.last_attempt())
    story.do("Commit", t, 1)
    story.do("ResolveCommit", "k1", t, 1)
    story.do("StartOwner", "o1", 1, 0, True)
    story.follow("k1", 1)
    story.open(t, story.receivers)
    story.do("StepDown", "k0")
    story.do("LoseBaseline", "o0", 1)
    story.do("RebuildBaseline", "o0", 1)
    story.fill("o0")
    story.do("LoseBaseline", "o1", 1)


def dense_attempt(story: Story) -> None:
    """A baseline is lost: everything is sent. A restarted receiver joins. The first commit request comes to nothing."""
    story.do("StartReceiver", "i1", 2, 1, False)
    for o in story.owners:
        story.do("BeginTransition", o, 2)
    t = story.ask("k1", "dense", 2)
    story.install(t, story.receivers)
    story.stream(t)
    story.acknowledge(t, story.receivers)
    story.do("CompleteAttempt", "k1", t)
    story.do("SendCommit", "k1", t)
    story.do("ResolveCommit", "k1", t, 1)
    again = story.ask("k1", "dense", 2)
    story.install(again, story.receivers)
    story.stream(again)
    story.acknowledge(again, story.receivers)
    story.do("CompleteAttempt", "k1", again)
    story.do("SendCommit", "k1", again)
    story.do("Commit", again, 2)
    story.lead("k0")
    finish = story.ask("k0", "finish", 2)
    story.install(finish, story.receivers)
    for r in story.receivers:
        story.do("ReportPrepared", r, finish)
    story.do("CompleteAttempt", "k0", finish)
    story.follow("k0", 2)
    story.open(finish, story.receivers)


def restore_and_finish(story: Story) -> None:
    """A restarted receiver is refused by a delta attempt, restored, and admitted."""
    story.do("StartReceiver", "i1", 3, 0, False)
    for o in story.owners:
        story.do("BeginTransition", o, 3)
    t = story.ask("k0", "by_xor", 3)
    story.do("RefusePrepare", "r1", t)
    story.do("FailAttempt", "k0", t)
    t = story.ask("k0", "restore", 2, ["r1"])
    story.install(t, ["r1"])
    story.stream(t)
    story.acknowledge(t, ["r1"])
    story.do("CompleteAttempt", "k0", t)
    story.do("ConfirmRestore", "k0", t)
    story.do("FinishRestore", "r1", t)
    story.open(t, ["r1"])


def abort(story: Story) -> None:
    """The open candidate is killed and dropped; the committed version is loaded again, and training goes on."""
    t = story.ask("k0", "overwrite", 3)
    story.install(t, story.receivers)
    story.do("FailAttempt", "k0", t)
    story.do("KillCandidate", "k0", 3)
    for o in story.owners:
        story.do("StopOwner", o, t)
        story.do("DropCandidate", o)
        story.do("ReloadWeights", o)
    story.do("BeginTransition", "o0", 4)
