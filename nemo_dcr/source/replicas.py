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

NAMED = 5
"""So many shards of an error are named, the others counted."""


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

    Raises: ConditionViolated (SC2) that names the shards, at most `NAMED` of them, and the ranks that differ.
    """
    held: dict[str, dict[bytes, list[OwnerId]]] = {}
    for rank in sorted(digests):
        for key, digest in digests[rank].items():
            held.setdefault(key, {}).setdefault(digest, []).append(rank)
    differing = {key: list(kinds.values()) for key, kinds in sorted(held.items()) if len(kinds) > 1}
    if not differing:
        return
    first, *others = differing
    detail = f"{_ranks(differing[first])} hold different bits of this replica"
    if others:
        more = f" and {len(others) + 1 - NAMED} more" if len(others) >= NAMED else ""
        named = ", ".join(f"{key!r} ({_ranks(differing[key])})" for key in others[: NAMED - 1])
        detail += f"; so do those of {named}{more}"
    raise ConditionViolated("SC2", first, detail)


def _ranks(kinds: list[list[OwnerId]]) -> str:
    """Ranks with the same bits stand together."""
    return "ranks " + " and ".join(",".join(map(str, ranks)) for ranks in kinds)
