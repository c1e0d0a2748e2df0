"""Where the payloads of a demo run lie: the run directory, or an S3 bucket of a server that is started or named.

A server that is started here gets credentials of its own; they reach the other processes as environment variables and
are never written to the job. A server that is named is tried before anything else starts, with the credentials that
boto3 finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.ids import AttemptId
from nemo_dcr.transport.urls import open_transport

if TYPE_CHECKING:
    from nemo_dcr.transport.s3_client import S3Credentials

FILE, S3 = "file", "s3"


@dataclass(frozen=True, kw_only=True)
class PayloadStore:
    """What processes need to open the store."""

    url: str = ""
    """Empty for the store in the run directory."""
    credentials: S3Credentials | None = None
    """None asks boto3's standard chain."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The credentials as boto3 finds them in the environment."""


FILES = PayloadStore()


@contextmanager
def open_payload_store(kind: str, url: str | None, directory: Path) -> Iterator[PayloadStore]:
    """The store of a run: `file`, or `s3` at `url`, else on a SeaweedFS that keeps its files in `directory`.

    Raises: InvalidConfig for a URL that is no S3 URL; OperatorNeeded when a package is missing; TransportFailed when
    the named server cannot be used; EndpointLost when SeaweedFS does not start.
    """
    if kind == FILE:
        if url is not None:
            raise InvalidConfig("--s3-url", "needs --transport s3")
        yield FILES
        return
    if url is not None:
        if not url.startswith("s3://"):
            raise InvalidConfig("--s3-url", f"must be s3://BUCKET/PREFIX?endpoint=URL&region=NAME, got {url!r}")
        open_transport(url, run="nemo-dcr-check").cleanup(AttemptId(0))
        yield PayloadStore(url=url)
        return
    try:
        from nemo_dcr.testing.seaweedfs import SeaweedServer
    except ModuleNotFoundError as error:
        raise OperatorNeeded("object storage over S3 needs boto3", "pip install 'nemo-dcr[s3,seaweedfs]'") from error
    with SeaweedServer(directory) as server:
        held = server.credentials
        secrets = {"AWS_ACCESS_KEY_ID": held.access_key, "AWS_SECRET_ACCESS_KEY": held.secret_key}
        yield PayloadStore(url=server.url, credentials=held, secrets=secrets)
