"""Requests to one bucket: store an object once, read it back, list, delete; failures come out typed.

An object is stored with `If-None-Match: *`, so that a server that honours the condition lets one writer win. Whether it
does is tried once with an object of its own; where it does not, the key is looked at before each upload. An upload
without an answer may have arrived, so the key is looked at before it counts as failed. Large objects go up in parts.
Not handled: what the bytes mean (see objects); who waits for an absent object (see s3_subscription).

Paper: Section 7 (object storage)   Spec: Channel
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from nemo_dcr.errors import TransportFailed
from nemo_dcr.transport import s3_errors
from nemo_dcr.transport.s3_client import Access, S3Config, open_client

BLOCK_BYTES = 1 << 20
"""Bytes of one read, and how often a reader looks whether it was stopped."""
_DELETED_AT_ONCE = 1000
_RACES = 5
_STOP_SEEN_S = 0.05
_PROBE = "condition-probe"

T = TypeVar("T")
Check = Callable[[], object]
"""Called between blocks; raises to give up."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One key of a listing."""

    name: str
    etag: str
    nbytes: int


class S3Bucket:
    """One bucket, below the root of one run; names are keys without that root. Any thread may call."""

    def __init__(self, config: S3Config, access: Access = None) -> None:
        self.config = config
        self.pool = ThreadPoolExecutor(config.parallel, thread_name_prefix="s3")
        """Runs requests that carry objects; nothing that runs in it waits for another of its tasks."""
        self.lookers = ThreadPoolExecutor(config.parallel, thread_name_prefix="s3-look")
        """Runs listings and small reads, so that none of them stands behind objects."""
        self._client: Any = open_client(config, access)
        self._lock = threading.Lock()
        self._conditional: bool | None = None

    def close(self) -> None:
        """Let go of threads and connections; requests that run are not waited for."""
        for pool in (self.lookers, self.pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def key(self, name: str) -> str:
        """The key of an object in the bucket."""
        return self.config.root + name

    # ------------------------------------------------------------------------------------------------------ storing

    def store_once(self, name: str, head: bytes, body: memoryview, check: Check) -> str | None:
        """Store `head` and `body` as one object unless there is one; returns its ETag, or None when there is one.

        May return None also for an object that an earlier try of this call stored.
        Raises: TransportFailed; whatever `check` raises.
        """
        once = self._honours_conditions()
        if not once and self.holds(name):
            return None
        for _ in range(_RACES):
            check()
            try:
                with s3_errors.failing_as(self.config.where, f"store {name}"):
                    return self._put(name, head, body, once, check)
            except TransportFailed as problem:
                cause = problem.__cause__
                code = s3_errors.code_of(cause) if isinstance(cause, ClientError) else ""
                if code in s3_errors.CONDITION_FAILED or self._arrived(name, cause):
                    return None
                if code not in s3_errors.CONDITION_RACED:
                    raise
        raise TransportFailed(self.config.where, f"cannot store {name}: {_RACES} uploads lost a race; end the others")

    def replace(self, name: str, content: bytes) -> None:
        """Store a small object whether there is one or not. Raises: TransportFailed."""
        with s3_errors.failing_as(self.config.where, f"store {name}"):
            self._client.put_object(Bucket=self.config.bucket, Key=self.key(name), Body=content)

    def _arrived(self, name: str, cause: BaseException | None) -> bool:
        """Whether an object is there after an upload that failed without a clear answer."""
        # A completion that is repeated after a lost answer finds its upload gone; other refusals are clear.
        unclear = not isinstance(cause, ClientError) or s3_errors.code_of(cause) == "NoSuchUpload"
        if not unclear and s3_errors.status_of(cause) < 500:
            return False
        try:
            return self.holds(name)
        except TransportFailed:
            return False

    def _honours_conditions(self) -> bool:
        with self._lock:
            if self._conditional is None:
                with s3_errors.failing_as(self.config.where, f"store {_PROBE}"):
                    self._conditional = self._refuses_probe() or self._refuses_probe()
            return self._conditional

    def _refuses_probe(self) -> bool:
        """The second upload of the same key, by whomever the first was, has to be refused."""
        try:
            self._client.put_object(Bucket=self.config.bucket, Key=self.key(_PROBE), Body=b"", IfNoneMatch="*")
        except ClientError as error:
            if s3_errors.code_of(error) in s3_errors.CONDITION_FAILED | s3_errors.CONDITION_RACED:
                return True
            if s3_errors.code_of(error) in s3_errors.NOT_IMPLEMENTED:
                return False
            raise
        return False

    def _put(self, name: str, head: bytes, body: memoryview, once: bool, check: Check) -> str:
        condition = {"IfNoneMatch": "*"} if once else {}
        target = {"Bucket": self.config.bucket, "Key": self.key(name)}
        if len(head) + len(body) <= self.config.part_bytes:
            sent = self.pool.submit(self._client.put_object, **target, **condition, Body=head + body)
            return str(await_answer(sent, check)["ETag"])
        upload = {**target, "UploadId": self._client.create_multipart_upload(**target)["UploadId"]}
        try:
            parts = self._put_parts(upload, head, body, check)
            check()
            done = self._client.complete_multipart_upload(**upload, **condition, MultipartUpload={"Parts": parts})
        except BaseException:
            with contextlib.suppress(ClientError, BotoCoreError):
                self._client.abort_multipart_upload(**upload)
            raise
        return str(done["ETag"])

    def _put_parts(self, upload: dict[str, str], head: bytes, body: memoryview, check: Check) -> list[dict[str, Any]]:
        size, answers = self.config.part_bytes, list[dict[str, Any]]()
        sent: deque[Future[dict[str, Any]]] = deque()
        begin = -len(head)
        while begin < len(body) or sent:
            if begin < len(body) and len(sent) < self.config.parallel:
                end = begin + size
                part = (head if begin < 0 else b"") + body[max(begin, 0) : end]
                number = (begin + len(head)) // size + 1
                sent.append(self.pool.submit(self._client.upload_part, **upload, PartNumber=number, Body=part))
                begin = end
            else:
                answers.append(await_answer(sent.popleft(), check))
        checksums = ("ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256")
        return [
            {
                "PartNumber": number,
                "ETag": answer["ETag"],
                **{name: answer[name] for name in checksums if name in answer},
            }
            for number, answer in enumerate(answers, 1)
        ]

    # ------------------------------------------------------------------------------------------------------ reading

    def holds(self, name: str) -> bool:
        """Whether an object is stored under this name. Raises: TransportFailed."""
        with s3_errors.failing_as(self.config.where, f"look at {name}"):
            try:
                self._client.head_object(Bucket=self.config.bucket, Key=self.key(name))
            except ClientError as error:
                if s3_errors.code_of(error) not in s3_errors.ABSENT:
                    raise
                return False
        return True

    def open(self, name: str, *, begin: int = 0, end: int | None = None, etag: str = "") -> dict[str, Any] | None:
        """The answer to a GET, None when the object is absent or, with `etag`, another one. Close its `Body`.

        Raises: TransportFailed.
        """
        more: dict[str, str] = {"IfMatch": etag} if etag else {}
        if begin or end is not None:
            more["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
        gone = s3_errors.ABSENT | s3_errors.CONDITION_FAILED
        with s3_errors.failing_as(self.config.where, f"read {name}"):
            try:
                found: dict[str, Any] = self._client.get_object(Bucket=self.config.bucket, Key=self.key(name), **more)
            except ClientError as error:
                if s3_errors.code_of(error) not in gone and s3_errors.code_of(error) != "InvalidRange":
                    raise
                return None
        return found

    def listing(self, prefix: str, *, after: str = "") -> Iterator[Listed]:
        """Objects whose names begin with `prefix` and come after `after`, in order, however many.

        Raises: TransportFailed.
        """
        request: dict[str, Any] = {"Bucket": self.config.bucket, "Prefix": self.key(prefix)}
        request["MaxKeys"] = self.config.page_keys
        request.update({"StartAfter": self.key(after)} if after else {})
        cut = len(self.config.root)
        while True:
            with s3_errors.failing_as(self.config.where, f"list {prefix}"):
                page = self._client.list_objects_v2(**request)
            for found in page.get("Contents", ()):
                yield Listed(found["Key"][cut:], found["ETag"], found["Size"])
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    # ----------------------------------------------------------------------------------------------------- deleting

    def delete(self, names: Sequence[str]) -> None:
        """Delete these objects; absent ones are no failure. Raises: TransportFailed when the server keeps one."""
        kept: list[str] = []
        for begin in range(0, len(names), _DELETED_AT_ONCE):
            keys = [{"Key": self.key(name)} for name in names[begin : begin + _DELETED_AT_ONCE]]
            with s3_errors.failing_as(self.config.where, "delete objects"):
                answer = self._client.delete_objects(Bucket=self.config.bucket, Delete={"Objects": keys, "Quiet": True})
            kept += [f"{fault.get('Key')} ({fault.get('Code')})" for fault in answer.get("Errors", ())]
        if kept:
            raise TransportFailed(self.config.where, f"{len(kept)} objects were not deleted, the first is {kept[0]}")

    def abort_uploads(self, prefix: str, wanted: Callable[[str], bool]) -> None:
        """Give up unfinished uploads in parts below `prefix` whose name is wanted. Raises: TransportFailed."""
        cut = len(self.config.root)
        with s3_errors.failing_as(self.config.where, f"look for unfinished uploads of {prefix}"):
            try:
                pages = self._client.get_paginator("list_multipart_uploads").paginate(
                    Bucket=self.config.bucket, Prefix=self.key(prefix)
                )
                uploads = [upload for page in pages for upload in page.get("Uploads", ())]
            except ClientError as error:
                if s3_errors.code_of(error) not in s3_errors.NOT_IMPLEMENTED:
                    raise
                uploads = []  # the lifecycle rule of the documentation ends them
            for upload in uploads:
                if wanted(upload["Key"][cut:]):
                    with contextlib.suppress(self._client.exceptions.NoSuchUpload):
                        self._client.abort_multipart_upload(
                            Bucket=self.config.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )


def await_answer(sent: Future[T], check: Check) -> T:
    """The answer to a request that runs in the pool. Raises: what the request raises; whatever `check` raises."""
    check()
    while not wait([sent], _STOP_SEEN_S).done:
        check()
    return sent.result()


def jitter(tries: int) -> float:
    """Seconds to wait before one more try: random, up to twice as long each time, 5 at most."""
    return random.uniform(0, min(5.0, 0.1 * 2**tries))
