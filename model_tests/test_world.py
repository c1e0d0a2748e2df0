"""The real parts of the simulated world: engines that are lent, items as bits, copies that break off, and whole refits.

Proofs: loader_commutes, baseline_follows_commit
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from model_tests.contents import Faces, Held
from model_tests.engines import POOL, RANKS, TABLES, busiest, new_engine, tables
from model_tests.nodes import Draw
from model_tests.world import World
from model_tests.world_checks import check
from nemo_dcr.config import GateMode
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, OwnerId
from nemo_dcr.protocol.tags import TrackerKind
from nemo_dcr.source.baseline import BaselineState
from nemo_dcr.testing.local_oracle import stored_bits
from nemo_dcr.testing.local_source import LocalSource
from nemo_dcr.trace import Action

ONE = CandidateId("c1")


def flat(bits) -> np.ndarray:
    return np.frombuffer(b"".join(data for _, (_, _, data) in sorted(bits.items())), np.uint8)


@pytest.mark.parametrize("number", range(0, TABLES, 5))
def test_an_engine_that_is_lent_again_is_as_a_new_one(number):
    table = tables()[number]
    new = new_engine(table.tensors, table.rules, 0, 1)
    used = POOL.lend(number, 0, 1)
    Faces(LocalSource(table.tensors), table, 1).oracle.load(used.model, NO_CANDIDATE)
    POOL.take_back(number, used)
    again = POOL.lend(number, 0, 1)
    POOL.take_back(number, again)
    assert again is used
    assert stored_bits(again.model) == stored_bits(new.model)
    assert again.table.classes == new.table.classes


@pytest.mark.parametrize("number", range(TABLES))
def test_every_stored_byte_that_a_candidate_changes_belongs_to_an_item(number):
    table = tables()[number]
    source = LocalSource(table.tensors, seed=number, owners=2)
    source.draw(ONE, NO_CANDIDATE, 1.0)
    for ranks in RANKS:
        faces = Faces(source, table, ranks)
        for rank in range(ranks):
            old, new = (flat(faces.oracle.expected(rank, ranks, c)) for c in (NO_CANDIDATE, ONE))
            covered = np.zeros(len(old), dtype=np.bool_)
            for places in faces._at[rank].values():
                covered[places] = True
            assert not (old != new)[~covered].any()


def test_what_is_held_is_a_content_only_bit_for_bit():
    w = World(Draw(table=busiest(), loaded=True))
    try:
        r = next(iter(w.receivers.values()))
        assert r.storage == w.candidates[NO_CANDIDATE]
        item, held = next((item, held) for item, held in r.storage.items() if held.data)
        other = Held(bytes([held.data[0] ^ 1]) + held.data[1:], held.rank)
        assert other != w.candidates[NO_CANDIDATE][item]
    finally:
        w.close()


@pytest.mark.parametrize("residual", [False, True])
def test_a_copy_that_breaks_off_behind_each_tensor_ends_as_one_that_does_not(residual):
    w = World(Draw(table=busiest(), residual=residual, instances=1))
    try:
        w.become(0)
        w.run()
        w.train(2)
        w.run_until(lambda: w.owners[OwnerId(0)].copying is not None)
        own, torn = w.owners[OwnerId(0)], 0
        old, new = w.candidates[NO_CANDIDATE], w.candidates[ONE]
        while own.copying is not None:
            items = own.baseline
            assert all(items[item] in (old[item], new[item]) for item in items)
            torn += any(items[i] != old[i] for i in items) and any(items[i] != new[i] for i in items)
            w._do_copy(OwnerId(0))
        assert own.baseline == {item: new[item] for item in own.baseline}
        assert torn or len(own.baseline) == 1
    finally:
        w.close()


def test_a_refill_from_weights_that_change_meanwhile_is_lost():
    w = World(Draw(table=busiest(), instances=1))
    try:
        w.become(0)
        w.run()
        w.lose_baseline(OwnerId(0))
        w.run_until(lambda: w.owners[OwnerId(0)].copying is not None)
        own = w.owners[OwnerId(0)]
        w._do_copy(OwnerId(0))
        w.train(2)
        while own.copying is not None:
            w._do_copy(OwnerId(0))
        assert own.state.tracker.kind is TrackerKind.LOST
        assert own.delta.tag.state is BaselineState.LOST
        w.run()
        assert w.settled()
    finally:
        w.close()


def test_a_stream_whose_baseline_is_lost_twice_fails_once():
    w = World(Draw(table=busiest(), instances=1, chunk=1))
    try:
        w.become(0)
        w.run()
        w.train(2)
        w.run_until(lambda: any(line.action is Action.EMIT_PAYLOAD and line.attempt > 1 for _, line in w.lines))
        for _ in range(2):
            w.lose_baseline(OwnerId(0))
        assert [line.action for _, line in w.lines].count(Action.FAIL_OWNER) == 1
        w.run()
        assert w.settled()
    finally:
        w.close()


@pytest.mark.parametrize("seed", range(6))
def test_refits_over_real_tensors_end_in_the_bits_of_dense_ones(seed):
    rng = random.Random(seed)
    draw = Draw(
        table=rng.randrange(TABLES),
        seed=seed,
        instances=2,
        ranks=1 + seed % 2,
        owners=1 + seed % 2,
        gate=rng.choice(list(GateMode)),
        residual=seed % 4 == 0,
        chunk=rng.choice((1, 64, 512)),
        loaded=seed % 3 == 0,
    )
    w = World(draw)
    try:
        w.become(0)
        for _ in range(3):
            while possible := w.progress():
                w.do(rng.choice(possible))
                check(w)
            assert w.settled()
            w.train(rng.randrange(100))
        assert len(w.versions) == 3
    finally:
        w.close()
