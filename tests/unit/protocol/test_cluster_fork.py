"""A copied cluster goes its own way, and the same way when it is driven the same."""

from __future__ import annotations

import random

import pytest

from tests.unit.protocol.cluster import Cluster


def started(**kwargs: int) -> Cluster:
    cluster = Cluster(**kwargs)
    cluster.become(0)
    cluster.run()
    return cluster


def drive(cluster: Cluster, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        if possible := cluster.progress():
            cluster.do(rng.choice(possible))


@pytest.mark.parametrize("seed", range(5))
def test_copies_that_are_driven_alike_write_the_same_lines(seed: int) -> None:
    cluster = started(instances=2, owners=2)
    cluster.train(5)
    drive(cluster, seed, 40)
    copy = cluster.fork()
    drive(cluster, seed + 1, 200)
    drive(copy, seed + 1, 200)
    assert copy.lines == cluster.lines
    assert copy.control.journal() == cluster.control.journal()
    assert [r.storage for r in copy.receivers.values()] == [r.storage for r in cluster.receivers.values()]


def test_what_happens_to_a_copy_does_not_happen_to_the_cluster() -> None:
    cluster = started()
    before = (len(cluster.lines), cluster.record(), [dict(r.storage) for r in cluster.receivers.values()], cluster.now)
    copy = cluster.fork()
    copy.train(7)
    copy.run()
    copy.crash_owner(next(iter(copy.owners)))
    copy.restart_instance("e0")
    copy.become(1)
    copy.run()
    assert copy.record() != cluster.record()
    after = (len(cluster.lines), cluster.record(), [dict(r.storage) for r in cluster.receivers.values()], cluster.now)
    assert after == before


def test_the_clock_of_a_copy_is_its_own() -> None:
    cluster = started()
    copy = cluster.fork()
    copy.now += 100
    assert (copy.control._now() - cluster.control._now(), copy.control._now()) == (100, copy.now)
