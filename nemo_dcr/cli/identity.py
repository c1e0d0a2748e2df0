"""Digest of a checkpoint's content: what was loaded, independent of how its files are cut.

Owners and receivers that started from equal digests hold the same version 0, which is how the first record may be
written without sending the whole model (bootstrap by proof).

Paper: Section 6.3 (initial version)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta


class ContentDigest:
    """BLAKE2b-128 over name, dtype, shape and words of tensors that come sorted by name."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=16)

    def watch(self, tensors: Iterable[tuple[TensorMeta, Tensor]]) -> Iterator[tuple[TensorMeta, Tensor]]:
        """Pass the tensors on and digest them on the way."""
        for meta, tensor in tensors:
            self._state.update(f"{meta.name}\0{meta.dtype}\0{meta.shape}\n".encode())
            self._state.update(copied_words(tensor).data)
            yield meta, tensor

    @property
    def value(self) -> bytes:
        """Digest of everything that passed so far."""
        return self._state.digest()
