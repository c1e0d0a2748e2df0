"""The state machine in the profile of the run, one fixed walk through every rule, and proof that the machine can see.

Spec: Next   Proofs: version_alignment
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest

from model_tests.engines import busiest
from model_tests.machine import RULES, TAKEN, Machine, run_machine, snake_case
from model_tests.nodes import Draw, RealReceiver
from model_tests.pair import Differs, Pair, Unsettled
from model_tests.trace_export import LineRejected
from model_tests.world import World
from nemo_dcr.bits.tensors import resident_words
from nemo_dcr.config import GateMode
from nemo_dcr.ids import OwnerId
from nemo_dcr.trace import Action
from tests.conftest import settings
from tests.unit.protocol.invariants import InvariantBroken

EXAMPLES = {"dev": 40, "ci": 220, "long": 6000}
"""Of the machine, by profile; `long` takes about an hour."""
STEPS = {"dev": RULES, "ci": RULES, "long": 60}
PATIENCE_S = {"dev": 1800, "ci": 1800, "long": 6 * 3600}


def profile() -> str:
    """The profile that the tests run in."""
    return os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")


EVERYTHING = 2
"""A seed by which every element changes."""


def walked() -> Draw:
    """What the fixed walk and the checks of the checks run on: many small payloads."""
    return Draw(table=busiest(), seed=11, instances=2, ranks=1, owners=1, gate=GateMode.ASYNC, chunk=1)


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    """Makes pairs that serve their first record, and takes their engines back."""
    made: list[Pair] = []

    def make(*, names: tuple[str, ...] | None = None) -> Pair:
        made.append(Pair(walked(), names=names))
        made[-1].act(lambda: made[-1].world.become(0))
        made[-1].run(1000, random.Random(0))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.model
@pytest.mark.timeout(PATIENCE_S[profile()])
def test_implementation_and_model_stay_the_same_whatever_happens(tally):
    before = dict(Machine.totals)
    chosen = settings(
        settings.get_profile(profile()), max_examples=EXAMPLES[profile()], stateful_step_count=STEPS[profile()]
    )
    run_machine(Machine, chosen)
    for kind in ("examples", "steps"):
        tally.add(kind, Machine.totals[kind] - before.get(kind, 0))


def walk() -> Machine:
    """Every rule once and more, in an order that takes every action of the specification."""
    m = Machine()
    m.begin(walked(), faults=100, opening="serving", seed=5)
    m.trainings = 100
    calm(m)
    m.begin_transition(seed=EVERYTHING)
    until(m, "emit_payload")
    m.fail_receiver(seed=0, damage=77)
    until(m, "accept")
    for seed in range(len(m.w.payloads)):
        for to in range(2):
            m.ignore_duplicate(seed=seed, to=to)
    for seed in range(4):
        m.ignore_stale(seed=seed)
        m.repeat_manifest(seed=seed, to=seed % 2)
    m.admit_request(seed=0)
    until(m, "emit_payload")
    m.fail_receiver(seed=1, damage=None)
    m.finish_request(seed=0)
    m.apply_item(seed=0, group=False)
    m.apply_item(seed=0, group=True)
    m.delay()
    m.ignore_stale(seed=1)
    m.lose_message(seed=0, reply=False)
    m.lose_message(seed=0, reply=True)
    calm(m)
    m.train(EVERYTHING)
    until(m, "emit_payload")
    m.lose_baseline(seed=0)  # under the stream
    calm(m)
    m.train(EVERYTHING)
    until(m, "prepare")
    m.lose_baseline(seed=0)  # before the owner hears of the attempt
    until(m, "refuse_prepare")
    calm(m)
    m.lose_baseline(seed=0)  # with the committed weights resident
    until(m, "rebuild_baseline")
    until(m, "copy_item")
    m.start_owner(seed=0)
    calm(m)
    m.train(EVERYTHING)
    until(m, "send_commit")
    m.lose_control_reply(seed=0)
    m.late_control(seed=0)
    calm(m)
    m.train(EVERYTHING)
    until(m, "flush")
    m.fail_attempt(seed=0, how="abort")
    until(m, "kill_candidate")
    until(m, "drop_candidate")
    calm(m)
    m.train(EVERYTHING)
    until(m, "send_commit")
    m.acquire_epoch(c=1)
    until(m, "conflict")
    until(m, "step_down")
    for how in ("deadline", "receiver", "owner"):
        m.fail_attempt(seed=0, how=how)
    m.leave(seed=0)
    m.start_receiver(seed=0)
    m.take_one(seed=0)
    m.run_on(seed=0, count=5)
    for action in TAKEN:
        getattr(m, snake_case(action.value))(seed=7, strike="")
    calm(m)
    return m


def until(m: Machine, rule: str) -> None:
    """Call a rule that lets everybody run until its action was taken once more."""
    (action,) = (each.value for each in Action if snake_case(each.value) == rule)
    assert m.pair is not None
    before = m.pair.reached[action]
    for seed in range(40):
        getattr(m, rule)(seed=seed, **({"strike": ""} if any(snake_case(e.value) == rule for e in TAKEN) else {}))
        if m.pair.reached[action] > before:
            return
    raise AssertionError(f"nobody took {action}: {m.pair.where()}")


def calm(m: Machine) -> None:
    """Without faults, everything ends."""
    assert m.pair is not None
    m.pair.settle(m.rng)


def rules() -> set[str]:
    """Names of the rules."""
    return {rule.function.__name__ for rule in Machine.setup_state().rules}


def test_each_action_of_the_specification_has_a_rule_of_its_name():
    assert {snake_case(action.value) for action in Action} <= rules()


@pytest.mark.model
def test_a_fixed_walk_takes_every_action_and_calls_every_rule(tally):
    called: set[str] = set()
    patched = {
        name: mock.patch.object(Machine, name, _noting(called, name, getattr(Machine, name))) for name in rules()
    }
    all_rules = rules()
    for each in patched.values():
        each.start()
    try:
        m = walk()
        try:
            reached = set(m.pair.reached)
            m.pair.prove()
            recorded = list(m.pair.recorded)
            for action in ("StartApply", "Commit", "SeeManifest"):
                place = [line.action for line in recorded].index(action)
                m.pair.recorded[:] = recorded[:place] + recorded[place + 1 :]
                with pytest.raises(LineRejected):
                    m.pair.prove()
        finally:
            m.pair.close()
    finally:
        for each in patched.values():
            each.stop()
    assert {action.value for action in Action} - reached == set()
    assert {line.action for line in recorded} == reached
    assert all_rules - called == set()
    tally.add("steps", m.pair.steps)


def _noting(called: set[str], name: str, function: Callable[..., None]) -> Callable[..., None]:
    def both(self: Machine, **drawn: object) -> None:
        called.add(name)
        function(self, **drawn)

    both.__doc__ = function.__doc__
    return both


# ---------------------------------------------------------------------------------------------- the machine can see


def _stored_word(w: World) -> tuple[RealReceiver, np.ndarray, int]:
    """The words of a stored tensor, and the place of one that an item reaches: padding is nobody's."""
    r = next(iter(w.receivers.values()))
    reached = next(int(places[0]) for places in w.faces._at[r.engine.model.rank].values() if len(places))
    tensors = dict((*r.engine.model.named_parameters(), *r.engine.model.named_buffers()))
    for _, tensor in sorted(tensors.items()):
        words = resident_words(tensor.detach()).reshape(-1)
        if reached < words.nbytes:
            return r, words, reached // words.itemsize
        reached -= words.nbytes
    raise AssertionError("no item is stored")


def flip_stored_bit(w: World) -> None:
    r, words, place = _stored_word(w)
    words[place] ^= words.dtype.type(1)
    r.wrote()


def flip_constant_buffer(w: World) -> None:
    r = next(iter(w.receivers.values()))
    resident_words(dict(r.engine.model.named_buffers())["frequencies"])[0] ^= 1
    r.wrote()


def flip_baseline_bit(w: World) -> None:
    own = w.owners[OwnerId(0)]
    words = next(words for words in own.delta._trackers._words.values() if len(words))
    words[0] ^= words.dtype.type(1)
    own.touched()


@pytest.mark.parametrize(
    ("damage", "error"),
    [(flip_stored_bit, Differs), (flip_constant_buffer, InvariantBroken), (flip_baseline_bit, Differs)],
)
def test_one_wrong_bit_is_seen_at_once(pair, damage, error):
    p = pair()
    with pytest.raises(error):
        p.act(lambda: damage(p.world))
    if damage is flip_constant_buffer:
        flip_constant_buffer(p.world)  # the engine is lent again


def test_one_wrong_bit_is_seen_without_the_model_by_the_property_that_names_it(pair):
    p = pair(names=("clean_exact",))
    with pytest.raises(InvariantBroken, match="clean_exact"):
        p.act(lambda: flip_stored_bit(p.world))


def test_without_the_model_nothing_but_the_named_properties_is_looked_at(pair):
    p = pair(names=("fence_safe",))
    p.act(lambda: flip_stored_bit(p.world))


def test_a_request_that_computes_with_a_changed_version_is_seen(pair):
    p = pair(names=("request_whole",))
    front = next(iter(p.world.receivers))
    p.act(lambda: p.world.request(front))
    with pytest.raises(InvariantBroken, match="request_whole"):
        p.act(lambda: flip_stored_bit(p.world))


def test_a_payload_with_another_content_is_seen(pair):
    p = pair(names=("payload_bound",))
    p.act(lambda: p.world.train(2))
    sound = World._stream

    def altered(self: World, own, stream, attempt, publisher) -> None:
        def one_off():
            for bucket in stream:
                bucket.items[0].values[0] ^= 1
                yield bucket

        sound(self, own, one_off(), attempt, publisher)

    with mock.patch.object(World, "_stream", altered), pytest.raises(InvariantBroken, match="payload_bound"):
        p.run(1000, random.Random(0))


def test_a_line_that_is_no_step_is_seen(pair):
    p = pair()
    node, line = next((n, e) for n, e in reversed(p.world.lines) if e.action is Action.OPEN_GATE)
    with pytest.raises(Exception, match="OpenGate"):
        p.act(lambda: p.world.lines.append((node, line)))


def test_what_never_ends_is_seen(pair):
    p = pair()
    p.act(lambda: p.world.train(2))
    with mock.patch.object(World, "_do_reply", lambda self, i: self.replies.pop(i)), pytest.raises(Unsettled):
        p.settle(random.Random(0), limit=300)


def test_who_can_not_go_on_is_seen(pair):
    p = pair()
    p.act(lambda: p.world.train(2))
    with mock.patch.object(World, "progress", return_value=[]), pytest.raises(Unsettled, match="transition_ends"):
        p.settle(random.Random(0))


def test_a_payload_whose_stream_is_stopped_behind_its_line_is_one_that_the_network_lost(pair):
    """Divergence DV32, which the profile `long` found: a payload was formed, and the stop came before it went out."""
    p, rng = pair(), random.Random(0)
    p.act(lambda: p.world.train(2))
    assert p.reach(Action.EMIT_PAYLOAD, rng, limit=1000)
    own = p.world.owners[OwnerId(0)]
    formed = next(own.stream)
    p.act(lambda: p.world.expire(0))
    while own.stopping is None:
        p.do(rng.choice([step for step in p.world.progress() if step[0] != "emit"]))
    own.stream.close()
    own.stream = (bucket for bucket in [formed])
    told = p.reached["EmitPayload"]
    p.do(("emit", OwnerId(0)))
    (lost,) = p.world.unsent
    assert (p.reached["EmitPayload"] - told, lost in p.world.payloads) == (1, False)
    p.settle(rng)
    p.prove()


FENCELESS = """
    emit_payload 406; owner_prepare 0; owner_prepare 4832; emit_payload 2147 lose_control_reply; emit_payload 768
    emit_payload 224; delay; emit_payload 51145; emit_payload 392; emit_payload 65536 fail_receiver; prepare 31745
    prepare 312; owner_prepare 0; owner_prepare 255; delay; prepare 372; emit_payload 434 acquire_epoch
    emit_payload 25670 start_owner; owner_prepare 765 start_receiver; prepare 1487; prepare 41782; emit_payload 96
    emit_payload 60732 start_receiver
"""
"""Rules, seeds and strikes of a run that Hypothesis found."""


def test_a_transition_with_nobody_left_to_fence_ends_before_anybody_is_restored():
    """Divergence DV33, as the profile `long` found it: a finish attempt loses its only receiver, which restarts."""
    m = Machine()
    drawn = Draw(table=9, seed=5979, instances=1, ranks=1, owners=2, loaded=True)
    m.begin(drawn, faults=4, opening="transition", seed=9603)
    try:
        for rule, *how in (each.split() for each in re.split("[;\n]", FENCELESS) if each.strip()):
            drawn_seed = {"seed": int(how[0]), "strike": "".join(how[1:])} if how else {}
            getattr(m, rule)(**drawn_seed)
        assert m.pair.follower.excuses["DV33"] > 0
        calm(m)
        m.pair.prove()
    finally:
        m.pair.close()


def test_a_run_of_one_draw_is_the_same_each_time(pair):
    runs = []
    for _ in range(2):
        p = pair()
        p.act(lambda p=p: p.world.train(1))
        p.run(60, random.Random(3))
        runs.append([(node, line.action, dict(line.args)) for node, line in p.world.lines])
    assert runs[0] == runs[1]
