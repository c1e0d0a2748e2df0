"""Configurations of vLLM that are refused before the server answers, and what is told about a start checkpoint."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nemo_dcr.adapters.vllm.loaded import load_and_digest
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.adapters.vllm.support import refusals, require_supported
from nemo_dcr.adapters.vllm.whole_source import WholeWeights
from nemo_dcr.bits.tensors import copied_words
from nemo_dcr.errors import ConditionViolated, InvalidConfig, OperatorNeeded


def config(**changed):
    """The parts of a `VllmConfig` that are looked at, with dotted names for changes."""
    found = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, enable_eplb=False),
        model_config=SimpleNamespace(quantization=None, enable_sleep_mode=False),
        lora_config=None,
        speculative_config=None,
    )
    for name, value in changed.items():
        *path, last = name.split("__", 1)
        target = found
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return found


def test_a_plain_configuration_is_supported():
    assert refusals(config()) == []
    require_supported(config())


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"parallel_config__data_parallel_index": 1}, "data parallelism"),
        ({"parallel_config__enable_eplb": True}, "load balancing"),
        ({"parallel_config___api_process_count": 2}, "several API server processes"),
        ({"model_config__quantization": "fp8"}, "quantization 'fp8'"),
        ({"model_config__enable_sleep_mode": True}, "sleep mode"),
        ({"lora_config": object()}, "LoRA"),
        ({"speculative_config": object()}, "draft model"),
    ],
)
def test_a_configuration_that_nobody_proved_is_refused_with_its_reason(changed, reason):
    with pytest.raises(OperatorNeeded, match=reason):
        require_supported(config(**changed))


class Halves(torch.nn.Module):
    """A rank that holds the upper half."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights):
        for _, tensor in weights:
            self.w.copy_(tensor[2:])


def test_the_digest_of_a_load_is_the_one_of_the_trainers_weights_and_the_load_took_place():
    weights = [("w", torch.arange(16).reshape(4, 4).bfloat16())]
    model = Halves()
    assert load_and_digest(model, iter(weights)) == WholeWeights(weights).digest
    assert (copied_words(model.w) == copied_words(weights[0][1][2:])).all()
    other = [("w", torch.where(weights[0][1] == 1, -0.0, weights[0][1]))]
    assert load_and_digest(model, iter(other)) != WholeWeights(weights).digest


def test_weights_of_another_shape_or_name_are_no_candidate():
    weights = WholeWeights([("w", torch.zeros(4, 4, dtype=torch.bfloat16))])
    for name, tensor in (
        ("w", torch.zeros(4, 4)),
        ("w", torch.zeros(2, 8, dtype=torch.bfloat16)),
        ("v", torch.ones(1)),
    ):
        with pytest.raises(ConditionViolated, match="SC4"):
            weights.take([(name, tensor)])


def test_settings_that_cannot_work_are_refused_by_name(tmp_path):
    good = {"instance": "a", "directory": str(tmp_path), "store": str(tmp_path), "run": "r"}
    assert Settings(**Settings(**good).init_info()) == Settings(**good)
    for field, value in (("instance", "a/0"), ("instance", ""), ("run", 3), ("store", str(tmp_path / "none"))):
        with pytest.raises(InvalidConfig, match=f"init_info.{field}"):
            Settings(**{**good, field: value})
