"""Who may speak to whom: CurveZMQ key pairs, the list of allowed client keys, and where plaintext may be spoken.

A key directory holds `secret.key` (mode 0600), `public.key`, and optionally `allowed.keys`: lines of a public key and
whatever one wants to say about it, or comments that begin with a lone `#`. A node with keys speaks CURVE and admits the
keys of its list; a client pins the key that the tree names.
Without keys only loopback addresses may be used, unless plaintext is allowed by an explicit flag.
Not handled: distributing the public keys, and revoking a key while a node runs.

Paper: Section 7 (relay tree; it assumes encrypted channels)   Spec: Channel
"""

from __future__ import annotations

import ipaddress
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Any

import zmq
import zmq.utils.z85

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.transport.relay.tree import KEY_LETTERS, TreeNode

SECRET_NAME, PUBLIC_NAME, ALLOWED_NAME = "secret.key", "public.key", "allowed.keys"
ZAP_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks a process whom it admits."""
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Security:
    """What one process has to prove itself with and whom it admits."""

    keys: KeyPair | None = None
    """Its own pair; None speaks plaintext."""
    allowed: frozenset[str] = frozenset()
    """Public keys of the clients that a node admits."""
    plaintext: bool = False
    """Allow plaintext beyond loopback addresses."""

    def check_listen(self, address: str) -> None:
        """Refuse to listen without encryption beyond loopback, or with encryption and nobody admitted.

        Raises: InvalidConfig.
        """
        if self.keys is None:
            self._check_plaintext(address)
        elif not self.allowed:
            detail = f"admits nobody; write public keys into {ALLOWED_NAME}, one a line, or name them in the tree"
            raise InvalidConfig("relay.keys", detail)

    def check_connect(self, node: TreeNode) -> None:
        """Refuse to speak plaintext beyond loopback, or CURVE without a pair. Raises: InvalidConfig."""
        if not node.key:
            self._check_plaintext(node.address)
        elif self.keys is None:
            detail = f"node {node.name!r} speaks CURVE and this process has no key pair; see nemo-dcr keys new"
            raise InvalidConfig("relay.keys", detail)

    def admits(self, key: str) -> bool:
        """Whether a client key is in the list; every entry is compared, in constant time."""
        found = False
        for allowed in self.allowed:
            found |= compare_digest(allowed.encode(), key.encode())
        return found

    def _check_plaintext(self, address: str) -> None:
        if not (self.plaintext or is_local(address)):
            detail = f"{address!r} is not a loopback address; give a key directory (nemo-dcr keys new), or allow"
            raise InvalidConfig("relay.keys", f"{detail} plaintext explicitly (--plaintext)")


def is_local(address: str) -> bool:
    """Whether a ZeroMQ address stays on this host: a loopback address in digits (a name may mean any host), or none."""
    scheme, _, place = address.partition("://")
    if scheme != "tcp":
        return scheme in ("ipc", "inproc")
    try:
        return ipaddress.ip_address(place.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def secure_listener(socket: zmq.Socket[Any], security: Security, domain: str) -> None:
    """Make a socket, before it is bound, admit whom `security` admits. A ZAP handler of that domain must answer."""
    if security.keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, security.keys.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, domain)


def admission(request: list[bytes], security: Security) -> tuple[bool, list[bytes]]:
    """Whether a connection is let in, and the answer to its ZAP request (RFC 27), whatever that holds.

    A request is version, number, domain, address, identity, mechanism, and for CURVE the client's key of 32 bytes.
    """
    version, number, *_ = [*request, b"", b""]
    known = len(request) == 7 and request[5] == b"CURVE" and len(request[6]) == _KEY_BYTES
    admitted = known and security.admits(zmq.utils.z85.encode(request[6]).decode("ascii"))
    verdict = [b"200", b""] if admitted else [b"400", b"this key is not in the list"]
    return admitted, [version, number, *verdict, b"", b""]


def secure_client(socket: zmq.Socket[Any], security: Security, node: TreeNode) -> None:
    """Make a socket, before it is connected, prove itself to `node` and pin that node's key."""
    if node.key and security.keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, node.key)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, security.keys.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, security.keys.secret)


def new_keys(directory: Path) -> KeyPair:
    """Write a new pair into `directory`; the secret file is readable by its owner only.

    Raises: InvalidConfig when a key file is there already, or the directory cannot be written.
    """
    public, secret = (key.decode("ascii") for key in zmq.curve_keypair())
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text, mode in ((SECRET_NAME, secret, 0o600), (PUBLIC_NAME, public, 0o644)):
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(f"{text}\n")
    except FileExistsError as problem:
        detail = f"{directory} holds keys already; name another directory, or remove the old files yourself"
        raise InvalidConfig("keys.directory", detail) from problem
    except OSError as problem:
        raise InvalidConfig("keys.directory", f"cannot write keys: {problem}") from problem
    return KeyPair(public, secret)


def read_security(directory: Path, *, also: Collection[str] = ()) -> Security:
    """The pair and the list of a key directory; `also` are further keys to admit.

    Raises: InvalidConfig when a file is missing or malformed, or the secret can be read by others.
    """
    secret_file = directory / SECRET_NAME
    try:
        if secret_file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise InvalidConfig("keys.directory", f"{secret_file} can be read by others; run chmod 600 on it")
        secret = secret_file.read_text(encoding="ascii").strip()
        listed = directory / ALLOWED_NAME
        lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    except (OSError, UnicodeDecodeError) as problem:
        detail = f"cannot read {directory}: {problem}; make keys with nemo-dcr keys new"
        raise InvalidConfig("keys.directory", detail) from problem
    # The letters of a key include `#`, so a comment is a word of its own.
    allowed = {*also, *(words[0] for line in lines if (words := line.split()) and words[0] != "#")}
    for key in (secret, *allowed):
        if len(key) != KEY_LETTERS:
            detail = f"a key in {directory} does not have {KEY_LETTERS} letters; make it again with nemo-dcr keys new"
            raise InvalidConfig("keys.directory", detail)
    try:
        public = zmq.curve_public(secret.encode("ascii")).decode("ascii")
    except (zmq.ZMQError, ValueError) as problem:
        raise InvalidConfig("keys.directory", f"{secret_file} holds no key: {problem}") from problem
    return Security(keys=KeyPair(public, secret), allowed=frozenset(allowed))
