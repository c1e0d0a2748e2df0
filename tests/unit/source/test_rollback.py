"""A candidate that is given up: every rank holds the committed words again, whoever owns them."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_dcr.bits import Words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import AttemptFailed, ConditionViolated
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.rollback import roll_back
from nemo_dcr.source.setup import agree_plan
from nemo_dcr.source.tasks import AffineTask
from nemo_dcr.testing.ranks import ThreadExchange, run_in_threads

REPLICATED = [TensorMeta(f"r{number}", (3, 2), "BF16") for number in range(5)] + [TensorMeta("none", (0, 2), "F32")]
SHARDED = TensorMeta("s", (4, 3), "F32")


class Rank:
    """Replicas of some tensors, and a share of one."""

    def __init__(self, rank: int, world: int, *, ways_back: bool = True) -> None:
        rng = np.random.default_rng(5)
        self.words: dict[str, Words] = {}
        self.tasks = []
        rows = SHARDED.shape[0] // world
        boxes = [BoxMap.whole(tensor) for tensor in REPLICATED]
        boxes.append(BoxMap.box(SHARDED, (rank * rows, 0), (rows, 3)))
        for box in boxes:
            kind = np.dtype("<u2") if box.tensor.dtype == "BF16" else np.dtype("<u4")
            full = rng.integers(0, np.iinfo(kind).max, box.tensor.numel, dtype=kind, endpoint=True)
            self.words[box.label] = box.take(full)
            self.tasks.append(self._task(box, ways_back))

    def _task(self, box: BoxMap, ways_back: bool) -> AffineTask:
        def write(stored: Words) -> None:
            self.words[box.label] = stored.copy()

        return AffineTask.identity(box, lambda: self.words[box.label], write if ways_back else None)

    def train(self) -> None:
        for key, words in self.words.items():
            self.words[key] = words ^ np.array(1, dtype=words.dtype)


def committed(delta: DeltaOwner) -> dict[str, Words]:
    return {box.label: held for _, box, held in delta.tracker_words()}


@pytest.mark.parametrize("chunk", [1, 25, 1 << 20])
def test_replicas_get_the_committed_words_from_their_owner(chunk: int) -> None:
    def work(exchange: ThreadExchange) -> None:
        rank = Rank(exchange.rank, exchange.world)
        plan = agree_plan(exchange, rank.tasks)
        delta = DeltaOwner(OwnerId(exchange.rank), plan.owned_affine(OwnerId(exchange.rank), rank.tasks))
        delta.capture(Version(0))
        before = {key: words.tobytes() for key, words in rank.words.items()}
        for number in range(2):
            rank.train()
            roll_back(plan, exchange, rank.tasks, committed(delta), f"drop/{number}", chunk_bytes=chunk)
            assert {key: words.tobytes() for key, words in rank.words.items()} == before

    run_in_threads(2, work)


def test_a_rank_that_ends_leaves_nobody_waiting() -> None:
    def work(exchange: ThreadExchange) -> None:
        rank = Rank(exchange.rank, exchange.world)
        plan = agree_plan(exchange, rank.tasks)
        delta = DeltaOwner(OwnerId(exchange.rank), plan.owned_affine(OwnerId(exchange.rank), rank.tasks))
        delta.capture(Version(0))
        if exchange.rank == 0:
            with pytest.raises(AttemptFailed, match="stopped"):
                roll_back(plan, exchange, rank.tasks, committed(delta), "d", chunk_bytes=9, stopped=lambda: True)

    run_in_threads(2, work)


def test_a_task_without_a_way_back_and_an_owner_that_sends_nothing_are_named() -> None:
    def no_way(exchange: ThreadExchange) -> None:
        rank = Rank(exchange.rank, exchange.world, ways_back=False)
        plan = agree_plan(exchange, rank.tasks)
        delta = DeltaOwner(OwnerId(exchange.rank), plan.owned_affine(OwnerId(exchange.rank), rank.tasks))
        delta.capture(Version(0))
        roll_back(plan, exchange, rank.tasks, committed(delta), "d", chunk_bytes=9)

    with pytest.raises(ConditionViolated, match="no way back"):
        run_in_threads(1, no_way)

    def silent(exchange: ThreadExchange) -> None:
        rank = Rank(exchange.rank, exchange.world)
        plan = agree_plan(exchange, rank.tasks)
        delta = DeltaOwner(OwnerId(exchange.rank), plan.owned_affine(OwnerId(exchange.rank), rank.tasks))
        delta.capture(Version(0))
        words = committed(delta)
        tasks = rank.tasks if exchange.rank else []
        mine = words if exchange.rank else {}
        roll_back(plan, exchange, tasks, mine, "d", chunk_bytes=9)

    with pytest.raises(ConditionViolated, match="did not send"):
        run_in_threads(2, silent)
