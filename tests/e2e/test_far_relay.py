"""An owner and a relay node that are far apart: round trips overlap, and no payload waits for the one before it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from nemo_dcr.codec.payload import EncodedPayload
from nemo_dcr.config import QueueConfig
from nemo_dcr.runtime.payload_stream import FormedPayload
from nemo_dcr.runtime.publish_window import PublishWindow
from nemo_dcr.testing.transport_suite import body_of, digest_of
from nemo_dcr.transport.relay.tree import balanced_tree
from tests.unit.transport.relay_helpers import ONE, OWNER, FarLink, bodies, key, nodes_of, transport_over

pytestmark = pytest.mark.slow

ROUND_TRIP_S = 0.3
NBYTES = 100_000
"""More than travels with an offer: a payload takes a round trip to its grant, and one from its bytes to its end."""


def payload(number: int) -> FormedPayload:
    data = body_of(key(number), NBYTES)
    return FormedPayload(EncodedPayload(key(number), data, digest_of(data)), (f"t{number}",), 0)


@pytest.mark.parametrize(("count", "at_once", "least", "most"), [(3, 1, 6.0, 9.0), (12, 4, 6.0, 12.0)])
def test_payloads_under_way_share_their_round_trips(count: int, at_once: int, least: float, most: float) -> None:
    """One at a time, a payload takes two round trips; four at a time, four payloads do."""
    with nodes_of(1) as nodes:
        link = FarLink(nodes[0].address, ROUND_TRIP_S / 2)
        tree = balanced_tree([replace(nodes[0].place, address=link.address)])
        try:
            with transport_over(tree) as far, transport_over(tree, local=nodes[0].place) as near:
                publisher = far.publisher(ONE, OWNER)
                far.counters(tree.root_node)  # the connection is up
                told: list[int] = []
                window = PublishWindow(
                    publisher,
                    QueueConfig(payloads_in_flight=at_once),
                    name="publish",
                    going=lambda payload: None,
                    publish=lambda each: publisher.publish(each.encoded.key, each.encoded.data, each.encoded.digest),
                    published=lambda number, digest: told.append(number),
                )
                begin = time.monotonic()
                with window:
                    for number in range(count):
                        window.send(payload(number))
                    window.finish()
                round_trips = (time.monotonic() - begin) / ROUND_TRIP_S
                publisher.close_set()
                assert told == list(range(count))
                assert len(bodies(near.subscribe(ONE, [OWNER]))) == count
                traffic = nodes[0].counters().owners[OWNER]
                assert (traffic.received, traffic.received_again) == (count * NBYTES, 0)
        finally:
            link.close()
    assert least <= round_trips <= most
