"""An HTTP proxy that stands in front of a real server and does to chosen requests what networks and servers do.

It hands requests on as they came, `Host` and signature included, unless a planted fault takes one: an error answer, an
answer that is lost after the server acted, an answer that breaks off, a header that the server never sees. Each fault
strikes a counted number of times and is then gone.
Not handled: TLS to the server; bodies without a length.

Paper: Table B.2 (lost messages)   Spec: Channel
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection"})
_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"


@dataclass(frozen=True, slots=True)
class Request:
    """What a fault decides by."""

    method: str
    path: str
    """Path and query."""
    range: str = ""
    """The bytes that are asked for, empty for all."""


@dataclass
class Fault:
    """One thing that goes wrong, `times` times, for requests that `strikes` picks."""

    strikes: Callable[[Request], bool]
    times: int = 1
    status: int = 0
    """Answer with this status, and do not ask the server."""
    code: str = ""
    """The S3 error code in the body of such an answer."""
    lose_answer: bool = False
    """Ask the server, then close the connection without an answer."""
    keep_bytes: int | None = None
    """Send the head of the true answer and so many bytes of its body, then close."""
    hold: threading.Event | None = None
    """Do nothing before this is set."""
    drop_header: str = ""
    """The server does not see this header."""


@dataclass
class FaultyProxy:
    """A proxy on a free loopback port; close it. Use it as a context manager."""

    upstream: str
    """URL of the server."""
    tls: ssl.SSLContext | None = field(default=None, kw_only=True)
    """Clients are served over TLS; the server behind is asked in plain text all the same."""
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Every request so far, struck or not."""
    answered: list[Request] = field(default_factory=list)
    """Those that the server has answered, whether or not the answer was handed on."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *args: _Handler(self, *args))
        self._server.daemon_threads = True
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """URL of the proxy."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def plant(self, fault: Fault) -> Fault:
        """Let this go wrong from now on."""
        with self._lock:
            self.faults.append(fault)
        return fault

    def close(self) -> None:
        """End the proxy."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, request: Request) -> Fault | None:
        """The fault of a request that just came in, counted."""
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and fault.strikes(request):
                    fault.times -= 1
                    return fault
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, proxy: FaultyProxy, *args: Any) -> None:
        self._proxy = proxy
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base class gives it
        """Say nothing."""

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, self.headers.get("Range", ""))
        fault = self._proxy.take(request) or Fault(lambda request: True)
        if fault.hold is not None:
            fault.hold.wait()
        if fault.status:
            self._answer_error(fault)
            return
        answer, content = self._ask(body, fault.drop_header)
        self._proxy.answered.append(request)
        if fault.lose_answer:
            self._hang_up()
            return
        try:
            self._hand_on(answer, content, fault)
        except ConnectionError:  # the client waited for as long as it would
            self.close_connection = True

    def _hand_on(self, answer: http.client.HTTPResponse, content: bytes, fault: Fault) -> None:
        self.send_response_only(answer.status, answer.reason)
        for name, value in answer.getheaders():
            if name.lower() not in _HOP and name.lower() != "content-length":
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        if length is not None and answer.status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if fault.keep_bytes is not None:
            self.wfile.write(content[: fault.keep_bytes])
            self._hang_up()
        elif self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815 - the names that the base class calls

    def _ask(self, body: bytes, dropped: str) -> tuple[http.client.HTTPResponse, bytes]:
        target = urlsplit(self._proxy.upstream)
        connection = http.client.HTTPConnection(target.hostname or "", target.port, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in _HOP and name.lower() != dropped.lower():
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _answer_error(self, fault: Fault) -> None:
        content = b"" if self.command == "HEAD" else _ERROR.format(code=fault.code, message="planted").encode()
        self.send_response_only(fault.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True
