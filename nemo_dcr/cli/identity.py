"""Digest of what was loaded, the same that binds checkpoint deltas.

Owners and receivers that started from equal digests hold the same version 0, which is how the first record may be
written without sending the whole model (bootstrap by proof).

Paper: Section 6.3 (initial version)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.digests import content_digest, tensor_digest


class LoadedDigest:
    """The content digest of tensors that pass on their way to a loader."""

    def __init__(self) -> None:
        self._tensors: dict[str, bytes] = {}

    def watch(self, tensors: Iterable[tuple[TensorMeta, Tensor]]) -> Iterator[tuple[TensorMeta, Tensor]]:
        """Pass the tensors on and digest them on the way."""
        for meta, tensor in tensors:
            self._tensors[meta.name] = tensor_digest(meta, copied_words(tensor))
            yield meta, tensor

    @property
    def value(self) -> bytes:
        """Digest of everything that passed so far."""
        return content_digest(self._tensors)
