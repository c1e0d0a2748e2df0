"""Payload bytes for one change against the order-0 entropy of locations and masks."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.ids import AttemptId, OwnerId, PayloadKey
from nemo_dcr.kernels import plain

SHAPE = (768, 2048)
TENSORS = 4
KEY = PayloadKey(AttemptId(1), OwnerId(0), 0)


def bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest BF16, ties to even, as stored words."""
    words = values.astype("<f4").view("<u4")
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype("<u2")


def widened(words: np.ndarray) -> np.ndarray:
    return (words.astype("<u4") << 16).view("<f4")


def changed(old: np.ndarray, kind: str, rate: float, rng: np.random.Generator) -> np.ndarray:
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < rate)
    sign = rng.choice([-1, 1], len(at))
    if kind == "ulp":
        new[at] = (old[at].astype(np.int32) + sign).astype("<u2")
    else:
        new[at] = bf16(widened(old[at]) * (1 + sign * rng.uniform(0.5e-2, 1.5e-2, len(at))).astype("<f4"))
    return new


def entropy_bound(masks: np.ndarray, elements: int) -> float:
    """Bits of one change: its location among independent changes of this rate, and its mask."""
    rate = len(masks) / elements
    location = -(rate * np.log2(rate) + (1 - rate) * np.log2(1 - rate)) / rate
    share = np.bincount(masks.astype(np.int64)) / len(masks)
    share = share[share > 0]
    return float(location - (share * np.log2(share)).sum())


def measured(kind: str, rate: float, encoding: Encoding) -> tuple[int, float]:
    """Payload bytes, and the entropy bound in bytes."""
    rng = np.random.default_rng(11)
    items, masks = [], []
    for tensor in range(TENSORS):
        old = bf16(rng.normal(0, 0.02, SHAPE[0] * SHAPE[1]))
        new = changed(old, kind, rate, rng)
        at = plain.changed_indices(new, old)
        masks.append(plain.xor_masks(new, old, at))
        values = masks[-1] if encoding is Encoding.XOR else plain.gather(new, at)
        items.append(Item.of(TensorMeta(f"layers.{tensor}.weight", SHAPE, "BF16"), encoding, at, values))
    count = sum(item.count for item in items)
    bound = entropy_bound(np.concatenate(masks), TENSORS * SHAPE[0] * SHAPE[1]) * count / 8
    return len(encode_payload(KEY, items).data), bound


@pytest.mark.parametrize("rate", [0.005, 0.012, 0.05])
@pytest.mark.parametrize(("kind", "ceiling"), [("ulp", 1.06), ("rel", 1.035)])
def test_xor_payloads_stay_near_the_order_0_entropy(kind: str, ceiling: float, rate: float) -> None:
    nbytes, bound = measured(kind, rate, Encoding.XOR)
    assert bound < nbytes < ceiling * bound


def test_an_overwrite_payload_is_larger_than_the_xor_payload_of_the_same_changes() -> None:
    xor, _ = measured("ulp", 0.012, Encoding.XOR)
    overwrite, _ = measured("ulp", 0.012, Encoding.OVERWRITE)
    assert 1.7 * xor < overwrite < 2.5 * xor
