"""What the trainer ranks do once, before the first transition: exchange geometry and agree on a plan.

Every rank describes its shards, all rows are gathered once, and each rank computes the same plan or raises the same
error. Replicas are then compared bit by bit through digests. After this, affine construction needs no other rank.

Paper: Section 5; Figure A.2   Proofs: one_owner   Conditions: SC1, SC2
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.ids import OwnerId
from nemo_dcr.source.exchange import Exchange
from nemo_dcr.source.geometry import Plan, ShardRow, affine_row, input_row, make_plan, residual_row
from nemo_dcr.source.replicas import check_replicas, replica_digests
from nemo_dcr.source.tasks import AffineTask, ResidualInput, ResidualTask

_ROWS = msgspec.msgpack.Decoder(list[ShardRow])
_DIGESTS = msgspec.msgpack.Decoder(dict[str, bytes])


def agree_plan(
    exchange: Exchange,
    affine: Sequence[AffineTask],
    inputs: Sequence[ResidualInput] = (),
    residual: Sequence[ResidualTask] = (),
    *,
    expected: Iterable[TensorMeta] | None = None,
    check_bits: bool = True,
) -> Plan:
    """The plan of all ranks; each calls this with everything that it holds.

    `expected` is the checkpoint's tensor table, where it is known; `check_bits` compares replicas bit by bit (SC2).

    Raises: UnsupportedMapping (SC1, SC2, SC6) for a fault in the table; ConditionViolated (SC2) for replicas that
    differ; EndpointLost.
    """
    rank = OwnerId(exchange.rank)
    rows = [
        *(affine_row(rank, task) for task in affine),
        *(input_row(rank, watched) for watched in inputs),
        *(residual_row(rank, task) for task in residual),
    ]
    tables = exchange.gather(msgspec.msgpack.encode(rows))
    plan = make_plan((row for table in tables for row in _ROWS.decode(table)), expected=expected)
    if check_bits:
        agree_bits(exchange, plan, (*affine, *inputs))
    return plan


def agree_bits(exchange: Exchange, plan: Plan, shards: Iterable[AffineTask | ResidualInput]) -> None:
    """Compare all replicas bit by bit; each rank calls this with everything that it holds, at set-up and on request.

    Raises: ConditionViolated (SC2) for replicas that differ, (SC4) for a shard unlike its declaration; EndpointLost.
    """
    digests = exchange.gather(msgspec.msgpack.encode(replica_digests(plan, shards)))
    check_replicas({OwnerId(other): _DIGESTS.decode(data) for other, data in enumerate(digests)})
