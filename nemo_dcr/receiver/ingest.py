"""The staging queue of one attempt: validate, drop duplicates, decode, group.

A payload is verified when it arrives and kept compressed. The same payload again is a duplicate and is dropped before
it is decoded; the same key with other bytes fails the attempt; a payload of another attempt is ignored. Decoding
turns staged payloads, in declared order as far as they are there, into a bounded queue of decoded ones, which the
applying thread takes in groups. Decoding is the work of `advance`, on a thread of its own (`apart`) or on the applying
one.
While `held` (asynchronous gate, before open_apply) nothing is decoded, and `spill` keeps memory within its budget. A
stopped queue takes and gives nothing more.
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
from nemo_dcr.receiver.staging import StagingArea


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
        apart: bool = False,
    ) -> None:
        """`tensors` is the table that items must match; items named in `skipped` are not decoded.

        `apart`: another thread calls `advance`, so `take_group` only takes what is decoded.
        """
        self.attempt = attempt
        self._tensors = tensors
        self._skipped = skipped
        self._codec = codec or CodecConfig()
        self._queue = queue or QueueConfig()
        self._changed = threading.Condition()
        self._held = held
        self._apart = apart
        self._stopped = False
        self._seen: dict[PayloadKey, bytes] = {}
        self._staged = StagingArea(
            self._codec, budget_bytes=self._queue.staging_bytes, directory=self._queue.spill_directory
        )
        self._decoded: deque[DecodedPayload] = deque()
        self._taken = 0
        """Payloads of the group that was taken last: they hold their slots until the next one is asked for."""
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
            self._staged.add(payload)
            self._changed.notify_all()
            return Verdict.ACCEPTED

    @property
    def accepted(self) -> dict[PayloadKey, bytes]:
        """Digest of every accepted payload by its key."""
        with self._changed:
            return dict(self._seen)

    @property
    def has_room(self) -> bool:
        """False while all payload slots or all bytes of the staging area are taken; a held queue stages everything."""
        with self._changed:
            full = len(self._staged) + self._in_slots >= self._queue.payload_slots or self._staged.is_full
            return self._held or not full

    def spill(self) -> int:
        """Move staged payloads of a held queue to disk until the rest is within its budget; returns how many.

        Raises: AttemptFailed when the disk does not take them.
        """
        with self._changed:
            held = self._held
        return self._staged.spill() if held else 0

    def release(self) -> None:
        """Allow decoding (open_apply)."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def advance(self) -> bool:
        """Decode the next staged payload; False when none is waiting, the queue is held, stopped or full.

        Raises: PayloadCorrupt when its content is not valid; AttemptFailed when it cannot be read back from disk.
        """
        # One decoder at a time, so that the order of decoding is the order of application.
        with self._decoding:
            with self._changed:
                if not self._can_advance():
                    return False
            payload = self._staged.take()
            if payload is None:
                return False
            items, skipped = payload.decode_some(self._tensors, skip=self._skipped)
            with self._changed:
                if not self._stopped:
                    self._decoded.append(DecodedPayload(payload.key, items, skipped))
                    self._changed.notify_all()
            return True

    def take_group(self, timeout_s: float) -> tuple[DecodedPayload, ...]:
        """The next decoded payloads, at most one group; decodes on this thread unless `apart`. Empty at timeout.

        The group taken before has been applied or given up.
        Raises: PayloadCorrupt and AttemptFailed as `advance`.
        """
        group: list[DecodedPayload] = []
        with self._changed:
            self._taken = 0
        while len(group) < self._queue.group_payloads:
            with self._changed:
                if self._decoded:
                    group.append(self._decoded.popleft())
                    self._taken += 1
                    self._changed.notify_all()
                    continue
            if not self._apart and self.advance():
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
        return bool(self._decoded or self._stopped or (len(self._staged) and not self._held and not self._apart))

    @property
    def can_advance(self) -> bool:
        """True when `advance` would decode."""
        with self._changed:
            return self._can_advance()

    def _can_advance(self) -> bool:
        return bool(not self._held and not self._stopped and not self.is_backed_up and len(self._staged))

    @property
    def is_backed_up(self) -> bool:
        """True while payloads could be decoded and all slots are taken: decoding waits for application."""
        waits = len(self._staged) > 0 and not self._held
        return waits and self._in_slots >= self._queue.payload_slots

    @property
    def _in_slots(self) -> int:
        """Decoded payloads: those that wait, and those that are being applied."""
        return len(self._decoded) + self._taken

    @property
    def depths(self) -> dict[str, int]:
        """How many payloads wait to be decoded, and how many are decoded and not applied."""
        with self._changed:
            return {"staged": len(self._staged), "decoded": self._in_slots}

    @property
    def is_stopped(self) -> bool:
        """True once the queue was stopped."""
        return self._stopped

    def stop(self) -> None:
        """Drop everything that waits, for good, and free its disk space; a waiting `take_group` returns."""
        with self._changed:
            self._stopped = True
            self._staged.close()
            self._decoded.clear()
            self._changed.notify_all()
