"""Injected changes: at the rate, in stored bits, the same on replicas and in every layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import InvalidConfig
from nemo_dcr.source.dtensor import local_box
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.testing.changes import inject, inject_shard

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def weights(dtype: torch.dtype = torch.bfloat16, elements: int = 200_000) -> Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(1)).to(dtype)


def changed(before: Tensor, after: Tensor) -> np.ndarray:
    return np.flatnonzero(copied_words(before) != copied_words(after))


@pytest.mark.parametrize("rate", [0.005, 0.03, 0.05])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_rate_is_that_of_stored_bits_and_the_amplitude_is_relative(dtype: torch.dtype, rate: float) -> None:
    before = weights(dtype)
    after = before.clone()
    count = inject({"w": after}, rate, seed=4)
    places = changed(before, after)
    assert count == len(places)
    assert abs(count - rate * len(before)) < 5 * (rate * len(before)) ** 0.5
    relative = ((after.double() - before.double()).abs() / before.double().abs())[places]
    assert 0.009 < float(relative.median()) < 0.011
    ups = int((after.abs() > before.abs())[places].sum())
    assert abs(ups - count / 2) < 5 * count**0.5


def test_changes_are_spread_evenly_over_the_tensor() -> None:
    before = weights()
    after = before.clone()
    inject({"w": after}, 0.05, seed=4)
    tenths = np.histogram(changed(before, after), bins=10, range=(0, len(before)))[0]
    assert tenths.min() > 0.8 * tenths.max()


def test_the_same_seed_gives_the_same_change_and_another_seed_or_name_another_one() -> None:
    found = []
    for name, seed in (("w", 4), ("w", 4), ("w", 5), ("v", 4)):
        after = weights()
        inject({name: after}, 0.03, seed=seed)
        found.append(copied_words(after).tobytes())
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_replica_that_holds_other_tensors_too_gets_the_same_changes() -> None:
    alone, beside = weights(), weights()
    inject({"w": alone}, 0.03, seed=4)
    inject({"a": weights(), "w": beside, "z": weights()}, 0.03, seed=4)
    assert copied_words(alone).tobytes() == copied_words(beside).tobytes()


@pytest.mark.parametrize("special", [0.0, -0.0, 1e-40, 3.3e38, -3.3e38])
def test_a_value_that_the_amplitude_cannot_move_moves_to_the_next_stored_one(special: float) -> None:
    before = torch.full((1000,), special).to(torch.bfloat16)
    after = before.clone()
    assert inject({"w": after}, 1.0, seed=4) == 1000
    assert len(changed(before, after)) == 1000
    assert bool(torch.isfinite(after).all())


def test_infinities_and_nans_stay() -> None:
    before = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0]).to(torch.bfloat16)
    after = before.clone()
    assert inject({"w": after}, 1.0, seed=4) == 1
    assert changed(before, after).tolist() == [3]


def test_a_change_of_a_master_weight_shows_in_the_dtype_that_is_stored() -> None:
    before = weights(torch.float32)
    after = before.clone()
    count = inject({"w": after}, 0.03, seed=4, stored="BF16")
    assert len(changed(before.bfloat16(), after.bfloat16())) == count == len(changed(before, after))


def test_the_elements_of_a_view_with_other_strides_are_those_of_its_rows() -> None:
    whole = weights().reshape(400, 500)
    turned = weights().reshape(400, 500).t().contiguous().t()
    assert not turned.is_contiguous()
    inject({"w": whole}, 0.03, seed=4)
    inject({"w": turned}, 0.03, seed=4)
    assert copied_words(whole).tobytes() == copied_words(turned).tobytes()


def test_a_module_changes_in_place_and_the_rates_0_and_1_are_exact() -> None:
    module = nn.Linear(64, 64, dtype=torch.bfloat16)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    assert inject(module, 0.0, seed=4) == 0
    assert inject(module, 1.0, seed=4) == 64 * 65
    for old, new in zip(before, module.parameters(), strict=True):
        assert len(changed(old, new.detach())) == old.numel()


def test_a_bad_rate_and_a_tensor_of_integers_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="between 0 and 1"):
        inject({"w": weights()}, 1.5, seed=4)
    with pytest.raises(InvalidConfig, match="only floating point"):
        inject({"w": torch.ones(3, dtype=torch.int64)}, 0.5, seed=4)


@pytest.mark.parametrize("mesh", [(4,), (2, 2), (3, 2)])
def test_shards_of_any_layout_change_as_the_whole_tensor_does(mesh: tuple[int, ...]) -> None:
    """The last mesh dimension cuts columns or keeps replicas, so some ranks hold the same shard."""
    before = weights(torch.float32, 71 * 50).reshape(71, 50)
    expected, meta = before.clone(), TensorMeta("w", (71, 50), "F32")
    inject({"w": expected}, 0.1, seed=4)
    for last in (Shard(1), Replicate()):
        for coordinate in itertools.product(*map(range, mesh)):
            start, extent = local_box((71, 50), (Shard(0), last)[: len(mesh)], mesh, coordinate)
            cut = tuple(slice(first, first + count) for first, count in zip(start, extent, strict=True))
            local = before[cut].clone()
            count = inject_shard(BoxMap.box(meta, start, extent), local, 0.1, seed=4)
            assert copied_words(local).tolist() == copied_words(expected[cut]).tolist()
            assert count == len(changed(before[cut], local))
