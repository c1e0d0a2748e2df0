"""Encoding experts: the scan beside a bare comparison, the whole payload beside a peer and beside the entropy bound.

`scan and emit` finds the changes and writes gaps and byte planes into buffers that are there before; `payload` goes on
to the bytes that are published: metadata, one zstd frame, digest. Both are the calls that an owner makes.

Paper: Section 5; Appendix D
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bench.clock import best_together
from bench.entropy import location_bytes, value_bytes
from bench.limits import comparison
from bench.peers import verl_encoder
from bench.rows import Row, Rows, Settings
from bench.weights import DTYPE, Pair, experts, nbytes
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import EncodedPayload, encode_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.kernels import hot

GROUP = "Encode"
KEY = PayloadKey(AttemptId(1), OwnerId(0), 0)
FEW = 0.012
"""Up to this rate a refit is bound by the comparison; above it the entries count too."""
ENTROPY = 1.035
"""Payload bytes over their bound: the metadata, the digest and what zstd's Huffman codes lose."""


def rows(settings: Settings) -> Rows:
    """Throughput in GB/s of checkpoint bytes, bytes for each changed element, and the ratios that are demanded."""
    for rate in settings.rates:
        settings.progress(f"encode, {rate:.1%} changed")
        pairs = experts(settings, rate)
        total, label = nbytes(pairs), f"{rate:.1%}"
        verl = verl_encoder(pairs)
        if verl() != sum(item.count for item in changed_items(pairs, Encoding.XOR)):
            raise RuntimeError("verl's encoder and ours find different changes; their times cannot be compared")
        took = best_together(
            {
                "compare": comparison(pairs),
                "emit": emitter(pairs),
                "payload": lambda pairs=pairs: payload(pairs, Encoding.XOR),  # type: ignore[misc]
                "verl": verl,
            },
            settings,
        )
        share = took["compare"] / took["emit"]
        demand = 0.5 if rate <= FEW else 0.4
        yield Row(f"comparison alone, {label}", total / took["compare"] / 1e9, "GB/s", None, True, GROUP)
        yield Row(f"scan and emit, {label}", total / took["emit"] / 1e9, "GB/s", None, True, GROUP)
        yield Row(f"scan and emit over comparison alone, {label}", share, "x", demand, True, GROUP)
        yield Row(f"payload with zstd and digest, {label}", total / took["payload"] / 1e9, "GB/s", None, True, GROUP)
        yield Row(f"verl's positions and values, {label}", total / took["verl"] / 1e9, "GB/s", None, True, GROUP)
        yield Row(f"payload over verl, {label}", took["verl"] / took["payload"], "x", None, True, GROUP)
        yield from sizes(pairs, label, ENTROPY)


def sizes(pairs: list[Pair], label: str, demand: float) -> Rows:
    """Payload bytes of XOR masks and of overwrites, and the masks beside their entropy bound."""
    items = changed_items(pairs, Encoding.XOR)
    changed = sum(item.count for item in items)
    masks = encode_payload(KEY, items)
    written = payload(pairs, Encoding.OVERWRITE)
    bound = location_bytes((item.count, item.tensor.numel) for item in items)
    bound += value_bytes(np.concatenate([item.values for item in items]))
    yield Row(f"payload of XOR masks, {label}", len(masks.data) / changed, "B/chg", None, False, GROUP)
    yield Row(f"payload of overwrites, {label}", len(written.data) / changed, "B/chg", None, False, GROUP)
    yield Row(f"XOR payload over entropy bound, {label}", len(masks.data) / bound, "x", demand, False, GROUP)


def emitter(pairs: list[Pair]) -> Callable[[], object]:
    """A call that writes locations and masks of all pairs into one buffer, as planes."""
    room = np.empty(nbytes(pairs), dtype=np.uint8)

    def call() -> int:
        loops, end = hot.loops(), 0
        for pair in pairs:
            indices, masks = loops.changes(pair.new, pair.old, masks=True)
            chain = loops.chain_of(indices)
            room[end : end + len(chain)] = chain
            low = end + len(chain)
            high, end = low + len(masks), low + 2 * len(masks)
            loops.split_planes(masks, [room[low:high], room[high:end]])
        return end

    return call


def changed_items(pairs: list[Pair], encoding: Encoding) -> list[Item]:
    """What an owner would send of all pairs."""
    found = []
    for pair in pairs:
        indices, values = hot.loops().changes(pair.new, pair.old, masks=encoding is Encoding.XOR)
        if len(indices):
            found.append(Item.of(TensorMeta(pair.name, pair.shape, DTYPE), encoding, indices, values))
    return found


def payload(pairs: list[Pair], encoding: Encoding) -> EncodedPayload:
    """The published bytes of all pairs."""
    return encode_payload(KEY, changed_items(pairs, encoding))
