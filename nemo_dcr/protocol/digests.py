"""The digests that bind an acknowledgement and a commit to exactly the payloads that owners sent.

All are BLAKE2b-128. Integers are little-endian, so that every process computes the same bytes.

Paper: Section 6.3 (joint commit); Appendix D (digest)   Proofs: joint_commit_binds
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from nemo_dcr.ids import OwnerId

DIGEST_BYTES = 16


def manifest_digest(payload_digests: Iterable[bytes]) -> bytes:
    """Digest of one owner's set: payload numbers from 0 (8 bytes) and their digests, in order."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for number, digest in enumerate(payload_digests):
        state.update(number.to_bytes(8, "little"))
        state.update(digest)
    return state.digest()


def applied_digest(payloads: Mapping[OwnerId, Iterable[bytes]]) -> bytes:
    """Digest of everything one receiver applied: owners ascending (8 bytes each), then their `manifest_digest`."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for owner in sorted(payloads):
        state.update(int(owner).to_bytes(8, "little"))
        state.update(manifest_digest(payloads[owner]))
    return state.digest()


def candidate_digest(parent: bytes, payload_digests: Iterable[bytes]) -> bytes:
    """Digest in the next commit record: the parent record's digest, then all payload digests in sorted order."""
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    state.update(parent)
    for digest in sorted(payload_digests):
        state.update(digest)
    return state.digest()
