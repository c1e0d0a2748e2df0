"""Conditional requests for small objects of one S3 bucket, and the proof that the server keeps to the conditions.

`If-None-Match: *` makes an object that is absent, `If-Match: ETAG` replaces the one that was read. A server that knows
the headers and ignores them would let two coordinators commit, so it is found out before the first step: a second
creation of the same object, and a replacement of an object that never was, have to be refused.
Each request is sent once; only the caller knows whether it may be sent again. Credentials come from boto3's standard
chain. Not handled: large objects.

Paper: Section 6.3; Appendix B (control plane)
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from typing import Any

import boto3
from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from nemo_dcr.control.compare_and_set import NoAnswer
from nemo_dcr.errors import InvalidConfig, OperatorNeeded

MAX_OBJECT_BYTES = 64 << 20
"""A larger object is not read."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[\w!.*'()-]+(/[\w!.*'()-]+)*", re.ASCII)
_ENDPOINT = re.compile(r"https?://[^/?#@\s]+/?")
_PROBE = "condition-probe"
_NO_OBJECT_HAS = '"00000000000000000000000000000000"'
_ABSENT = frozenset({"NoSuchKey", "NotFound", "404"})
_FAILED = frozenset({"PreconditionFailed", "412"})
_NOT_IMPLEMENTED = frozenset({"NotImplemented", "MethodNotAllowed", "501", "405"})
_CREDENTIALS = (
    exceptions.NoCredentialsError,
    exceptions.PartialCredentialsError,
    exceptions.CredentialRetrievalError,
    exceptions.ProfileNotFound,
    exceptions.ConfigNotFound,
)
_NAME_CREDENTIALS = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret, to credentials that the server accepts"
_ACTIONS = {
    **dict.fromkeys(("InvalidAccessKeyId", "InvalidToken", "ExpiredToken", "SignatureDoesNotMatch"), _NAME_CREDENTIALS),
    **dict.fromkeys(
        ("AccessDenied", "Forbidden", "403"), "grant these credentials s3:GetObject, PutObject, ListBucket"
    ),
    "NoSuchBucket": "create the bucket, or correct the bucket or the endpoint in the URL",
    **dict.fromkeys(
        ("PermanentRedirect", "AuthorizationHeaderMalformed", "301"), "name the bucket's region in the URL"
    ),
    "RequestTimeTooSkewed": "set the clock of this host",
}


@dataclass(frozen=True, kw_only=True)
class S3RecordConfig:
    """One commit record in one bucket. Raises: InvalidConfig."""

    bucket: str
    prefix: str
    """What every key begins with; one commit record has it for itself."""
    endpoint: str | None = None
    """URL of the server; None is AWS."""
    region: str | None = None
    """None asks boto3's chain; a server of one's own needs none."""
    timeout_s: float = 10.0
    """How long one call of the control plane tries."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise InvalidConfig("s3.bucket", f"{self.bucket!r} is no bucket name: 3 to 63 of a-z, 0-9, dot and dash")
        if not _PREFIX.fullmatch(self.prefix) or {".", ".."} & set(self.prefix.split("/")):
            raise InvalidConfig("s3.prefix", f"{self.prefix!r} is no prefix; use names divided by single slashes")
        if self.endpoint is not None and not _ENDPOINT.fullmatch(self.endpoint):
            raise InvalidConfig("s3.endpoint", f"must be http://HOST:PORT or https://HOST:PORT, got {self.endpoint!r}")
        if not self.timeout_s > 0:
            raise InvalidConfig("s3.timeout_s", f"must be positive, got {self.timeout_s}")

    @property
    def where(self) -> str:
        """The record as messages name it."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{at}"


class S3Objects:
    """Objects below one prefix; names are keys without it. Any thread may call, a forked child too."""

    def __init__(self, config: S3RecordConfig, session: Any = None) -> None:
        """Ask nothing yet; `session` is a `boto3.session.Session`, None for boto3's standard chain."""
        self.config = config
        self._session = session
        self._lock = threading.Lock()
        self._process = 0
        self._made: Any = None

    def get(self, name: str) -> tuple[bytes, str] | None:
        """The content and the ETag of an object, None when it is absent. Raises: NoAnswer; OperatorNeeded."""
        try:
            found = self._client().get_object(Bucket=self.config.bucket, Key=self._key(name))
            if found["ContentLength"] > MAX_OBJECT_BYTES:
                reason = f"{self.config.where}/{name} is too large for a part of a commit record"
                raise OperatorNeeded(reason, "name another prefix in the URL")
            return found["Body"].read(), found["ETag"]
        except ClientError as error:
            if _code(error) in _ABSENT:
                return None
            raise self._failure(error) from error
        except BotoCoreError as error:
            raise self._failure(error) from error

    def create(self, name: str, content: bytes) -> bool:
        """Store an object if there is none; False when there is one. Raises: NoAnswer; OperatorNeeded."""
        return self._put(name, content, IfNoneMatch="*")

    def replace(self, name: str, content: bytes, etag: str) -> bool:
        """Store an object in place of the one with that ETag; False when it is another one, or gone.

        Raises: NoAnswer; OperatorNeeded.
        """
        return self._put(name, content, IfMatch=etag)

    def names_below(self, directory: str) -> list[str]:
        """The names `directory/...` in order. Raises: NoAnswer; OperatorNeeded."""
        cut = len(self._key(""))
        try:
            pages = self._client().get_paginator("list_objects_v2")
            found = pages.paginate(Bucket=self.config.bucket, Prefix=self._key(f"{directory}/"))
            return sorted(each["Key"][cut:] for page in found for each in page.get("Contents", ()))
        except (ClientError, BotoCoreError) as error:
            raise self._failure(error) from error

    def prove_conditions(self) -> None:
        """Find out a server that ignores the conditions. Raises: OperatorNeeded for one that does; NoAnswer."""
        content = b"nemo-dcr finds out with this object whether the server keeps to conditions"
        if self.create(_PROBE, content) and self.create(_PROBE, content):
            raise self._ignores("If-None-Match")
        if self.replace(_PROBE, content, _NO_OBJECT_HAS):
            raise self._ignores("If-Match")

    def _ignores(self, header: str) -> OperatorNeeded:
        reason = f"the server of {self.config.where} does not keep to the condition {header} of an upload"
        action = (
            "two coordinators could both commit there; use a server that does (docs/control-plane.md), etcd or SQLite"
        )
        return OperatorNeeded(reason, action)

    def _put(self, name: str, content: bytes, **condition: str) -> bool:
        try:
            self._client().put_object(Bucket=self.config.bucket, Key=self._key(name), Body=content, **condition)
        except ClientError as error:
            if _code(error) in _FAILED or (_code(error) in _ABSENT and "IfMatch" in condition):
                return False
            if _code(error) in _NOT_IMPLEMENTED:
                raise self._ignores("If-None-Match or If-Match") from error
            raise self._failure(error) from error
        except BotoCoreError as error:
            raise self._failure(error) from error
        return True

    def _failure(self, error: ClientError | BotoCoreError) -> Exception:
        if isinstance(error, _CREDENTIALS):
            return OperatorNeeded(
                f"there are no usable credentials for {self.config.where} ({error})", _NAME_CREDENTIALS
            )
        if isinstance(error, ClientError) and (action := _ACTIONS.get(_code(error))) is not None:
            said = error.response.get("Error", {}).get("Message", "nothing more")
            return OperatorNeeded(f"{self.config.where} is refused: {_code(error)}, {said}", action)
        return NoAnswer(" ".join(str(error).split())[:300])

    def _key(self, name: str) -> str:
        return f"{self.config.prefix}/{name}"

    def _client(self) -> Any:
        with self._lock:
            if self._process != os.getpid():  # connections of a parent process are left alone
                self._made, self._process = self._open(), os.getpid()
            return self._made

    def _open(self) -> Any:
        try:
            session = self._session or boto3.session.Session()
        except BotoCoreError as error:
            raise self._failure(error) from error
        region = self.config.region or session.region_name or ("us-east-1" if self.config.endpoint else None)
        if region is None:
            raise InvalidConfig("control.url", "no region is known; name it in the URL (region=...) or the profile")
        wait_s = min(3.0, self.config.timeout_s)
        return session.client(
            "s3",
            endpoint_url=self.config.endpoint,
            region_name=region,
            config=Config(
                connect_timeout=wait_s,
                read_timeout=wait_s,
                retries={"mode": "standard", "total_max_attempts": 1},
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if self.config.endpoint else "auto"},
            ),
        )


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
