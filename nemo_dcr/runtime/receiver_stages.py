"""The stages of one attempt at one receiver: fetched, verified, staged, spilled, decoded and applied, with timings.

They live from the prepare of the attempt to its drain. `stop` drops everything that waits and frees its disk space;
work that is going on then ends without effect, except an application, which the drain waits for.
Not handled: what the machine says to a payload, and which thread calls what (see receiver_node).

Paper: Section 6.3; Appendix C (staging queue), Figure C.2   Spec: Accept, ApplyItem
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import VerifiedPayload, verify_payload
from nemo_dcr.config import CodecConfig, QueueConfig
from nemo_dcr.errors import AttemptFailed, PayloadCorrupt
from nemo_dcr.ids import AttemptId, PayloadKey
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.ingest import DecodedPayload, Ingest
from nemo_dcr.runtime.timings import StageClock
from nemo_dcr.transport.base import Announcement, Downloading, Subscription


class ReceiverStages:
    """The subscription and the staging queue of one attempt. `changed` is the node's condition."""

    def __init__(
        self,
        attempt: AttemptId,
        subscription: Subscription,
        tensors: Mapping[str, TensorMeta],
        *,
        skipped: frozenset[str],
        codec: CodecConfig,
        queue: QueueConfig,
        apart: bool,
        timings: StageClock,
        changed: threading.Condition,
    ) -> None:
        """Begin with a held queue; `tensors`, `skipped` and `apart` as of `Ingest`."""
        self.attempt = attempt
        self.subscription = subscription
        self.ingest = Ingest(attempt, tensors, skipped=skipped, codec=codec, queue=queue, held=True, apart=apart)
        self._codec = codec
        self._apart = apart
        self._timings = timings
        self._changed = changed
        self._waiting: set[str] = set()
        """Stages that wait for room now."""

    def stop(self) -> None:
        """Stop delivery and drop everything that waits."""
        self.subscription.stop()
        self.ingest.stop()

    def await_room(self, timeout_s: float) -> bool:
        """False, after at most `timeout_s` seconds, while intake has to wait for room. The node's lock is held."""
        return self._await("fetch", self.ingest.has_room, timeout_s)

    def await_decoding(self, timeout_s: float) -> bool:
        """False, after at most `timeout_s` seconds, while there is nothing to decode or no slot for it."""
        if self.ingest.is_backed_up:
            return self._await("decode", False, timeout_s)
        self._waiting.discard("decode")
        if not self.ingest.can_advance:
            self._changed.wait(timeout_s)
            return False
        return True

    def _await(self, stage: str, has_room: bool, timeout_s: float) -> bool:
        if has_room:
            self._waiting.discard(stage)
            return True
        begin = time.monotonic()
        self._changed.wait(timeout_s)
        again = stage in self._waiting
        self._waiting.add(stage)
        self._timings.waited(self.attempt, stage, time.monotonic() - begin, times=0 if again else 1)
        return False

    def fetch(self, found: Announcement) -> VerifiedPayload:
        """The announced payload. Raises: AttemptFailed when it is missing, not valid, or another than announced."""
        with self._timings.stage(self.attempt, "fetch", str(found.key)):
            data = self.subscription.fetch(found)
        if isinstance(self.subscription, Downloading):
            for key, begin, end in self.subscription.take_downloads():
                self._timings.span(self.attempt, "download", str(key), begin, end)
        with self._timings.stage(self.attempt, "verify", str(found.key)):
            verified = verify_payload(data, limits=self._codec)
        if (verified.key, verified.digest) != (found.key, found.digest):
            raise PayloadCorrupt(str(found.key), f"it holds {verified.key} with another digest")
        self._timings.count(self.attempt, "payload_bytes", verified.nbytes)
        return verified

    def spill(self) -> None:
        """Bring a held queue back within its memory budget. Raises: AttemptFailed when the disk does not take it."""
        moved = self.ingest.spill()
        if moved:
            self._timings.count(self.attempt, "spilled", moved)

    def decode(self) -> bool:
        """Decode one payload; False when there was none. Raises: AttemptFailed when it is not valid."""
        with self._timings.stage(self.attempt, "decode"):
            try:
                return self.ingest.advance()
            except AttemptFailed:
                if self.ingest.is_stopped:
                    return True  # nobody wants it any more
                raise

    def take_group(self) -> tuple[DecodedPayload, ...]:
        """The next group to apply, decoded here unless `apart`. Raises: AttemptFailed, as `decode`."""
        if self._apart:
            return self.ingest.take_group(0.0)
        with self._timings.stage(self.attempt, "decode"):
            return self.ingest.take_group(0.0)

    def apply(self, group: Sequence[DecodedPayload], applier: Applier, told: Callable[[PayloadKey, str], None]) -> None:
        """Write a group with one loader call; `told` hears of each item once all its entries are written.

        Raises: AttemptFailed, as `Applier.apply`.
        """
        keys = {id(item): payload.key for payload in group for item in payload.items}
        due = Counter((payload.key, name) for payload in group for name in payload.skipped)
        due.update((payload.key, item.tensor.name) for payload in group for item in payload.items)

        def tell(key: PayloadKey, name: str) -> None:
            due[key, name] -= 1
            told(key, name)

        items = [item for payload in group for item in payload.items]
        timings, attempt = self._timings, self.attempt
        timings.mark(attempt, "apply_began", first=True)
        with timings.stage(attempt, "apply", f"{len(group)} payloads from {group[0].key}"):
            report = applier.apply(items, attempt=attempt, on_item=lambda item: tell(keys[id(item)], item.tensor.name))
        timings.mark(attempt, "apply_ended")
        for key, name in tuple(due.elements()):  # this rank holds no element of them, so all of theirs are written
            tell(key, name)
        timings.count(attempt, "items", report.items)
        timings.count(attempt, "elements", report.elements)
        # `apply` was timed around the whole call; the check is told apart so that it can be subtracted.
        timings.add(attempt, "check", report.check_seconds)
        timings.add(attempt, "apply", -report.check_seconds)


def device_synchronize() -> None:
    """Wait for device work; nothing to wait for on a CPU."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
