"""S3 object storage: one upload for each payload, and a manifest for each owner and attempt that closes the set.

A stored object is its own announcement: readers list the owner's keys and read the frame of what is new, so downloads
overlap construction and an owner sends one request for each payload. Keys carry run, attempt and owner; the manifest
sorts after the payloads. The same bytes under the same key are accepted again; other bytes are a conflict, by the
server's condition where it has one, and by a comparison of what is stored before the set is closed in any case.
Cleanup first notes how far it goes, then deletes. Publishers read that note beside every upload and once more after the
manifest, so that what lands late is taken back by whoever put it there, or by the next cleanup.
Not handled: buckets that keep versions (deleted payloads stay as old versions; see docs/object-storage.md).

Paper: Section 7 (object storage)   Spec: Channel   Conditions: SC4
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from nemo_dcr.errors import AttemptStopped, PayloadConflict, TransportFailed
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.transport import objects
from nemo_dcr.transport.base import Announcement, Buffer, Manifest
from nemo_dcr.transport.node_share import NodeShare
from nemo_dcr.transport.s3_bucket import Check, S3Bucket, await_answer
from nemo_dcr.transport.s3_client import Access, S3Config
from nemo_dcr.transport.s3_object import MANIFEST_NAME, holds_bytes, read_announcement, set_name, stored_manifest
from nemo_dcr.transport.s3_subscription import S3Subscription

ATTEMPTS = "attempt-"
CLEANED = "cleaned-through"
"""The object that says how far cleanup went: the attempt as decimal digits."""
_NO_ATTEMPT = AttemptId(-1)


class S3ObjectStore:
    """A transport over one bucket; any thread may call.

    Raises: TransportFailed when boto3's chain names no region or a missing profile.
    """

    def __init__(self, config: S3Config, access: Access = None) -> None:
        """Open the store; no request is sent before the first use.

        Args:
            config: where the objects lie, and the limits.
            access: credentials, or a boto3 session, such as one that assumed a role; None asks the standard chain.
        """
        self._share = NodeShare(config.share, config.where, limit_bytes=config.share_bytes) if config.share else None
        self._bucket = S3Bucket(config, access)

    def publisher(self, attempt: AttemptId, owner: OwnerId) -> S3Publisher:
        """Open the owner's side of an attempt. Raises: TransportFailed; PayloadCorrupt for a damaged manifest."""
        return S3Publisher(self._bucket, attempt, owner)

    def subscribe(self, attempt: AttemptId, owners: Sequence[OwnerId]) -> S3Subscription:
        """Open the receiver's side of an attempt; sees everything published before and after."""
        return S3Subscription(self._bucket, attempt, owners, self._share)

    def cleanup(self, through: AttemptId) -> None:
        """Delete every attempt of this run up to and including `through`. Idempotent, also after a crash in it.

        Raises: TransportFailed.
        """
        if cleaned_through(self._bucket) < through:
            self._bucket.replace(CLEANED, str(through).encode())

        def is_old(name: str) -> bool:
            attempt = objects.attempt_of(name.partition("/")[0])
            return attempt is not None and attempt <= through

        self._bucket.delete([found.name for found in self._bucket.listing(ATTEMPTS) if is_old(found.name)])
        self._bucket.abort_uploads(ATTEMPTS, is_old)

    def close(self) -> None:
        """Let go of threads, connections and shared files."""
        self._bucket.close()
        if self._share is not None:
            self._share.close()


class S3Publisher:
    """Owner side of one attempt in an `S3ObjectStore`; its methods may be called from several threads."""

    def __init__(self, bucket: S3Bucket, attempt: AttemptId, owner: OwnerId) -> None:
        self._bucket = bucket
        self._attempt = attempt
        self._owner = owner
        self._set = set_name(attempt, owner)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._published: dict[int, Announcement] = {}
        self._etags: dict[str, str] = {}
        self._closed = stored_manifest(bucket, attempt, owner, self._check_running)
        """The manifest that is stored, also when an earlier start of this owner stored it."""

    def publish(self, key: PayloadKey, data: Buffer, digest: bytes) -> Announcement:
        """Store one payload; see `Publisher.publish`. Returns when the object is stored and readers can list it."""
        objects.check_publish(self._attempt, self._owner, key, digest)
        with memoryview(data) as view, view.cast("B") as body:
            announcement = Announcement(key, bytes(digest), len(body))
            if len(body) > self._bucket.config.max_payload_bytes:
                limit = self._bucket.config.max_payload_bytes
                detail = f"payload {key} has {len(body)} bytes, receivers take {limit}; lower the bucket target"
                raise TransportFailed(self._bucket.config.where, detail)
            if self._closed is not None and announcement not in self._closed.payloads:
                raise PayloadConflict(str(key), "the set is closed without it")
            name = f"{self._set}/{objects.payload_name(key.payload)}"
            noted = self._bucket.lookers.submit(cleaned_through, self._bucket)
            self._store(name, str(key), objects.frame(announcement), body, self._check_running)
            self._refuse_cleaned(await_answer(noted, self._check_running), [name])
            with self._lock:
                self._check_running()
                if self._closed is not None and announcement not in self._closed.payloads:
                    raise PayloadConflict(str(key), "the set was closed without it")
                self._published[key.payload] = announcement
        return announcement

    def close_set(self) -> Manifest:
        """Store the manifest; see `Publisher.close_set`. A second call returns the same manifest."""
        with self._lock:
            self._check_running()
            noted = self._bucket.lookers.submit(cleaned_through, self._bucket)
            manifest = objects.manifest_of(self._attempt, self._owner, self._published.values())
            self._compare_stored(manifest)
            self._refuse_cleaned(await_answer(noted, self._check_running), [])
            body = objects.encode_manifest(manifest)
            head = objects.frame(objects.manifest_announcement(manifest, body))
            name = f"{self._set}/{MANIFEST_NAME}"
            # A stop waits for the manifest: whoever is told that the attempt was stopped knows that the set is open.
            self._store(name, name, head, memoryview(body), _go_on)
            self._refuse_cleaned(cleaned_through(self._bucket), [*self._etags])
            self._closed = manifest
        return manifest

    def stop(self) -> None:
        """End this attempt: a blocked publish raises, and the upload that it waits for is left behind.

        A `close_set` that has begun to store its manifest still returns it.
        """
        self._stopped.set()

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise AttemptStopped(self._attempt, "its publisher was stopped")

    def _refuse_cleaned(self, cleaned: AttemptId, names: Sequence[str]) -> None:
        """Take these objects back when the attempt was cleaned up."""
        if cleaned >= self._attempt:
            self._bucket.delete(names)
            raise AttemptStopped(self._attempt, "it was cleaned up")

    def _store(self, name: str, what: str, head: bytes, body: memoryview, check: Check) -> None:
        self._check_running()
        etag = self._bucket.store_once(name, head, body, check)
        if etag is None:
            etag = holds_bytes(self._bucket, name, head, body, check)
        if etag is None:
            self._refuse_cleaned(cleaned_through(self._bucket), [])
            raise TransportFailed(
                self._bucket.config.where, f"{name} was deleted while it was stored; end who does that"
            )
        if not etag:
            raise PayloadConflict(what, f"{self._bucket.key(name)} already holds other bytes")
        self._etags[name] = etag

    def _compare_stored(self, manifest: Manifest) -> None:
        """Every stored payload has to be one of ours; what was replaced since its upload is looked at again."""
        listed = {found.name: found.etag for found in self._bucket.listing(f"{self._set}/payload-")}
        ours = {f"{self._set}/{objects.payload_name(each.key.payload)}": each for each in manifest.payloads}
        if others := sorted(listed.keys() - ours.keys()):
            detail = f"an earlier start of this owner left it, and {len(others) - 1} more"
            raise PayloadConflict(others[0], detail)
        for name, payload in ours.items():
            if listed.get(name) == self._etags[name]:
                continue
            found = read_announcement(self._bucket, payload.key, name, self._check_running)
            if found is None:
                self._refuse_cleaned(cleaned_through(self._bucket), [])
                raise TransportFailed(self._bucket.config.where, f"{name} was stored and is gone; end who deletes it")
            if found.announcement != payload:
                raise PayloadConflict(str(payload.key), f"{self._bucket.key(name)} was replaced by other bytes")


def cleaned_through(bucket: S3Bucket) -> AttemptId:
    """The latest attempt that was cleaned up, -1 when there is none. Raises: TransportFailed."""
    answer = bucket.open(CLEANED)
    if answer is None:
        return _NO_ATTEMPT
    with answer["Body"] as stream:
        text = bytes(stream.read(32)).decode("ascii", "replace")
    if not text.isdecimal():
        raise TransportFailed(bucket.config.where, f"{bucket.key(CLEANED)} is no note of a cleanup; give a new prefix")
    return AttemptId(int(text))


def _go_on() -> None:
    """For what is not given up once it has begun."""
