"""The owner's side of one attempt over a relay tree.

A payload is published when it is acknowledged: queued at the root and at every node below it. Until then the caller's
bytes are read frame by frame as the root grants them, and never copied whole; when `publish` returns or raises, they
are read no more. Several threads may publish into one set, which keeps the link busy while acknowledgements travel.
Not handled: an attempt over more than one tree.

Paper: Section 7 (relay tree); Appendix C (transport interval)   Spec: Channel   Decisions: D24, D31
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable

from nemo_dcr.errors import AttemptFailed, AttemptStopped, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Buffer, Manifest
from nemo_dcr.transport.relay import wire
from nemo_dcr.transport.relay.client import RelayClient
from nemo_dcr.transport.relay.hop import Header, Hop, Offer, ViewSource
from nemo_dcr.transport.relay.tree import RelayTree

WAKE_S = 0.5
"""A waiting caller looks so often whether the client's thread still lives."""


class _Result:
    """What became of one payload or call; set on the loop's thread under the publisher's lock."""

    def __init__(self) -> None:
        self.ended = False
        self.error: AttemptFailed | None = None


class RelayPublisher:
    """As `Publisher`; its methods may be called from several threads."""

    def __init__(self, client: RelayClient, attempt: AttemptId, owner: OwnerId, tree: RelayTree) -> None:
        """Open the stream of `owner` at the root of `tree`. Raises: InvalidConfig when it may not be spoken to."""
        client.security.check_connect(tree.root_node)
        self._client = client
        self._attempt = attempt
        self._owner = owner
        self._tree = tree
        self._changed = threading.Condition()
        self._published: dict[int, Announcement] = {}
        self._results: dict[Offer, _Result] = {}
        self._failure: AttemptFailed | None = None
        self._stopped = False
        self._hop: Hop | None = None
        client.post(self._open)

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        """Send one payload; see `Publisher.publish`. Returns when every node of the tree has queued it.

        Raises: EndpointLost naming the node that is lost; otherwise see `Publisher.publish`.
        """
        objects.check_publish(self._attempt, self._owner, key, digest)
        with memoryview(data) as view, view.cast("B") as body:
            if len(body) > self._client.config.max_payload_bytes:
                detail = f"payload {key} of {len(body)} bytes passes {self._client.config.max_payload_bytes} bytes"
                raise TransportFailed("relay", f"{detail}; make smaller buckets or raise max_payload_bytes")
            checksum = hashlib.blake2b(body, digest_size=16).digest()
            header = Header(self._attempt, self._owner, key.payload, len(body), bytes(digest), checksum)
            offer = Offer(header, ViewSource(body), self)
            try:
                self._wait(offer, lambda hop: hop.offer(offer))
            finally:
                offer.withdraw()
                self._results.pop(offer, None)
        announcement = Announcement(key, header.digest, header.nbytes)
        with self._changed:
            self._published[key.payload] = announcement
        return announcement

    def close_set(self) -> Manifest:
        """Send END; see `Publisher.close_set`. Returns when every node has the whole set."""
        with self._changed:
            manifest = objects.manifest_of(self._attempt, self._owner, self._published.values())
        result = _Result()

        def answer(found: AttemptFailed | wire.FromNode) -> None:
            self._finish(result, found if isinstance(found, AttemptFailed) else None)

        count, digest = len(manifest.payloads), manifest.digest
        self._wait(result, lambda hop: hop.end(self._attempt, self._owner, count, digest, answer))
        return manifest

    def stop(self) -> None:
        """End this attempt: blocked calls raise at once, and what is not complete at the root is dropped there."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            offers = tuple(self._results)  # now: a call that is woken takes its own out
            self._changed.notify_all()
        if self._client.fault is None:
            self._client.post(lambda: self._leave(offers))

    def _wait(self, subject: Offer | _Result, begin: Callable[[Hop], None]) -> None:
        result = subject if isinstance(subject, _Result) else _Result()
        with self._changed:
            self._check()
            if isinstance(subject, Offer):
                self._results[subject] = result
        self._client.post(lambda: self._begin(begin))
        with self._changed:
            while not (result.ended or self._stopped or self._failure):
                self._changed.wait(WAKE_S)
                if self._client.fault is not None:
                    raise TransportFailed("relay", f"the client's thread ended: {self._client.fault!r}")
            if result.error is not None or not result.ended:
                self._check()  # why the attempt failed says more than that its root took no more
            if result.error is not None:
                raise result.error

    def _check(self) -> None:
        if self._stopped:
            raise AttemptStopped(self._attempt, "its publisher was stopped")
        if self._failure is not None:
            # Built anew, because an error that is raised twice keeps the frames of both callers.
            raise wire.error_of(wire.fault_of(self._failure))

    # --------------------------------------------------------------------------------------------- the loop's thread

    def _open(self) -> None:
        try:
            self._hop = self._client.hop(self._tree.root_node)
        except AttemptFailed as problem:
            self.on_failed(self._attempt, problem)
            return
        self._hop.open(self._attempt, self._owner, self._tree, 0, self)

    def _begin(self, begin: Callable[[Hop], None]) -> None:
        if self._hop is not None and not self._stopped:
            begin(self._hop)

    def _leave(self, offers: Iterable[Offer]) -> None:
        if self._hop is not None:
            for offer in offers:
                self._hop.withdraw(offer)
            self._hop.forget(self._attempt, self)

    def on_sent(self, offer: Offer) -> None:
        """As `OfferUser.on_sent`."""

    def on_acked(self, offer: Offer) -> None:
        """As `OfferUser.on_acked`."""
        self._finish(self._results.get(offer), None)

    def on_refused(self, offer: Offer, error: AttemptFailed) -> None:
        """As `OfferUser.on_refused`."""
        self._finish(self._results.get(offer), error)

    def on_failed(self, attempt: AttemptId, error: AttemptFailed) -> None:
        """As `AttemptUser.on_failed`."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _finish(self, result: _Result | None, error: AttemptFailed | None) -> None:
        with self._changed:
            if result is not None:
                result.ended, result.error = True, error
            self._changed.notify_all()
