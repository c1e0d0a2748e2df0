"""The guards behind the failure tests of the relay tree: rows for `guards.py`, and how each guard is taken out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.admission import Admission
from nemo_dcr.transport.relay.attempts import AttemptTable, OwnerSet
from nemo_dcr.transport.relay.delivery import Delivery
from nemo_dcr.transport.relay.hop import Offer
from nemo_dcr.transport.relay.keys import Security
from nemo_dcr.transport.relay.listener import Listener
from nemo_dcr.transport.relay.publisher import RelayPublisher
from nemo_dcr.transport.relay.relaying import Relaying
from nemo_dcr.transport.relay.store import Body, Store

Patch = pytest.MonkeyPatch
D = "tests/failures/test_group_d_relay.py"


def publish_returns_at_once(patch: Patch) -> None:
    waits = RelayPublisher._wait

    def posts(self: RelayPublisher, subject: Any, begin: Any) -> None:
        if isinstance(subject, Offer):
            self._client.post(lambda: self._begin(begin))
        else:
            waits(self, subject, begin)

    patch.setattr(RelayPublisher, "_wait", posts)


def late_joiners_see_what_comes_later(patch: Patch) -> None:
    answer = Delivery.next

    def from_now_on(self: Delivery, peer: bytes, message: wire.Next) -> None:
        attempt = self._table.find(message.attempt)
        if attempt is not None and message.index == 0:
            place = len(attempt.log)
            message = wire.Next(message.attempt, message.session, message.owners, place, message.wait)
        answer(self, peer, message)

    patch.setattr(Delivery, "next", from_now_on)


def the_end_is_confirmed_without_the_children(patch: Patch) -> None:
    confirm = Relaying._confirm

    def at_once(self: Relaying, owned: OwnerSet) -> None:
        owned.open_below = 0
        confirm(self, owned)

    patch.setattr(Relaying, "_confirm", at_once)


def finished_attempts_stay(patch: Patch) -> None:
    patch.setattr(AttemptTable, "drop_through", lambda self, through: [])


def any_run_is_welcome(patch: Patch) -> None:
    greet = Listener._greet

    def welcome(self: Listener, peer: bytes, hello: wire.Hello) -> None:
        greet(self, peer, wire.Hello(hello.version, self._run))

    patch.setattr(Listener, "_greet", welcome)


def nothing_is_spilled(patch: Patch) -> None:
    reserve = Store.reserve

    def in_memory(self: Store, nbytes: int) -> Body | None:
        return reserve(self, nbytes) if self._counters.memory_bytes + nbytes <= self._memory_bytes else None

    patch.setattr(Store, "reserve", in_memory)


def every_key_is_admitted(patch: Patch) -> None:
    patch.setattr(Security, "admits", lambda self, key: True)


def sizes_are_believed(patch: Patch) -> None:
    patch.setattr(Admission, "require_size", lambda self, header: None)


RELAY_GUARDS: tuple[tuple[str, str, Callable[[Patch], None], str], ...] = (
    (
        "D1",
        "transport.relay.publisher.RelayPublisher._wait",
        publish_returns_at_once,
        f"{D}::test_d1_a_buffer_may_be_reused_as_soon_as_publish_returns",
    ),
    (
        "D3",
        "transport.relay.delivery.Delivery.next",
        late_joiners_see_what_comes_later,
        f"{D}::test_d3_a_receiver_that_joins_late_or_reads_nothing_for_a_while_misses_nothing",
    ),
    (
        "D4",
        "transport.relay.relaying.Relaying._confirm",
        the_end_is_confirmed_without_the_children,
        f"{D}::test_d4_a_leaf_that_dies_after_the_acknowledgement_fails_the_set_and_a_retry_goes_round_it",
    ),
    (
        "D4",
        "transport.relay.attempts.AttemptTable.drop_through",
        finished_attempts_stay,
        f"{D}::test_d4_a_finished_attempt_leaves_nothing_behind",
    ),
    (
        "D7",
        "transport.relay.listener.Listener._greet",
        any_run_is_welcome,
        f"{D}::test_d7_two_runs_on_one_host_do_not_meet_and_a_port_is_free_after_a_crash",
    ),
    (
        "D9",
        "transport.relay.store.Store.reserve",
        nothing_is_spilled,
        f"{D}::test_d9_payloads_larger_than_the_memory_budget_fit_exactly_or_are_empty",
    ),
    (
        "D10",
        "transport.relay.keys.Security.admits",
        every_key_is_admitted,
        f"{D}::test_d10_a_wrong_or_missing_key_is_refused_at_every_call",
    ),
    (
        "D10",
        "transport.relay.admission.Admission.require_size",
        sizes_are_believed,
        f"{D}::test_d10_sizes_are_checked_as_declared_and_a_pickle_is_no_message",
    ),
)
"""(entry, function, how it is taken out, test), without parameters."""
