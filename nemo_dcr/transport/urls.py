"""A transport from its URL: what every process of a run is told about where payloads lie.

    file:///DIRECTORY                                          a directory that all processes reach
    s3://BUCKET[/PREFIX][?endpoint=URL&region=NAME]            AWS S3, or any S3-compatible server at the endpoint
                                                               (further options: the other fields of S3Config;
                                                               share=DIRECTORY or share=none: see NodeShare)
    relay:///TREE.json[?node=NAME&keys=DIRECTORY]              the relay tree of that file; receivers name the node of
                                                               this host, and hosts that speak CURVE a key directory
                                                               (further options: the fields of RelayConfig)

A URL holds no secret. Nothing is asked of the far side here, except that a directory is made and marked.
Not handled: credentials (boto3's standard chain, or handed over).

Paper: Section 7   Spec: Channel
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.transport.base import Transport
from nemo_dcr.transport.object_store import FileObjectStore
from nemo_dcr.transport.relay.keys import read_security
from nemo_dcr.transport.relay.settings import RelayConfig
from nemo_dcr.transport.relay.transport import RelayTransport
from nemo_dcr.transport.relay.tree import read_tree

if TYPE_CHECKING:
    from nemo_dcr.transport.s3_client import S3Credentials

_TEXTS = frozenset({"endpoint", "region", "share"})
_INTEGERS = frozenset(
    {"parallel", "part_bytes", "page_keys", "read_ahead_bytes", "max_payload_bytes", "share_bytes", "attempts"}
)
_SECONDS = frozenset({"missing_after_s", "look_most_s", "timeout_s"})
_KNOWN = "file:///DIRECTORY, s3://BUCKET/PREFIX?endpoint=URL&region=NAME or relay:///TREE.json?node=NAME&keys=DIRECTORY"


def open_transport(url: str, *, run: str, credentials: S3Credentials | None = None) -> Transport:
    """Open the transport of a run.

    Args:
        url: see the head of this module.
        run: name of the run, the same in all its processes; two runs never see each other's payloads.
        credentials: for s3 URLs; None asks boto3's standard chain.

    Raises: InvalidConfig for any other URL, for a directory of another run, and for a tree or keys that cannot be read
    or do not have the node; OperatorNeeded when boto3 is not
    installed; TransportFailed when a directory cannot be written, or boto3 knows no region or profile.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InvalidConfig("transport.url", f"{url!r} is no URL: {error}") from error
    if "@" in parts.netloc or port is not None or parts.fragment:
        raise InvalidConfig("transport.url", f"must be {_KNOWN}, without user, port and fragment")
    if parts.scheme == "file":
        return _open_directory(url, parts, run)
    if parts.scheme == "s3":
        return _open_bucket(parts, run, credentials)
    if parts.scheme == "relay":
        return _open_tree(url, parts, run)
    raise InvalidConfig("transport.url", f"must be {_KNOWN}, got {url!r}")


def _open_directory(url: str, parts: SplitResult, run: str) -> Transport:
    directory = unquote(parts.path)
    if parts.netloc or parts.query or not directory.strip("/"):
        raise InvalidConfig("transport.url", f"must be file:///DIRECTORY with an absolute path, got {url!r}")
    return FileObjectStore(directory, run=run)


def _open_bucket(parts: SplitResult, run: str, credentials: S3Credentials | None) -> Transport:
    if importlib.util.find_spec("boto3") is None:
        raise OperatorNeeded("object storage over S3 needs boto3", "pip install 'nemo-dcr[s3]'")
    from nemo_dcr.transport.s3 import S3ObjectStore
    from nemo_dcr.transport.s3_client import S3Config

    options = _options(parts.query, _TEXTS, _INTEGERS, _SECONDS)
    options["share"] = _share(options.get("share"))
    config = S3Config(bucket=parts.netloc, prefix=unquote(parts.path).strip("/"), run=run, **options)
    return S3ObjectStore(config, credentials)


def _share(named: str | None) -> str | None:
    """Where receivers of this node share downloads: a directory of this user, unless the URL says otherwise."""
    if named is None:
        return os.path.join(tempfile.gettempdir(), f"nemo-dcr-{os.geteuid()}")
    return None if named == "none" else named


def _open_tree(url: str, parts: SplitResult, run: str) -> Transport:
    file = unquote(parts.path)
    if parts.netloc or not file.strip("/"):
        raise InvalidConfig("transport.url", f"must be relay:///TREE.json with an absolute path, got {url!r}")
    integers = frozenset(each.name for each in fields(RelayConfig) if each.type == "int")
    seconds = frozenset(each.name for each in fields(RelayConfig)) - integers
    options = _options(parts.query, frozenset({"node", "keys"}), integers, seconds)
    tree, node, keys = read_tree(Path(file)), options.pop("node", None), options.pop("keys", None)
    return RelayTransport(
        tree,
        local=None if node is None else tree.node(node),
        run=run,
        security=None if keys is None else read_security(Path(keys)),
        config=RelayConfig(**options),
    )


def _options(query: str, texts: frozenset[str], integers: frozenset[str], seconds: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in found or not value:
            raise InvalidConfig("transport.url", f"option {name} is given twice or empty")
        try:
            if name in texts:
                found[name] = value
            elif name in integers:
                found[name] = int(value)
            elif name in seconds:
                found[name] = float(value)
            else:
                known = ", ".join(sorted(texts | integers | seconds))
                raise InvalidConfig("transport.url", f"unknown option {name!r}; known are {known}")
        except ValueError as error:
            raise InvalidConfig("transport.url", f"option {name} is no number: {value!r}") from error
    return found
