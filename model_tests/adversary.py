"""Seeded walks of the simulated cluster with everything that the specification lets go wrong, and what they found.

Beside the faults of `chaos`, payloads arrive damaged or whole but not as the owner listed them, through the real codec;
a candidate may change nothing; and the trainer asks for an optimizer step at any time, which it makes only where every
owner lets it. None of this breaks a property of sound code.
Not handled: the pieces that the cluster plays itself, such as the stream of an owner (see `mutants.REAL`).

Paper: Table B.2 (failures)   Spec: Arrived, NextCandidate, Fairness
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.config import CodecConfig, GateMode
from nemo_dcr.errors import AttemptFailed
from nemo_dcr.ids import CandidateId, PayloadKey, ReceiverId
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol import owner, owner_state
from nemo_dcr.record import AttemptMode
from nemo_dcr.runtime import receiver_stages
from tests.unit.protocol.chaos import ALL_FAULTS, disturb, fault, in_window, settle_down
from tests.unit.protocol.cluster import Cluster, Payload, Step, Words
from tests.unit.protocol.invariants import FINALLY, InvariantBroken, check

CODEC = CodecConfig()
STEPS = (
    "call",
    "reply",
    "push",
    "payload",
    "manifest",
    "apply",
    "write",
    "flush",
    "drain",
    "emit",
    "copy",
    "control",
    "control_reply",
    "survey",
    "poll",
    "poll_owner",
    "look",
    "stopped",
)
SETTLES_WITHIN = 1500
"""Steps without faults; sound code needs a tenth of that."""


class Adversary(Cluster):
    """A cluster whose trainer and network do more of what they are not expected to do."""

    def train(self, seed: int) -> CandidateId:
        """As for any cluster, but one step in five changes nothing."""
        if seed % 5:
            return super().train(seed)
        name = CandidateId(f"c{len(self.candidates)}")
        self.candidates[name] = self.current_words()
        for o in self.owners:
            self._own(o, owner_state.WeightsChanged())
            self._own(o, owner_state.CandidateFrozen(name))
        return name

    def put(self, candidate: CandidateId, words: Words) -> None:
        """The weights, and the candidate that they are, become `words`."""
        self.candidates[candidate] = dict(words)
        for o, own in self.owners.items():
            own.weights = {item: words[item] for item in self.items[o]}

    def step_again(self, seed: int) -> None:
        """The trainer asks for an optimizer step with a frozen candidate, and makes it if every owner lets it."""
        frozen = {own.state.candidate for own in self.owners.values()}
        answers = [owner.step(own.state, owner_state.WeightsChanged())[1] for own in self.owners.values()]
        refused = [a for effects in answers for a in effects if isinstance(a, owner_state.AnswerTrainer) and a.refusal]
        if refused or len(frozen) > 1 or "" in frozen or not self.versions:
            return
        for o in self.owners:
            self._own(o, owner_state.WeightsChanged())
        words = dict(self.versions[-1])
        words[self.all_items[seed % len(self.all_items)]] ^= 0x0100
        self.put(frozen.pop(), words)

    def arrive(self, name: ReceiverId, key: PayloadKey, *, damaged: bool) -> None:
        """A payload arrives in a form that its owner did not send: damaged bytes, or whole bytes of another payload."""
        sound = self.payloads[key]
        if damaged:
            data = bytearray(encoded(sound))
            data[-20] ^= 0x40  # 16 bytes of digest, 3 of an empty block: the high byte of the last value
            content, digest = received(bytes(data)), sound.digest
        else:
            content = replace(sound, records=tuple(self._foreign(key, *record) for record in sound.records))
            digest = content.digest
        if content is None:
            self._receive(name, es.PayloadRejected(key.attempt, "damaged"))
            return
        staged = self.receivers[name].staged
        waited = key in staged
        self._receive(name, es.PayloadStaged(key, digest))
        if key in staged and not waited:
            staged[key] = content

    def _foreign(self, key: PayloadKey, item: str, xor: bool, word: int) -> tuple[str, bool, int]:
        """What changes nothing where a change was due; where all is sent, any other word."""
        entry = self.entry(key.attempt)
        if entry.mode in (AttemptMode.DENSE, AttemptMode.RESTORE):
            return item, xor, word ^ 0x0010
        return item, xor, 0 if xor else self.versions[entry.baseline][item]


def encoded(payload: Payload) -> bytes:
    """The payload as a socket carries it."""
    items = [
        Item(
            TensorMeta(name, (1,), "BF16"),
            Encoding.XOR if xor else Encoding.OVERWRITE,
            0,
            None,
            np.array([word], dtype=np.uint16),
        )
        for name, xor, word in payload.records
    ]
    return encode_payload(payload.key, items, zstd_level=CODEC.zstd_level).data


def received(data: bytes) -> Payload | None:
    """What the receiving node makes of it; None when it rejects it."""
    try:
        verified = receiver_stages.verify_payload(data, limits=CODEC)
        items = verified.decode()
    except AttemptFailed:
        return None
    records = tuple((item.tensor.name, item.encoding is Encoding.XOR, int(item.values[0])) for item in items)
    return Payload(verified.key, records)


def start(rng: random.Random, *, warm: bool = True, on_start: Callable[[Cluster], object] | None = None) -> Adversary:
    """A drawn cluster; `warm`: after its first record, with everybody serving."""
    c = Adversary(
        instances=rng.choice((2, 3)),
        ranks=rng.choice((1, 1, 2)),
        owners=rng.choice((1, 2)),
        gate=rng.choice((GateMode.SYNC, GateMode.ASYNC)),
    )
    if on_start is not None:
        on_start(c)
    c.become(0)
    if warm:
        c.run()
    return c


@dataclass(frozen=True)
class Mood:
    """What one walk favours: one that does a little of everything rarely gets far into any corner."""

    faults: tuple[str, ...]
    fault_rate: float
    disturb_rate: float
    slow: frozenset[str]
    """Kinds of steps that are put off for as long as something else is possible, mostly."""
    slow_node: str
    """And all steps of this node."""

    def puts_off(self, step: Step) -> bool:
        """Something else shall be done first."""
        return step[0] in self.slow or _node(step) == self.slow_node

    @staticmethod
    def drawn(rng: random.Random) -> Mood:
        return Mood(
            tuple(rng.sample(ALL_FAULTS, rng.randrange(4))),
            rng.choice((0.01, 0.03, 0.1)),
            rng.choice((0.0, 0.1, 0.3)),
            frozenset(rng.sample(STEPS, rng.randrange(4))),
            rng.choice(("", "", "e0/0", "owner 0", "coordinator 0", "coordinator 1")),
        )


def walk(
    c: Adversary,
    rng: random.Random,
    names: tuple[str, ...],
    *,
    steps: int = 300,
    budget: int = 4,
    trainings: int = 3,
) -> None:
    """Steps in drawn order; after each of them `names` are checked.

    Raises: InvariantBroken.
    """
    mood = Mood.drawn(rng)
    for _ in range(steps):
        if trainings and c.can_train() and rng.random() < 0.2:
            trainings -= 1
            c.train(rng.randrange(1, 1 << 9))
        elif budget and mood.faults and rng.random() < mood.fault_rate * (4 if in_window(c) else 1):
            budget -= fault(c, rng.choice(mood.faults), rng)
        elif rng.random() < mood.disturb_rate:
            _disturb(c, rng)
        elif possible := c.progress():
            fast = [step for step in possible if not mood.puts_off(step)]
            c.do(rng.choice(fast if fast and rng.random() < 0.95 else possible))
        check(c, names)


def _node(step: Step) -> str:
    """The node that the step concerns."""
    kind, first = step[0], step[1]
    if kind == "call":
        call = first[1]
        return str(call.receiver) if hasattr(call, "receiver") else f"owner {call.owner}"
    if kind in ("emit", "copy", "stopped"):
        return f"owner {first}"
    return f"coordinator {first}" if isinstance(first, int) else str(first)


def _disturb(c: Adversary, rng: random.Random) -> None:
    names, newest = list(c.receivers), list(c.payloads)[-4:]
    match rng.randrange(8):
        case 0 if newest:
            c.arrive(rng.choice(names), rng.choice(newest), damaged=rng.random() < 0.5)
        case 1 | 2 if newest:
            c._do_payload(rng.choice(names), rng.choice(newest))
        case 3:
            c.step_again(rng.randrange(9))
        case 4 if c.commits:
            c._execute(c.commits[-1])
        case _:
            disturb(c, rng)


def unsettled(c: Adversary, rng: random.Random) -> list[str]:
    """Liveness properties that do not hold although nothing more goes wrong."""
    try:
        settle_down(c, rng, (), SETTLES_WITHIN)
    except InvariantBroken:
        raise
    except AssertionError:
        pass
    return [name for name, holds in FINALLY.items() if not holds(c)]
