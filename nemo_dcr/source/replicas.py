"""A set-up check that data-parallel replicas hold the same bits.

One owner compares each shard for all of its replicas, so replicas that differ would make the delta depend on who owns
the shard. Each rank digests the shards that have replicas; equal keys must have equal digests. The check reads every
replicated shard once: run it at set-up and when in doubt, not in every transition.

Paper: Section 5 (replicas bitwise identical)   Conditions: SC2
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import OwnerId
from nemo_dcr.source.geometry import Plan
from nemo_dcr.source.tasks import AffineTask, ResidualInput


def replica_digests(plan: Plan, shards: Iterable[AffineTask | ResidualInput]) -> dict[str, bytes]:
    """BLAKE2b-128 over the stored bits of each given shard that another rank holds too, by key.

    Raises: ConditionViolated (SC4) when a shard reads differently from its declaration.
    """
    return {
        shard.key: hashlib.blake2b(shard.words().tobytes(), digest_size=16).digest()
        for shard in shards
        if len(plan.holders[shard.key]) > 1
    }


def check_replicas(digests: Mapping[OwnerId, Mapping[str, bytes]]) -> None:
    """Compare the digests of all ranks.

    Raises: ConditionViolated (SC2) that names a shard and the two ranks that differ.
    """
    seen: dict[str, tuple[OwnerId, bytes]] = {}
    for rank in sorted(digests):
        for key, digest in sorted(digests[rank].items()):
            other, expected = seen.setdefault(key, (rank, digest))
            if digest != expected:
                raise ConditionViolated("SC2", key, f"ranks {other} and {rank} hold different bits of this replica")
