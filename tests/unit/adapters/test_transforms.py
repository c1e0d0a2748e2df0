"""Post-load steps that would leave a refit exact in its parameters and stale in what is computed with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from nemo_dcr.adapters.vllm.transforms import (
    reachable_tensors,
    require_loader_layout,
    transforms_of,
    watch,
    watching,
)
from nemo_dcr.errors import UnsupportedLoaderPath


class Engine(nn.Module):
    """Two weights with loaders and a constant."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("kv", "w1"):
            weight = nn.Parameter(torch.randn(4, 6).bfloat16(), requires_grad=False)
            weight.weight_loader = Tensor.copy_
            self.register_parameter(name, weight)
        self.register_buffer("scale", torch.ones(3))

    def load_weights(self, weights):
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


class Helper:
    """An object beside the module tree."""


def found(step: Callable[[Engine], None]) -> dict[str, str]:
    engine = Engine()
    with torch.no_grad(), watch(engine) as seen:
        step(engine)
    return {transform.name: transform.code for transform in seen.transforms()}


def swap_halves(engine: Engine) -> None:
    engine.w1.data.copy_(torch.cat([engine.w1.data[2:], engine.w1.data[:2]]))


def empty(engine: Engine) -> None:
    engine.w1 = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)


def requantise(engine: Engine) -> None:
    engine.w1 = nn.Parameter(engine.w1.data.to(torch.float8_e4m3fn), requires_grad=False)
    engine.w1_scale = nn.Parameter(torch.full((1,), 2.0), requires_grad=False)


def transpose_in_place(engine: Engine) -> None:
    engine.w1.data = engine.w1.data.t().contiguous()


def restride(engine: Engine) -> None:
    engine.w1.data = engine.w1.data.t().contiguous().t()


def remove(engine: Engine) -> None:
    del engine.w1


def replace_without_loader(engine: Engine) -> None:
    engine.w1 = nn.Parameter(engine.w1.data.clone(), requires_grad=False)


@pytest.mark.parametrize(
    "step", [swap_halves, empty, requantise, transpose_in_place, restride, remove, replace_without_loader]
)
def test_parameter_that_is_no_longer_what_was_loaded_is_refused(step):
    assert found(step)["w1"] == "LC9"


def in_attribute(engine: Engine) -> None:
    engine.absorbed = engine.kv.t().contiguous()


def in_list(engine: Engine) -> None:
    engine.cache = [None, (engine.kv.float(),)]


def in_closure(engine: Engine) -> None:
    packed = engine.kv.clone()
    engine.kernel = lambda x: x @ packed


def in_partial(engine: Engine) -> None:
    engine.kernel = functools.partial(torch.matmul, other=engine.kv.t().clone())


def in_helper(engine: Engine) -> None:
    engine.impl = Helper()
    engine.impl.derived = engine.kv.abs().max()


def in_parameter(engine: Engine) -> None:
    engine.w_uk = nn.Parameter(engine.kv[:2].clone(), requires_grad=False)


def in_two_steps(engine: Engine) -> None:
    made = torch.zeros(4, 6)
    made.copy_(engine.kv)
    engine.derived = made * 2


@pytest.mark.parametrize("step", [in_attribute, in_list, in_closure, in_partial, in_helper, in_parameter, in_two_steps])
def test_reachable_tensor_made_from_a_parameter_is_refused(step):
    assert list(found(step).values()) == ["LC10"]


def test_parameters_that_share_one_storage_after_loading_are_refused():
    """As vLLM ties a head again to embeddings that it equals: later versions of the two need not be equal."""
    engine = Engine()
    with torch.no_grad():
        engine.w1.data.copy_(engine.kv.data)
        with watch(engine) as seen:
            engine.w1 = engine.kv
    (transform,) = seen.transforms()
    assert (transform.name, transform.code) == ("w1", "LC9")
    assert "shares the storage of kv" in transform.reason


def views(engine: Engine) -> None:
    engine.w_uv = nn.Parameter(engine.kv.data[:, :3].t(), requires_grad=False)
    engine.w_uk = engine.kv.data.to(torch.bfloat16).unflatten(1, (2, 3)).permute(1, 2, 0)


def constants(engine: Engine) -> None:
    engine.table = torch.arange(24.0).reshape(4, 6).sin()
    engine.like = torch.zeros_like(engine.scale)


def same_bits(engine: Engine) -> None:
    fresh = nn.Parameter(engine.w1.data.clone(), requires_grad=False)
    fresh.weight_loader = Tensor.copy_
    engine.w1 = fresh


def temporary(engine: Engine) -> None:
    engine.looked_at = float(engine.kv.float().sum())


@pytest.mark.parametrize("step", [views, constants, same_bits, temporary])
def test_what_follows_by_itself_is_accepted(step):
    assert found(step) == {}


def test_handle_of_native_code_is_refused():
    library = torch.library.Library("nemo_dcr_test", "DEF")
    library.define("pack(Tensor weight) -> int")
    library.impl("pack", lambda weight: 1, "CPU")

    def pack(engine: Engine) -> None:
        engine.handle = torch.ops.nemo_dcr_test.pack(engine.kv.t())

    assert found(pack) == {"kv": "LC10"}


def test_findings_stay_with_the_model_and_refuse_it():
    engine = Engine()
    assert transforms_of(engine) is None
    watching(lambda model, factor: swap_halves(model))(engine, 2)
    with pytest.raises(UnsupportedLoaderPath) as refusal:
        require_loader_layout(transforms_of(engine))
    assert (refusal.value.tensor, refusal.value.condition) == ("w1", "LC9")
    watching(constants)(engine)
    require_loader_layout(transforms_of(engine))


def test_walk_ends_where_objects_hold_each_other():
    engine = Engine()
    engine.impl = Helper()
    engine.impl.owner, engine.impl.here = engine, {"again": engine.impl}
    assert {path for path, _ in reachable_tensors(engine)} == {"kv", "w1", "scale"}
