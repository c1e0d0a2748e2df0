"""How the trainer ranks of a run talk: process groups of their own on CPUs, over the store that the ranks met at.

Owners talk while the trainer may be in a collective of its own, so they never share a process group with it, and what
the trainer asks for shares none with what a stream exchanges. A trainer without torch.distributed has one rank and
needs no group.
Not handled: ranks that join or leave; torch starts the whole job anew.

Paper: Section 5 (owners)
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import Incarnation
from nemo_dcr.source.exchange import Exchange, LoneExchange, OwnGroupExchange

ROUND_TIMEOUT = timedelta(minutes=30)
"""A rank that is silent inside a round for so long is lost; a round carries one chunk, and at set-up all digests."""


@dataclass(frozen=True, slots=True)
class TrainerGroup:
    """Two exchanges between the same ranks."""

    calls: Exchange
    """Of the trainer's own thread: what all ranks do together at set-up and on request."""
    streams: Exchange
    """Of the owner's worker thread."""

    def agree(self, incarnation: Incarnation) -> Incarnation:
        """The incarnation of rank 0: what all ranks name together begins with it. All ranks call it."""
        return Incarnation(int(self.calls.gather(b"%d" % incarnation)[0]))


def trainer_group(group: dist.ProcessGroup | None = None) -> TrainerGroup:
    """How the ranks of `group` talk, or all ranks for None. All of them call it, in the same order.

    Args:
        group: the trainer ranks that hold the model together; its back end does not matter.

    Raises: InvalidConfig when this rank is not in the group; EndpointLost when another rank does not come.
    """
    if not dist.is_available() or not dist.is_initialized():
        return TrainerGroup(LoneExchange(), LoneExchange())
    rank = dist.get_rank(group)
    if rank < 0:
        raise InvalidConfig("group", "this rank is not in it; call from_module on its ranks only")
    ranks = dist.get_process_group_ranks(group)
    # torch has no public name for the store that its ranks met at; a clone is not held up by calls of other threads.
    store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    name = f"nemo-dcr/{'-'.join(map(str, ranks))}"
    # The store outlives an owner, so each call has keys of its own: every rank counts its calls there.
    number = store.add(f"{name}/calls of {rank}", 1)
    calls, streams = (
        OwnGroupExchange(store, rank, len(ranks), f"{name}/{number}/{use}", ROUND_TIMEOUT)
        for use in ("calls", "streams")
    )
    return TrainerGroup(calls, streams)
