"""Requests to an etcd cluster over its JSON gateway, through the client library etcd3gw; failures come out typed.

One request goes to one member. A member that gives no answer is left for the next one, and the caller is told
(`NoAnswer`): only the caller knows whether the request may be sent again. A refusal that no repetition mends is an
`OperatorNeeded` with what etcd says.
Not handled: etcd's own user names and passwords; use client certificates, or a network of its own.

Paper: Section 6.3; Appendix B (control plane)
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import requests
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import (
    ConnectionFailedError,
    ConnectionTimeoutError,
    Etcd3Exception,
    InternalServerError,
)

from nemo_dcr.control.compare_and_set import NoAnswer
from nemo_dcr.errors import InvalidConfig, OperatorNeeded

_MEMBER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_PREFIX = re.compile(r"[\w!.*'()-]+(/[\w!.*'()-]+)*", re.ASCII)
_PASSING = frozenset({1, 4, 10, 14})
"""gRPC codes of answers that a repetition may mend: cancelled, deadline, aborted, unavailable."""
_BUSY = "too many requests"
"""Of the answers for want of room, code 8, the only one that passes."""
_LEASE_GONE = 5
_NO_SPACE = "database space exceeded"
_PAGE_KEYS = 200

Operation = dict[str, Any]
"""A comparison or a request of a transaction, as the gateway takes it."""


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """One commit record in one cluster. Raises: InvalidConfig."""

    members: tuple[str, ...]
    """HOST:PORT of members; one that runs is enough."""
    prefix: str
    """What every key begins with; one commit record has it for itself."""
    ca: str | None = None
    """File with the certificate authority of the members; with it all requests go over TLS."""
    cert: str | None = None
    key: str | None = None
    """Files of the client's certificate and its key, both or none."""
    timeout_s: float = 10.0
    """How long one call of the control plane tries."""

    def __post_init__(self) -> None:
        for member in self.members:
            found = _MEMBER.fullmatch(member)
            if found is None or not 0 < int(found[2]) < 65536:
                raise InvalidConfig("etcd.members", f"{member!r} is no HOST:PORT")
        if not self.members:
            raise InvalidConfig("etcd.members", "name at least one HOST:PORT")
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidConfig("etcd.prefix", f"{self.prefix!r} is no prefix; use names divided by single slashes")
        if (self.cert is None) != (self.key is None) or (self.cert is not None and self.ca is None):
            raise InvalidConfig("etcd.cert", "give ca alone, or ca, cert and key together")
        if not self.timeout_s > 0:
            raise InvalidConfig("etcd.timeout_s", f"must be positive, got {self.timeout_s}")

    @property
    def where(self) -> str:
        """The record as messages name it."""
        return f"etcd://{','.join(self.members)}/{self.prefix}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A key's value and the revision of the cluster that wrote it."""

    name: str
    value: bytes
    revision: int


class EtcdClient:
    """Keys below one prefix; names are keys without it. Any thread may call, a forked child too."""

    def __init__(self, config: EtcdConfig) -> None:
        self.config = config
        self._turn = 0
        self._process = 0
        self._members: tuple[Etcd3Client, ...] = ()

    def transaction(
        self, compare: list[Operation], success: list[Operation], failure: list[Operation]
    ) -> tuple[bool, list[dict[str, Stored]]]:
        """Run a transaction; returns whether the comparisons held, and what each request found, by name.

        Raises: NoAnswer; OperatorNeeded.
        """
        answer = self._post("/kv/txn", {"compare": compare, "success": success, "failure": failure})
        found = [self._stored(each.get("response_range", {})) for each in answer.get("responses", ())]
        return bool(answer.get("succeeded", False)), found

    def get(self, *names: str) -> dict[str, Stored]:
        """Those of the names that exist, read at one revision. Raises: as `transaction`."""
        _, found = self.transaction([], [self.range(name) for name in names], [])
        return {name: stored for each in found for name, stored in each.items()}

    def all_below(self, directory: str, start: str = "") -> Iterator[Stored]:
        """Every `directory/NAME` with NAME >= `start`, in order, a page at a time. Raises: as `transaction`."""
        begin, end = self._key(f"{directory}/{start}"), self._key(f"{directory}0")  # "0" is the character after "/"
        while True:
            answer = self._post("/kv/range", {"key": _text(begin), "range_end": _text(end), "limit": _PAGE_KEYS})
            page = self._stored(answer)
            yield from page.values()
            if not answer.get("more", False):
                return
            begin = self._key(max(page)) + b"\0"

    def put_until(self, name: str, seconds: int) -> bool:
        """Store an empty key that etcd removes after about so many seconds; False when it is gone already.

        Raises: as `transaction`.
        """
        lease = self._post("/lease/grant", {"TTL": seconds, "ID": 0}).get("ID", 0)
        try:
            self._post("/kv/put", {"key": self._name(name), "value": "", "lease": lease})
        except _LeaseGone:
            return False
        return True

    def range(self, name: str) -> Operation:
        """Read one key."""
        return {"request_range": {"key": self._name(name)}}

    def put(self, name: str, value: bytes) -> Operation:
        """Write one key."""
        return {"request_put": {"key": self._name(name), "value": _text(value)}}

    def delete(self, name: str) -> Operation:
        """Remove one key."""
        return {"request_delete_range": {"key": self._name(name)}}

    def unchanged(self, name: str, revision: int) -> Operation:
        """The key was last written at that revision; 0 means that it does not exist."""
        return {"key": self._name(name), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}

    def exists(self, name: str) -> Operation:
        """The key exists."""
        return {"key": self._name(name), "target": "CREATE", "result": "GREATER", "create_revision": "0"}

    def _key(self, name: str) -> bytes:
        return f"{self.config.prefix}/{name}".encode()

    def _name(self, name: str) -> str:
        return _text(self._key(name))

    def _stored(self, answer: Mapping[str, Any]) -> dict[str, Stored]:
        cut = len(self.config.prefix) + 1
        rows = (
            Stored(
                base64.b64decode(row["key"]).decode()[cut:],
                base64.b64decode(row.get("value", "")),
                int(row["mod_revision"]),
            )
            for row in answer.get("kvs", ())
        )
        return {row.name: row for row in rows}

    def _post(self, path: str, body: Operation) -> dict[str, Any]:
        if self._process != os.getpid():  # connections of a parent process are left alone
            self._members, self._process = tuple(self._open(member) for member in self.config.members), os.getpid()
        turn = self._turn
        client = self._members[turn % len(self._members)]
        try:
            answer: dict[str, Any] = client.post(client.get_url(path), json=body)
        except (ConnectionFailedError, ConnectionTimeoutError, InternalServerError, requests.RequestException) as error:
            self._turn = turn + 1
            raise NoAnswer(f"{client.host}:{client.port} gives no answer ({_said(error)[1]})") from error
        except Etcd3Exception as error:
            self._turn = turn + 1
            raise self._refusal(client, error) from error
        return answer

    def _refusal(self, client: Etcd3Client, error: Etcd3Exception) -> Exception:
        code, message = _said(error)
        if code == _LEASE_GONE:
            return _LeaseGone(message)
        if code in _PASSING or _BUSY in message:
            return NoAnswer(f"{client.host}:{client.port} cannot serve now ({message})")
        action = "compact and defragment it, then disarm its alarm (docs/control-plane.md)"
        if _NO_SPACE not in message:
            action = "correct the URL, or mend what it says"
        return OperatorNeeded(f"etcd at {client.host}:{client.port} refuses: {message}", action)

    def _open(self, member: str) -> Etcd3Client:
        host, port = member.rsplit(":", 1)
        session = requests.Session()
        session.trust_env = False  # a proxy for the web is none for the control plane
        session.verify = self.config.ca or True
        if self.config.cert is not None and self.config.key is not None:
            session.cert = (self.config.cert, self.config.key)
        return Etcd3Client(
            host=host.strip("[]"),
            port=int(port),
            protocol="http" if self.config.ca is None else "https",
            timeout=min(3.0, self.config.timeout_s),
            api_path="/v3/",
            session=session,
        )


class _LeaseGone(Exception):
    """The lease of a key ended before the key was stored."""


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _said(error: Exception) -> tuple[int, str]:
    """The gRPC code, 0 if there is none, and the message of a failure, in one short line."""
    text = (error.detail_text if isinstance(error, Etcd3Exception) else None) or str(error) or type(error).__name__
    try:
        answer = json.loads(text)
        return int(answer.get("code", 0)), str(answer.get("error") or answer.get("message") or text)
    except (ValueError, TypeError, AttributeError):
        return 0, " ".join(text.split())[:300]
