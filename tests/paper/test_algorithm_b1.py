"""Algorithm B.1, sentence by sentence: one attempt over real machines and real words.

Each test paraphrases the sentence it checks (Section 6.3 and Appendix B).
"""

from __future__ import annotations

import pytest

from nemo_dcr.config import GateMode
from nemo_dcr.ids import OwnerId, ReceiverId
from nemo_dcr.protocol import endpoint_state as es
from nemo_dcr.protocol.attempt import AttemptPhase
from nemo_dcr.protocol.messages import StreamStatus
from nemo_dcr.protocol.tags import TagKind
from nemo_dcr.protocol.transition_state import Phase
from nemo_dcr.trace import Action
from tests.unit.protocol.cluster import Cluster

E0, E1 = ReceiverId("e0/0"), ReceiverId("e1/0")


def at_version_0(**shape) -> Cluster:
    cluster = Cluster(**shape)
    cluster.become(0)
    cluster.run()
    return cluster


def begun(**shape) -> Cluster:
    """Version 0 is served; the first attempt of version 1 is about to be prepared."""
    cluster = at_version_0(**shape)
    cluster.train(7)
    cluster.run_until(lambda: cluster.coordinators[0].state.phase is Phase.RUNNING)
    return cluster


def actions(cluster: Cluster, attempt: int) -> list[Action]:
    return [event.action for event in cluster.emits if event.attempt == attempt]


def test_each_attempt_runs_prepare_then_streams_checks_applies_and_flushes_its_payloads():
    """Appendix B: each attempt runs prepare, then streams, checks, applies and flushes its payloads."""
    cluster = begun(instances=1)
    cluster.run()
    wanted = [Action.ENDPOINT_PREPARE, Action.EMIT_PAYLOAD, Action.ACCEPT, Action.APPLY_ITEM, Action.FLUSH]
    seen = actions(cluster, 2)
    first = [seen.index(action) for action in wanted]
    assert first == sorted(first)
    assert seen.index(Action.FLUSH) > max(i for i, action in enumerate(seen) if action is Action.APPLY_ITEM)


def test_open_apply_comes_only_after_every_endpoint_is_prepared():
    """Section 7: after prepare, open_apply; payloads travel only to endpoints that know the attempt."""
    cluster = begun()
    cluster.run_until(lambda: cluster.coordinators[0].state.attempt.phase is not AttemptPhase.PREPARING)
    assert all(r.state.attempt == 2 for r in cluster.receivers.values())
    assert cluster.owners[OwnerId(0)].state.status is StreamStatus.PREPARED
    assert not any(key.attempt == 2 for key in cluster.payloads)


def test_endpoints_ignore_payloads_of_an_attempt_that_a_later_prepare_replaced():
    """Appendix B: endpoints ignore payloads, calls and gate operations of an attempt that a later prepare replaced."""
    cluster = begun(instances=1)
    cluster.run_until(lambda: any(key.attempt == 2 for key in cluster.payloads))
    cluster.expire(0)
    cluster.run_until(lambda: cluster.receivers[E0].state.attempt == 3)
    late = next(key for key in cluster.payloads if key.attempt == 2)
    before = dict(cluster.receivers[E0].storage)
    cluster._do_payload(E0, late)
    assert cluster.emits[-1].action is Action.IGNORE_STALE
    assert late not in cluster.receivers[E0].staged
    assert cluster.receivers[E0].storage == before


def test_stop_and_wait_of_a_replaced_attempt_returns_at_once():
    """Appendix B: ... except that its stop_and_wait returns at once."""
    cluster = begun(instances=1)
    cluster.run_until(lambda: cluster.receivers[E0].issued != [])
    cluster.expire(0)
    stop = next(call for call in cluster.coordinators[0].calls if type(call).__name__ == "StopReceiver")
    cluster.run_until(lambda: cluster.receivers[E0].state.attempt == 3)
    cluster._do_call((0, stop), keep=True)
    assert cluster.replies[-1][2].accepted
    assert not cluster.receivers[E0].state.stopped


def test_stopped_attempt_waits_until_its_writes_can_no_longer_take_effect():
    """Section 6.3: it stops the failed attempt and waits until its writes can no longer take effect."""
    cluster = begun(instances=1)
    cluster.run_until(lambda: len(cluster.receivers[E0].issued) > 1)
    cluster.expire(0)
    while steps := [s for s in cluster.progress() if s[0] != "write"]:
        cluster.do(steps[0])
    assert cluster.coordinators[0].state.attempt.phase is AttemptPhase.STOPPING
    assert cluster.receivers[E0].issued
    cluster.run()
    assert cluster.settled()


@pytest.mark.parametrize("gate", list(GateMode))
def test_receivers_apply_while_later_payloads_are_still_on_their_way_only_with_the_synchronous_gate(gate):
    """Section 7: after open_apply, receivers in synchronous RL apply one payload while the next arrives; asynchronous
    receivers stage everything first and serve meanwhile."""
    cluster = begun(instances=1, gate=gate)
    cluster.run_until(lambda: cluster.receivers[E0].state.tag.kind is TagKind.DIRTY)
    complete = len([key for key in cluster.payloads if key.attempt == 2]) == 2 and bool(cluster.manifests)
    staged = len(cluster.receivers[E0].state.seen[OwnerId(0)]) == 2
    assert (complete and staged) or gate is GateMode.SYNC
    assert not cluster.receivers[E0].state.gate_open


def test_duplicate_payloads_are_applied_once():
    """Section 2 (G5): payload deduplication. An XOR that is applied twice would restore the old bits."""
    cluster = begun(instances=1)
    receiver = cluster.receivers[E0]
    for moment in (
        lambda: receiver.staged,
        lambda: receiver.issued,
        lambda: receiver.flushing,
        lambda: receiver.state.acked and receiver.state.attempt == 2,
        cluster.settled,
    ):
        cluster.run_until(moment)
        for key in list(cluster.payloads):
            cluster._do_payload(E0, key)
    cluster.run()
    assert Action.IGNORE_DUPLICATE in [event.action for event in cluster.emits]
    assert cluster.receivers[E0].storage == cluster.versions[1]


@pytest.mark.parametrize("missing", ["payload", "manifest", "write", "flush"])
def test_acknowledgement_needs_every_payload_every_end_every_write_and_the_flush(missing):
    """Section 6.3: after all required receivers have received every expected payload and finished application, device
    synchronization and optional checks."""
    cluster = begun(owners=2)
    held = lambda step: step[0] == missing and step[1] == E1 and (missing != "manifest" or step[2][1] == 1)  # noqa: E731
    while steps := [s for s in cluster.progress() if not held(s)]:
        cluster.do(steps[0])
    assert cluster.receivers[E0].state.acked
    assert not cluster.receivers[E1].state.acked
    assert (cluster.record().version, cluster.coordinators[0].state.phase) == (0, Phase.RUNNING)
    cluster.run()
    assert cluster.settled()


def test_copy_that_breaks_a_condition_fails_the_attempt_and_names_the_receiver():
    """Appendix A: a copy that breaks an integration rule at run time fails the attempt."""
    cluster = begun()
    cluster.run_until(lambda: cluster.receivers[E1].state.tag.kind is TagKind.DIRTY)
    cluster._receive(E1, es.ApplyFailed(cluster.receivers[E1].state.attempt, "condition LC5 broken by 'w'"))
    cluster.run()
    reasons = [event.args["reason"] for event in cluster.emits if event.action is Action.FAIL_ATTEMPT]
    assert reasons == ["receiver e1/0: condition LC5 broken by 'w', in phase applying"]
    assert cluster.settled()
