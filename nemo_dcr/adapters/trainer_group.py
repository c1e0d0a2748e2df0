"""How the trainer ranks of a run talk: process groups of their own on CPUs, and the store that the ranks met at.

Owners talk while the trainer may be in a collective of its own, so they never share a process group with it, and what
the trainer asks for shares none with what a stream exchanges. A trainer without torch.distributed has one rank and
needs no group.
Not handled: ranks that join or leave; torch starts the whole job anew.

Paper: Section 5 (owners)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch.distributed as dist

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import Incarnation
from nemo_dcr.source.exchange import Exchange, GroupExchange, LoneExchange

_ORDINALS = itertools.count()
"""Meetings of an exchange are used once; all ranks make their exchanges in the same order."""


@dataclass(frozen=True, slots=True)
class TrainerGroup:
    """Two exchanges between the same ranks."""

    calls: Exchange
    """Of the trainer's own thread: what all ranks do together at set-up and on request."""
    streams: Exchange
    """Of the owner's worker thread."""
    groups: tuple[dist.ProcessGroup, ...]

    def agree(self, incarnation: Incarnation) -> Incarnation:
        """The incarnation of rank 0: what all ranks name together begins with it. All ranks call it."""
        return Incarnation(int(self.calls.gather(b"%d" % incarnation)[0]))

    def close(self) -> None:
        """Let go of the process groups, unless torch.distributed has ended before."""
        for group in self.groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)


def trainer_group(group: dist.ProcessGroup | None = None) -> TrainerGroup:
    """How the ranks of `group` talk, or all ranks for None. All of them call it, in the same order.

    Args:
        group: the trainer ranks that hold the model together; its back end does not matter.

    Raises: InvalidConfig when this rank is not in the group.
    """
    if not dist.is_available() or not dist.is_initialized():
        return TrainerGroup(LoneExchange(), LoneExchange(), ())
    if dist.get_rank(group) < 0:
        raise InvalidConfig("group", "this rank is not in it; call from_module on its ranks only")
    ranks = dist.get_process_group_ranks(group)
    # torch has no public name for the store that its ranks met at; a clone is not held up by calls of other threads.
    store = dist.distributed_c10d._get_default_store().clone()
    groups = [dist.new_group(ranks, backend="gloo", use_local_synchronization=True) for _ in range(2)]
    prefix = f"nemo-dcr/{'-'.join(map(str, ranks))}/{next(_ORDINALS)}"
    calls, streams = (GroupExchange(store, each, prefix=f"{prefix}/{at}") for at, each in enumerate(groups))
    return TrainerGroup(calls, streams, tuple(groups))
