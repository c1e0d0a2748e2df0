"""Who may make control calls: CURVE keys beyond loopback, and the words for a handshake that failed.

A server with a key pair speaks CURVE only and admits the client keys of its list; its ZAP socket is answered on the
server's own thread. A client pins the key that the server's address names. Without keys only loopback addresses are
served and called, unless plaintext is allowed by an explicit flag, which is for isolated test networks.
Not handled: reading and making key files (see transport.relay.keys); what an admitted peer may ask for.

Paper: Appendix B (control calls; channels are trusted or encrypted)   Decisions: D5
"""

from __future__ import annotations

from typing import Any

import zmq

from nemo_dcr.transport.relay.keys import ZAP_ADDRESS, Security, admission

ZAP_DOMAIN = "nemo-dcr-control"
_HANDSHAKE = "the handshake failed: the pinned key is not the server's, or only one side speaks CURVE"
REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the server does not admit this key; add it to the server's allowed.keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: _HANDSHAKE,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: _HANDSHAKE,
}
"""What a client's monitor tells about a connection that was refused, by event."""
HANDSHAKE_MS = 2000
"""A connection that has not shown its keys by then is closed."""


class AdmissionDesk:
    """Answers, for one context, whether a client key is admitted (ZAP, RFC 27). Used by one thread."""

    def __init__(self, context: zmq.Context[Any], security: Security) -> None:
        """Open it before the listening socket is bound."""
        self._security = security
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer one request that is here."""
        _, answer = admission(self.socket.recv_multipart(), self._security)
        self.socket.send_multipart(answer)

    def close(self) -> None:
        """Release the socket."""
        self.socket.close()
