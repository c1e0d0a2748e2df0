"""Each property of the cluster refuses a state that breaks it; test_mutants.py shows which guards keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nemo_dcr.ids import CandidateId, Epoch, OwnerId, ReceiverId, Version
from nemo_dcr.protocol.tags import Tag, TagKind
from tests.unit.protocol.cluster import Cluster
from tests.unit.protocol.invariants import FINALLY, INVARIANTS, InvariantBroken, check

E0 = ReceiverId("e0/0")


def tagged(c: Cluster, tag: Tag) -> None:
    """e0 claims something and holds one bit that no version and no candidate has there."""
    c.receivers[E0].state = replace(c.receivers[E0].state, tag=tag)
    c.receivers[E0].storage["o0.a"] ^= 1 << 15


def done(c: Cluster) -> None:
    tagged(c, Tag(TagKind.DONE, Version(0), CandidateId("c1"), c.receivers[E0].state.attempt))


def dirty(c: Cluster) -> None:
    tagged(c, Tag(TagKind.DIRTY, Version(0), CandidateId("c1")))


def other_weights(c: Cluster) -> None:
    c.owners[OwnerId(0)].weights["o0.a"] ^= 1


def stale_belief(c: Cluster) -> None:
    node = c.coordinators[0]
    view = replace(node.state.view, record=c.control.history()[0])
    node.state = replace(node.state, view=view)


def fenced_by_the_replaced(c: Cluster) -> None:
    c.control._attempts.append(replace(c.control._attempts[-1], epoch=Epoch(0)))


def committed_dead(c: Cluster) -> None:
    c.control._dead.add(CandidateId("c1"))


def acknowledgement_withdrawn(c: Cluster) -> None:
    c.receivers[E0].state = replace(c.receivers[E0].state, acked=False)


def revived(c: Cluster) -> None:
    c.control._dead.clear()


def written_while_serving(c: Cluster) -> None:
    c.receivers[E0].storage["o0.a"] ^= 1


def opened_over_the_version_before(c: Cluster) -> None:
    c.service[1][E0] = (dict(c.versions[0]), False, True)
    c.receivers[E0].storage = dict(c.versions[0])


def committed_and_closed_at_once(c: Cluster) -> None:
    c.versions.append(dict(c.versions[-1]))
    c.receivers[E0].state = replace(c.receivers[E0].state, gate_open=False)


def committed_over_other_words(c: Cluster) -> None:
    c.versions.append(dict(c.versions[0]))
    for r in c.receivers.values():
        r.state = replace(r.state, gate_open=False)
    c.service = (2, {name: (storage, False, bound) for name, (storage, _, bound) in c.service[1].items()})


def written_while_bound(c: Cluster) -> None:
    c.receivers[E0].state = replace(c.receivers[E0].state, gate_open=False)
    c.receivers[E0].storage["o0.a"] ^= 1


def frozen_for_ever(c: Cluster) -> None:
    c.owners[OwnerId(0)].state = replace(c.owners[OwnerId(0)].state, candidate=CandidateId("c1"))


def never_opened(c: Cluster) -> None:
    c.receivers[E0].state = replace(c.receivers[E0].state, gate_open=False)


BAD = [
    ("done_exact", done),
    ("dirty_repairable", dirty),
    ("baseline_bound", other_weights),
    ("takeover_decides", stale_belief),
    ("attempt_order", fenced_by_the_replaced),
    ("single_commit", committed_dead),
    ("ack_kept", acknowledgement_withdrawn),
    ("dead_kept", revived),
    ("refit_steps", written_while_serving),
    ("refit_steps", opened_over_the_version_before),
    ("refit_steps", written_while_bound),
    ("refit_steps", committed_and_closed_at_once),
    ("refit_steps", committed_over_other_words),
]


def served() -> Cluster:
    """Version 1 is served, candidate c2 was given up."""
    c = Cluster()
    c.become(0)
    c.run()
    c.train(5)
    c.run()
    c.train(6)
    c.run_until(lambda: c.coordinators[0].state.attempt.plan.candidate == "c2")
    c.abort(0)
    c.run()
    assert c.settled()
    assert (c.record().version, c.control._dead) == (1, {"c2"})
    for name in INVARIANTS:
        INVARIANTS[name](c)  # step properties see what they are to compare with
    return c


@pytest.mark.parametrize(("name", "spoil"), BAD, ids=lambda each: getattr(each, "__name__", each))
def test_a_property_refuses_what_breaks_it(name: str, spoil: Callable[[Cluster], None]) -> None:
    c = served()
    check(c)
    spoil(c)
    with pytest.raises(InvariantBroken, match=name):
        check(c, (name,))


def test_what_must_hold_at_the_end_can_fail() -> None:
    c = served()
    assert [name for name, holds in FINALLY.items() if not holds(c)] == []
    frozen_for_ever(c)
    assert [name for name, holds in FINALLY.items() if not holds(c)] == ["transition_ends"]
    never_opened(c)
    assert [name for name, holds in FINALLY.items() if not holds(c)] == ["transition_ends", "all_serve"]
