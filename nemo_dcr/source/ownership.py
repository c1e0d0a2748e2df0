"""Who compares what: a pure function of names, bytes and replica groups.

Data-parallel replicas hold the same bits, so one of them, the owner, compares each shard. Shards that one rank alone
holds go first, as a fixed load. The others follow in the order of a stable hash of their names, and each goes to the
holder with the fewest bytes so far; the hash also breaks ties. Every rank computes the same answer from the same table,
so the assignment is fixed over the attempts of a transition and over restarts.
Residual baselines are spread by the hash of the canonical name alone: all ranks know the place without a table.
Not handled: moving ownership while a transition is open.

Paper: Section 5; Figure A.2, Figure A.4   Proofs: one_owner   Conditions: SC1, SC2
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_dcr.ids import OwnerId


@dataclass(frozen=True, slots=True)
class Shard:
    """One distinct piece of source weights and the ranks that hold a replica of it."""

    key: str
    """Unique; equal on all replicas."""
    nbytes: int
    holders: tuple[OwnerId, ...]
    """Not empty."""


def stable_hash(name: str) -> int:
    """64 bits of BLAKE2b over the UTF-8 name: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


def assign_owners(shards: Iterable[Shard]) -> dict[str, OwnerId]:
    """Owner of each shard by key. The order of `shards` and of their holders does not matter.

    Raises: ValueError when a key repeats or a shard has no holder.
    """
    known = list(shards)
    load: dict[OwnerId, int] = {rank: 0 for shard in known for rank in shard.holders}
    owners: dict[str, OwnerId] = {}
    for shard in sorted(known, key=lambda s: (len(set(s.holders)) > 1, stable_hash(s.key), s.key)):
        if shard.key in owners or not shard.holders:
            raise ValueError(f"shard {shard.key!r} repeats or has no holder")
        holders = sorted(set(shard.holders))
        turn = stable_hash(shard.key) % len(holders)
        # Equal loads fall to different ranks for different names, not always to the lowest rank.
        preference = holders[turn:] + holders[:turn]
        owner = min(preference, key=load.__getitem__)
        owners[shard.key] = owner
        load[owner] += shard.nbytes
    return owners


def owner_loads(shards: Iterable[Shard], owners: Mapping[str, OwnerId]) -> dict[OwnerId, int]:
    """Bytes that each rank owns; ranks that own nothing count 0."""
    load: dict[OwnerId, int] = {}
    for shard in shards:
        for rank in shard.holders:
            load.setdefault(rank, 0)
        load[owners[shard.key]] += shard.nbytes
    return load


def residual_owner(name: str, world: int) -> OwnerId:
    """Rank that keeps the residual baseline of the canonical tensor `name` among ranks 0 .. world-1."""
    return OwnerId(stable_hash(name) % world)
