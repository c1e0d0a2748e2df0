"""The payloads of one attempt of one owner, encoded and in declared order: compare, project, bucket, encode, compress.

Apart, two threads work ahead of the taker: one compares and fills buckets, one encodes and compresses, so bucket l+1 is
built while payload l travels. Otherwise the stages take turns on the taker's thread, one payload at a time, and the
taker owns the schedule. Both ways give the same payloads in the same order: number, names and bytes.
Not handled: publishing, and what is traced when (see owner_node).

Paper: Section 5; Section 7 (pipelined delivery); Appendix C (chunks, buckets)   Spec: EmitPayload
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from nemo_dcr.codec.buckets import Bucket
from nemo_dcr.codec.payload import EncodedPayload, encode_payload
from nemo_dcr.codec.records import Encoding, PathClass
from nemo_dcr.config import CodecConfig, QueueConfig
from nemo_dcr.ids import PayloadKey
from nemo_dcr.protocol.owner_state import StartStream
from nemo_dcr.runtime.ahead import Ahead
from nemo_dcr.runtime.timings import StageClock
from nemo_dcr.source.delta import DeltaOwner


@dataclass(frozen=True, slots=True, eq=False)
class FormedPayload:
    """A payload that may go out, and what its line tells."""

    encoded: EncodedPayload
    names: tuple[str, ...]
    """Canonical names of its items, in declared order."""
    masks: int
    """How many of them are XOR masks."""

    @property
    def number(self) -> int:
        """Its place among the payloads of this owner and attempt, from 0."""
        return self.encoded.key.payload


class PayloadStream:
    """Iterate over it inside a `with` block, once; leaving the block ends every stage, whatever the reason."""

    def __init__(
        self,
        delta: DeltaOwner,
        start: StartStream,
        *,
        codec: CodecConfig,
        queue: QueueConfig,
        timings: StageClock,
        stopped: Callable[[], bool],
        apart: bool,
    ) -> None:
        """Check the baseline; nothing is compared yet. `stopped` is asked between chunks and while ranks meet.

        Raises: ConditionViolated (SC3) when the baseline is not committed at the attempt's version. While iterating:
        as `DeltaOwner.stream`.
        """
        self._owner = delta.owner
        self._attempt = start.attempt
        self._codec = codec
        self._timings = timings
        self._over = threading.Event()
        self._stages: tuple[Ahead[Bucket] | Ahead[FormedPayload], ...] = ()
        buckets = delta.stream(
            start.mode,
            {name: PathClass(path) for name, path in start.classes.items()},
            attempt=start.attempt,
            base=start.version,
            stopped=lambda: self._over.is_set() or stopped(),
        )
        self._constructed = self._construct(buckets)
        self._encoded = self._encode(self._constructed)
        self._payloads: Iterator[FormedPayload] = self._encoded
        if apart:
            self._stages = self._apart(queue)

    def _apart(self, queue: QueueConfig) -> tuple[Ahead[Bucket], Ahead[FormedPayload]]:
        constructed = Ahead(
            f"construct-{self._owner}",
            self._constructed,
            attempt=self._attempt,
            slots=queue.buckets_ahead,
            on_full=partial(self._timings.waited, self._attempt, "construct"),
        )
        self._encoded = self._encode(constructed)
        encoded = Ahead(
            f"encode-{self._owner}",
            self._encoded,
            attempt=self._attempt,
            slots=queue.payloads_ahead,
            on_full=partial(self._timings.waited, self._attempt, "encode"),
            on_empty=partial(self._timings.waited, self._attempt, "publish"),
        )
        self._payloads = encoded
        return constructed, encoded

    @property
    def depths(self) -> dict[str, int]:
        """How many results of each stage wait; none where the stages take turns on one thread."""
        return dict(zip(("constructed", "encoded"), (stage.waiting for stage in self._stages), strict=False))

    def __enter__(self) -> PayloadStream:
        for stage in self._stages:
            stage.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every stage and wait for it: afterwards nothing reads the weights any more."""
        self._over.set()
        for stage in self._stages:
            stage.stop()
        for stage in self._stages:
            stage.join()
        self._encoded.close()
        self._constructed.close()

    def __iter__(self) -> Iterator[FormedPayload]:
        return self._payloads

    def _construct(self, buckets: Generator[Bucket, None, None]) -> Generator[Bucket, None, None]:
        with contextlib.closing(buckets):
            for number in itertools.count():
                with self._timings.stage(self._attempt, "construct", str(number)):
                    bucket = next(buckets, None)
                if bucket is None:
                    return
                yield bucket

    def _encode(self, buckets: Iterable[Bucket]) -> Generator[FormedPayload, None, None]:
        for number, bucket in enumerate(buckets):
            key = PayloadKey(self._attempt, self._owner, number)
            with self._timings.stage(self._attempt, "encode", str(number)):
                encoded = encode_payload(key, bucket.items, zstd_level=self._codec.zstd_level)
            names = tuple(item.tensor.name for item in bucket.items)
            masks = sum(item.encoding is Encoding.XOR for item in bucket.items)
            yield FormedPayload(encoded, names, masks)
