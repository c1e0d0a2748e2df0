"""Fixtures of the tests of the shipped helpers: one real checkpoint a machine, ranks in lockstep."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from nemo_dcr.testing.checkpoint import smollm2_checkpoint


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """The real checkpoint; complete ones of earlier runs are used again."""
    return smollm2_checkpoint(tmp_path_factory.getbasetemp().parent / "nemo-dcr-smollm2")


@pytest.fixture
def in_lockstep():
    """Run one call for each rank at the same time; the calls sum tensors over the ranks in rank order."""

    def run(count, call):
        barrier = threading.Barrier(count)
        parts = [None] * count

        def reduce_of(rank):
            def reduce(x):
                parts[rank] = x
                barrier.wait(timeout=120)
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                barrier.wait(timeout=120)
                return total

            return reduce

        with ThreadPoolExecutor(max_workers=count) as pool:
            futures = [pool.submit(call, rank, reduce_of(rank)) for rank in range(count)]
            return [future.result() for future in futures]

    return run
