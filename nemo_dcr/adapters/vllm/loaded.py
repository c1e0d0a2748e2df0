"""A second load of the start checkpoint through a digest, so that the first record needs no payloads.

The engine's own weight iterator gives the checkpoint's tensors and its own loader places them, in the storage and in
the order of every later refit. So the digest tells what is in the storage now, not what a file held at some time.
Not handled: engines that serve (call it before); dummy weights (nothing is claimed for them).

Paper: Section 6.3 (initial version)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from nemo_dcr.bits.tensors import copied_words, dtype_name
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.checkpoint.digests import content_digest, tensor_digest
from nemo_dcr.receiver.residents import NativeModel


def load_and_digest(model: NativeModel, weights: Iterable[tuple[str, Tensor]]) -> bytes:
    """Load `weights` into `model` and return the digest of their names, dtypes, shapes and bits."""
    digests: dict[str, bytes] = {}

    def watched() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            meta = TensorMeta(name, tuple(tensor.shape), dtype_name(tensor.dtype))
            digests[name] = tensor_digest(meta, copied_words(tensor))
            yield name, tensor

    with torch.no_grad():
        model.load_weights(watched())
    return content_digest(digests)
