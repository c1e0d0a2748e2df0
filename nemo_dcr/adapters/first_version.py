"""Whether the trainer starts from the stored bits of its checkpoint: then the first version need not be sent.

Every rank compares what it owns with the files and digests its share of them; the digest is that of the whole
checkpoint, the same that engines make of what they loaded. Where a single bit differs there is no digest, and the first
version is sent whole.
Not handled: weights without a checkpoint (they are sent).

Paper: Section 6.3 (initial version)   Spec: Bootstrap   Conditions: SC3
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np

from nemo_dcr.bits import equal_words
from nemo_dcr.checkpoint.digests import content_digest, tensor_digest
from nemo_dcr.checkpoint.directory import Checkpoint
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.exchange import Exchange
from nemo_dcr.source.ownership import residual_owner

logger = logging.getLogger(__name__)

_SHARE = msgspec.msgpack.Decoder(tuple[str, dict[str, bytes]])


def first_digest(checkpoint: Checkpoint, exchange: Exchange, delta: DeltaOwner) -> bytes:
    """The digest of `checkpoint` if all baselines hold its bits, else nothing. All ranks together.

    Raises: CheckpointInvalid when a file cannot be read; ConditionViolated (SC3) unless the baseline was captured.
    """
    other = next(
        (
            tensor.name
            for tensor, box, held in delta.tracker_words()
            if not equal_words(box.take(checkpoint.words(tensor.name)), held)
        ),
        "",
    )
    mine = {
        name: tensor_digest(stored.meta, np.ascontiguousarray(checkpoint.words(name)))
        for name, stored in checkpoint.tensors.items()
        if residual_owner(name, exchange.world) == exchange.rank
    }
    shares = [_SHARE.decode(data) for data in exchange.gather(msgspec.msgpack.encode((other, mine)))]
    differing = sorted({name for name, _ in shares if name})
    if differing:
        logger.warning("the weights are not those of the checkpoint (%s): the first version is sent", differing[0])
        return b""
    return content_digest({name: digest for _, digests in shares for name, digest in digests.items()})
