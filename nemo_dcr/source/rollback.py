"""Back to the committed version: every rank's shards are set to the words of the committed baseline.

A candidate that is given up leaves weights that nobody serves. The owner of a shard has its committed words; replicas
get them from it. Where every shard has one holder no rank needs another one. Otherwise all ranks make rounds together,
in each of which an owner sends at most one chunk, until nobody has anything left.
Not handled: optimizer state, and masters that are finer than the served values (both are the trainer's); residual
inputs, whose weights only the trainer can bring back.

Paper: Section 6.3 (abort)   Spec: DropCandidate   Conditions: SC2, SC3
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from nemo_dcr.bits import Words, words
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import OwnerId
from nemo_dcr.source.exchange import Exchange, never
from nemo_dcr.source.geometry import Plan
from nemo_dcr.source.tasks import AffineTask

_Shards = dict[str, bytes]
_MESSAGE = msgspec.msgpack.Decoder(tuple[bool, _Shards])


def roll_back(
    plan: Plan,
    exchange: Exchange,
    tasks: Sequence[AffineTask],
    committed: Mapping[str, Words],
    meeting: str,
    *,
    chunk_bytes: int,
    stopped: Callable[[], bool] = never,
) -> None:
    """Set the shards of all `tasks` that this rank holds to committed words. All ranks together if there are replicas.

    Args:
        plan: what the ranks agreed on.
        exchange: of these ranks.
        tasks: everything that this rank holds, owned or not.
        committed: words of the baseline by key, of the shards that this rank owns.
        meeting: a name for this call, new for each.
        chunk_bytes: an owner sends at most so much in a round, or one shard.
        stopped: asked while this rank waits for others.

    Raises: ConditionViolated (SC3) for a task without a way back, or a shard that no owner sent; AttemptFailed when
    `stopped()` became true; EndpointLost when a rank is gone.
    """
    held = {task.key: task for task in tasks if task.map.domain}
    for key, task in held.items():
        if plan.owners[key] == exchange.rank:
            _set(task, committed[key])
    if not any(len(holders) > 1 for holders in plan.holders.values()):
        return
    waiting = {key for key in held if plan.owners[key] != exchange.rank}
    outgoing = _chunks(plan, OwnerId(exchange.rank), committed, chunk_bytes)
    more, number = True, 0
    while more:
        exchange.meet(f"{meeting}/{number}", stopped)
        number += 1
        mine = next(outgoing, {})
        parts = [
            msgspec.msgpack.encode((bool(mine), {key: data for key, data in mine.items() if rank in plan.holders[key]}))
            for rank in range(exchange.world)
        ]
        received = [_MESSAGE.decode(part) for part in exchange.scatter(parts)]
        more = any(sending for sending, _ in received)
        for rank, (_, shards) in enumerate(received):
            for key, data in shards.items():
                if key in waiting and plan.owners[key] == rank:
                    _set(held[key], words(data, held[key].projection.source))
                    waiting.discard(key)
    if waiting:
        raise ConditionViolated("SC3", min(waiting), "its owner did not send the committed words; load a checkpoint")


def _chunks(plan: Plan, rank: OwnerId, committed: Mapping[str, Words], chunk_bytes: int) -> Iterator[_Shards]:
    """What this rank owns and others hold too, in pieces."""
    chunk: _Shards = {}
    size = 0
    for key, mine in sorted(committed.items()):
        if plan.owners[key] != rank or len(plan.holders[key]) == 1:
            continue
        if chunk and size + mine.nbytes > chunk_bytes:
            yield chunk
            chunk, size = {}, 0
        chunk[key] = mine.tobytes()
        size += mine.nbytes
    if chunk:
        yield chunk


def _set(task: AffineTask, committed: Words) -> None:
    if task.write is None:
        raise ConditionViolated("SC3", task.key, "this task has no way back to the committed words; load a checkpoint")
    task.write(committed)
