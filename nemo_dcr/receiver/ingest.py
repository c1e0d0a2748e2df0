"""The staging queue of one attempt: validate, drop duplicates, decode, group.

A payload is verified when it arrives and kept compressed. The same payload again is a duplicate and is dropped before
it is decoded; the same key with other bytes fails the attempt; a payload of another attempt is ignored. Decoding
turns staged payloads, in the order of arrival, into a bounded queue of decoded ones, which the applying thread takes
in groups.
While `held` (asynchronous gate, before open_apply) nothing is decoded. A stopped queue takes and gives nothing more.
Not handled: fetching, completeness of the set and acknowledgements (protocol/, runtime/).

Paper: Section 6.3; Appendix C (queue sizes), Figures B.2, C.2   Spec: Accept, IgnoreDuplicate, IgnoreStale
Proofs: L9 dedup_once   Conditions: LC6
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import VerifiedPayload, verify_payload
from nemo_dcr.codec.records import Item
from nemo_dcr.config import CodecConfig, QueueConfig
from nemo_dcr.errors import PayloadCorrupt
from nemo_dcr.ids import AttemptId, PayloadKey


class Verdict(StrEnum):
    """What became of an offered payload."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    """Its key and digest were accepted before."""
    STALE = "stale"
    """It belongs to another attempt."""
    STOPPED = "stopped"
    """The queue was stopped."""


@dataclass(frozen=True, slots=True)
class DecodedPayload:
    """The items of one payload that this rank has to apply."""

    key: PayloadKey
    items: tuple[Item, ...]
    skipped: tuple[str, ...] = ()
    """Names of its other items, of which this rank holds nothing."""


class Ingest:
    """Staging queue of one attempt; any number of intake threads, one applying thread."""

    def __init__(
        self,
        attempt: AttemptId,
        tensors: Mapping[str, TensorMeta],
        *,
        skipped: frozenset[str] = frozenset(),
        codec: CodecConfig | None = None,
        queue: QueueConfig | None = None,
        held: bool = False,
    ) -> None:
        """`tensors` is the table that items must match; items named in `skipped` are not decoded."""
        self.attempt = attempt
        self._tensors = tensors
        self._skipped = skipped
        self._codec = codec or CodecConfig()
        self._queue = queue or QueueConfig()
        self._changed = threading.Condition()
        self._held = held
        self._stopped = False
        self._seen: dict[PayloadKey, bytes] = {}
        self._staged: deque[VerifiedPayload] = deque()
        self._decoded: deque[DecodedPayload] = deque()
        self._decoding = threading.Lock()

    def offer(self, data: bytes | bytearray | memoryview) -> Verdict:
        """Verify a payload and stage it; never blocks and never decodes. `data` must not change afterwards.

        Raises: PayloadCorrupt when the payload is not valid, or repeats a key with other bytes.
        """
        return self.stage(verify_payload(data, limits=self._codec))

    def stage(self, payload: VerifiedPayload) -> Verdict:
        """Stage a payload that was verified before; otherwise as `offer`.

        Raises: PayloadCorrupt when it repeats a key with other bytes.
        """
        with self._changed:
            if payload.key.attempt != self.attempt:
                return Verdict.STALE
            if self._stopped:
                return Verdict.STOPPED
            if payload.key in self._seen:
                if self._seen[payload.key] != payload.digest:
                    raise PayloadCorrupt(str(payload.key), "it came before with other bytes under the same identifier")
                return Verdict.DUPLICATE
            self._seen[payload.key] = payload.digest
            self._staged.append(payload)
            self._changed.notify_all()
            return Verdict.ACCEPTED

    @property
    def accepted(self) -> dict[PayloadKey, bytes]:
        """Digest of every accepted payload by its key."""
        with self._changed:
            return dict(self._seen)

    @property
    def has_room(self) -> bool:
        """False while all payload slots are taken; a held queue stages the whole delta."""
        with self._changed:
            return self._held or len(self._staged) + len(self._decoded) < self._queue.payload_slots

    def release(self) -> None:
        """Allow decoding (open_apply)."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def advance(self) -> bool:
        """Decode the oldest staged payload; False when none is waiting, the queue is held, stopped or full.

        Raises: PayloadCorrupt when its content is not valid.
        """
        # One decoder at a time, so that the order of arrival is the order of application.
        with self._decoding:
            with self._changed:
                full = len(self._decoded) >= self._queue.payload_slots
                if self._held or self._stopped or full or not self._staged:
                    return False
                payload = self._staged.popleft()
            items, skipped = payload.decode_some(self._tensors, skip=self._skipped)
            with self._changed:
                if not self._stopped:
                    self._decoded.append(DecodedPayload(payload.key, items, skipped))
                    self._changed.notify_all()
            return True

    def take_group(self, timeout_s: float) -> tuple[DecodedPayload, ...]:
        """The next decoded payloads, at most one group; decodes on this thread when none is ready. Empty at timeout.

        Raises: PayloadCorrupt as `advance`.
        """
        group: list[DecodedPayload] = []
        while len(group) < self._queue.group_payloads:
            with self._changed:
                if self._decoded:
                    group.append(self._decoded.popleft())
                    self._changed.notify_all()
                    continue
            if self.advance():
                continue
            with self._changed:
                if group or self._stopped or not self._changed.wait_for(self._is_ready, timeout_s):
                    break
        return tuple(group)

    @property
    def is_ready(self) -> bool:
        """True when `take_group` would not wait."""
        with self._changed:
            return self._is_ready()

    def _is_ready(self) -> bool:
        return bool(self._decoded or self._stopped or (self._staged and not self._held))

    def stop(self) -> None:
        """Drop everything that waits, for good; a waiting `take_group` returns."""
        with self._changed:
            self._stopped = True
            self._staged.clear()
            self._decoded.clear()
            self._changed.notify_all()
