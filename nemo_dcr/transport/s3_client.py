"""Where the objects of a run lie, the limits of every request, and the client that boto3 makes of them.

The endpoint may be any S3-compatible server; one that is named is addressed by path, AWS by host name. Credentials come
from boto3's standard chain (environment, profile, role), or are handed over; they never stand in a URL. boto3 repeats
requests that got no answer, a 5xx or a throttling answer, with jitter, and sends its default checksum with each upload.
Answers are not checked again on the way down: receivers verify the digest of every payload. Requests carry no more
than they have to: a short name of the program, and no question whether a small body is welcome, which would cost a
round trip for each payload.

Paper: Section 7 (object storage)   Spec: Channel
"""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import boto3
from botocore.config import Config

from nemo_dcr.errors import InvalidConfig, TransportFailed
from nemo_dcr.transport import s3_errors

MIB = 1 << 20
MANIFEST_BYTES = 64 * MIB
"""A larger manifest is refused: it would list a million payloads."""
ASKS_FIRST_BYTES = 4 * MIB
"""A body from this size on waits for `100 Continue`, so that a server that refuses it is not sent all of it."""
_PROGRAM = "nemo-dcr"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[\w!.*'()-]+(/[\w!.*'()-]+)*", re.ASCII)
_RUN = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class S3Credentials:
    """Credentials that are handed over instead of found by boto3's chain."""

    access_key: str
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class S3Config:
    """One run in one bucket. Raises: InvalidConfig."""

    bucket: str
    run: str
    """Name of the run, the same in all its processes; every key begins with prefix and run."""
    prefix: str = ""
    endpoint: str | None = None
    """URL of the server; None is AWS."""
    region: str | None = None
    """None asks boto3's chain; a server of one's own needs none."""
    parallel: int = 8
    """Requests for objects of one process at a time, and as many for listings."""
    part_bytes: int = 64 * MIB
    """Larger objects go up in parts of this size; each part in flight is held twice."""
    page_keys: int = 1000
    """Keys of one page of a listing; servers give no more than 1000."""
    read_ahead_bytes: int = 256 * MIB
    """Announced payloads that are downloaded before they are asked for, at most; 0 for none."""
    max_payload_bytes: int = 8 * 1024 * MIB
    """A larger payload is neither sent nor allocated for."""
    missing_after_s: float = 5.0
    """How long a fetch waits for an object that is announced and absent."""
    look_most_s: float = 0.5
    """How long a subscription that finds nothing new waits between two listings, at most. Shorter finds the first
    payload sooner and asks more."""
    share: str | None = None
    """Directory in which the receivers of this node share downloads; None: each downloads for itself."""
    share_bytes: int = 16 * 1024 * MIB
    """Shared files of one attempt, at most; what is beyond is downloaded by each."""
    timeout_s: float = 30.0
    """For a connection, and between two reads of an answer."""
    attempts: int = 5
    """Tries of a request, and continuations of a download that breaks off."""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise InvalidConfig("s3.bucket", f"{self.bucket!r} is no bucket name: 3 to 63 of a-z, 0-9, dot and dash")
        if self.prefix and (not _PREFIX.fullmatch(self.prefix) or {".", ".."} & set(self.prefix.split("/"))):
            raise InvalidConfig("s3.prefix", f"{self.prefix!r} is no prefix; use names divided by single slashes")
        if not _RUN.fullmatch(self.run):
            raise InvalidConfig("s3.run", f"{self.run!r} is no name of a run: 1 to 64 letters, digits, . _ -")
        if self.endpoint is not None and not re.fullmatch(r"https?://[^/?#@\s]+/?", self.endpoint):
            raise InvalidConfig("s3.endpoint", f"must be http://HOST:PORT or https://HOST:PORT, got {self.endpoint!r}")
        if self.share is not None and not os.path.isabs(self.share):
            raise InvalidConfig("s3.share", f"must be an absolute path, got {self.share!r}")
        positive = ("parallel", "max_payload_bytes", "missing_after_s", "look_most_s", "share_bytes", "timeout_s")
        for name in (*positive, "attempts"):
            if not getattr(self, name) > 0:
                raise InvalidConfig(f"s3.{name}", f"must be positive, got {getattr(self, name)}")
        if self.part_bytes < 5 * MIB:
            raise InvalidConfig("s3.part_bytes", f"must be at least 5 MiB, got {self.part_bytes}")
        if not 1 <= self.page_keys <= 1000:
            raise InvalidConfig("s3.page_keys", f"must be 1 to 1000, got {self.page_keys}")
        if self.read_ahead_bytes < 0:
            raise InvalidConfig("s3.read_ahead_bytes", f"must not be negative, got {self.read_ahead_bytes}")

    @property
    def root(self) -> str:
        """What every key of the run begins with."""
        return f"{self.prefix}/{self.run}/" if self.prefix else f"{self.run}/"

    @property
    def where(self) -> str:
        """The bucket and prefix as messages name them."""
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.root.rstrip('/')}{at}"


Access: TypeAlias = S3Credentials | Any | None
"""Credentials, a `boto3.session.Session` that finds them, or None for boto3's standard chain."""


def open_client(config: S3Config, access: Access = None) -> Any:
    """The boto3 client of a store; sends nothing yet.

    Raises: TransportFailed when boto3's chain names a profile that does not exist or has no region.
    """
    with s3_errors.failing_as(config.where, "make a client"):
        if isinstance(access, S3Credentials):
            session = boto3.session.Session(access.access_key, access.secret_key, access.session_token)
        else:
            session = access or boto3.session.Session()
        region = config.region or session.region_name or ("us-east-1" if config.endpoint else None)
        if region is None:
            raise TransportFailed(config.where, "no region is known; name it in the URL (region=...) or the profile")
        client = session.client(
            "s3",
            endpoint_url=config.endpoint,
            region_name=region,
            config=Config(
                user_agent=_PROGRAM,
                connect_timeout=config.timeout_s,
                read_timeout=config.timeout_s,
                max_pool_connections=2 * config.parallel + 4,
                retries={"mode": "standard", "total_max_attempts": config.attempts},
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if config.endpoint else "auto"},
            ),
        )
        client.meta.events.register_last("before-call.s3", _send_at_once)
    return client


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    """Take the question away that botocore puts in front of every body, when the body is small."""
    headers, body = params["headers"], params.get("body")
    if isinstance(body, io.BytesIO) and body.getbuffer().nbytes < ASKS_FIRST_BYTES:
        headers.pop("Expect", None)
