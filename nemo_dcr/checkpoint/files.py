"""Copies of whole files whose bytes are checked on the way.

Paper: Section 8 (checkpoints)
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from nemo_dcr.checkpoint.digests import DIGEST_BYTES
from nemo_dcr.checkpoint.staging import new_file
from nemo_dcr.errors import CheckpointInvalid

_BLOCK = 1 << 20


def copy_file(source: Path, target: Path, digest: bytes, *, sync: bool) -> None:
    """Copy a file to a new place; its bytes have to have the given digest.

    Raises: CheckpointInvalid when they do not, or the source cannot be read; OperatorNeeded when `target` cannot be
    written.
    """
    state = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        stream = source.open("rb")
    except OSError as error:
        raise CheckpointInvalid(str(source), f"it cannot be read ({error.strerror})") from None
    with stream, new_file(target, sync=sync) as copy:
        while block := stream.read(_BLOCK):
            state.update(block)
            copy.write(block)
    if state.digest() != digest:
        raise CheckpointInvalid(str(source), "its bytes changed while it was copied; run the command again")
