"""A control plane from its URL: what a coordinator and an operator are told about where the commit record lies.

    sqlite:///PATH                                    a file of this host; an absolute path makes four slashes
    etcd://HOST:PORT[,HOST:PORT]/PREFIX[?ca=FILE&cert=FILE&key=FILE]          a cluster; `ca` turns TLS on
    s3://BUCKET/PREFIX[?endpoint=URL&region=NAME]     AWS S3, or a server that keeps to conditional uploads

`timeout_s=SECONDS` sets how long one call tries. A URL holds no secret. Client libraries are imported only for the
scheme that needs them.
Not handled: credentials of S3 (boto3's standard chain).

Paper: Section 6.3
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from nemo_dcr.control.sqlite import SqliteControl
from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.record import WatchedControlPlane

KNOWN = "sqlite:///PATH, etcd://HOST:PORT/PREFIX or s3://BUCKET/PREFIX?endpoint=URL&region=NAME"

_FIELD = "control.url"


def open_control(
    url: str, *, now: Callable[[], float] = time.time, session: Any = None, reads_only: bool = False
) -> WatchedControlPlane:
    """Open the commit record at a URL; see the head of this module.

    Args:
        url: where it lies.
        now: the control plane's clock in seconds, the one that deadlines are written in.
        session: for s3 URLs, a `boto3.session.Session`; None for boto3's standard chain.
        reads_only: for `peek`, `watch`, `history` and `journal`: nothing is made, a record that is absent is an error.

    Raises: InvalidConfig for another URL, and with `reads_only` for a record that is not there; OperatorNeeded when a
    client library is missing, the store refuses, or the record is damaged; ControlPlaneUnavailable.
    """
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InvalidConfig(_FIELD, f"{url!r} is no URL: {error}") from error
    if "@" in parts.netloc:
        raise InvalidConfig(_FIELD, f"a URL holds no secret; must be {KNOWN}")
    if parts.scheme == "sqlite":
        return _open_file(url, now, reads_only)
    if parts.scheme not in ("etcd", "s3") or parts.fragment:
        raise InvalidConfig(_FIELD, f"must be {KNOWN}, got {url!r}")
    control = _open_etcd(parts, now) if parts.scheme == "etcd" else _open_s3(parts, now, session, reads_only)
    if reads_only and control.peek().clock == 0:
        raise InvalidConfig(
            _FIELD, f"there is no commit record at {url}; correct the URL, or start a coordinator on it"
        )
    return control


def _open_file(url: str, now: Callable[[], float], reads_only: bool) -> WatchedControlPlane:
    path = url.removeprefix("sqlite:///")
    if not path or path == url:
        raise InvalidConfig(_FIELD, f"must be {KNOWN}, got {url!r}")
    if reads_only and not Path(path).is_file():
        raise InvalidConfig(
            _FIELD, f"there is no commit record at {url}; correct the URL, or start a coordinator on it"
        )
    return SqliteControl(path, now=now)


def _open_etcd(parts: SplitResult, now: Callable[[], float]) -> WatchedControlPlane:
    _need("etcd3gw", "etcd")
    from nemo_dcr.control.etcd import EtcdControl
    from nemo_dcr.control.etcd_client import EtcdConfig

    options = _options(parts.query, ("ca", "cert", "key"))
    members = tuple(parts.netloc.split(","))
    return EtcdControl(EtcdConfig(members=members, prefix=_prefix(parts), **options), now=now)


def _open_s3(parts: SplitResult, now: Callable[[], float], session: Any, reads_only: bool) -> WatchedControlPlane:
    _need("boto3", "s3")
    from nemo_dcr.control.s3 import S3Control
    from nemo_dcr.control.s3_objects import S3RecordConfig

    options = _options(parts.query, ("endpoint", "region"))
    config = S3RecordConfig(bucket=parts.netloc, prefix=_prefix(parts), **options)
    return S3Control(config, session, now=now, reads_only=reads_only)


def _prefix(parts: SplitResult) -> str:
    prefix = unquote(parts.path).strip("/")
    if not prefix:
        raise InvalidConfig(_FIELD, f"name a prefix that this commit record has for itself; must be {KNOWN}")
    return prefix


def _options(query: str, texts: tuple[str, ...]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in found or not value:
            raise InvalidConfig(_FIELD, f"option {name} is given twice or empty")
        if name not in (*texts, "timeout_s"):
            raise InvalidConfig(_FIELD, f"unknown option {name!r}; known are {', '.join((*texts, 'timeout_s'))}")
        try:
            found[name] = float(value) if name == "timeout_s" else value
        except ValueError as error:
            raise InvalidConfig(_FIELD, f"option {name} is no number: {value!r}") from error
    return found


def _need(package: str, extra: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise OperatorNeeded(f"a commit record in {extra} needs {package}", f"pip install 'nemo-dcr[{extra}]'")
