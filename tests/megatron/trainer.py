"""A real megatron-core model on CPU ranks, loaded and exported by Megatron-Bridge's own mapping objects.

Ranks are forked, so that the imports of Megatron are paid for once. What a CPU lacks is replaced where it is asked for:
the current device, and the generator that keeps the ranks of a GPU apart.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge
from megatron.bridge.models.hf_pretrained.state import StateDict
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random

logging.disable(logging.WARNING)
torch._dynamo.config.disable = True
LIMIT_S = 120


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; the world is what they need."""

    tensor: int = 1
    expert: int = 1
    expert_tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    """Stages of each pipeline rank."""
    data: int = 1

    @property
    def world(self) -> int:
        return max(self.tensor * self.data, self.expert * self.expert_tensor) * self.pipeline


@dataclass(frozen=True)
class Checkpoint:
    """What Bridge wants of a Hugging Face checkpoint."""

    config: Any
    tensors: dict[str, torch.Tensor]
    model_name_or_path: str = "tiny"
    state: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", StateDict(dict(self.tensors)))


def run_ranks(layout: Layout, work: Callable[..., None], *args: Any) -> None:
    """Run `work(store, *args)` on every rank of a layout. Raises: AssertionError with the first traceback."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as directory:
        failures = context.SimpleQueue()
        given = (failures, str(Path(directory) / "store"), layout, work, args)
        ranks = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(layout.world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(LIMIT_S)
        alive = [rank for rank in ranks if rank.is_alive()]
        for rank in alive:
            rank.kill()
            rank.join()
        told = [failures.get() for _ in iter(lambda: not failures.empty(), False)]
        assert not told, "\n".join(told)
        assert not alive, f"{len(alive)} ranks did not end in {LIMIT_S} s"
        assert [rank.exitcode for rank in ranks] == [0] * layout.world


def _rank(rank: int, failures: Any, path: str, layout: Layout, work: Callable[..., None], args: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, layout.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
    try:
        with on_cpu():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                virtual_pipeline_model_parallel_size=layout.virtual,
                expert_model_parallel_size=layout.expert,
                expert_tensor_parallel_size=layout.expert_tensor,
                create_gloo_process_groups=False,
            )
            work(dist.PrefixStore("exchange", store), *args)
            dist.barrier()
    except BaseException:
        failures.put(f"rank {rank}: {traceback.format_exc()}")
        raise SystemExit(1) from None


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Answers for what Megatron asks a GPU, while a model is built, trained and exported on the CPU."""
    held = torch.cuda.current_device, torch.cuda.set_device, megatron_random.CudaRNGStatesTracker.fork
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    megatron_random.CudaRNGStatesTracker.fork = lambda *args, **options: contextlib.nullcontext()
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.set_device, megatron_random.CudaRNGStatesTracker.fork = held


def build(bridge: MegatronModelBridge, checkpoint: Checkpoint, layout: Layout, **options: Any) -> list[torch.nn.Module]:
    """The stages of this rank, with the weights of the checkpoint; without them when it has none."""
    provider = bridge.provider_bridge(checkpoint)
    for name, value in {
        "transformer_layer_spec": _layer_spec,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "moe_token_dispatcher_type": "allgather",
        **options,
    }.items():
        setattr(provider, name, value)
    provider.finalize()
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    stages = range(layout.virtual) if layout.virtual else [None]
    models = [provider.provide(vp_stage=stage) for stage in stages]
    if checkpoint.tensors:
        bridge.load_weights_hf_to_megatron(checkpoint, models)
    return models


def _layer_spec(config: Any) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )


def export(
    bridge: MegatronModelBridge, models: list[torch.nn.Module], checkpoint: Checkpoint
) -> dict[str, torch.Tensor]:
    """What Bridge makes of the model, on every rank; norms are FP32 in this model and served in BF16."""
    found = bridge.stream_weights_megatron_to_hf(models, checkpoint, show_progress=False, weight_dtype=torch.bfloat16)
    return {name: tensor.clone() for name, tensor in found}


def train_step(model: torch.nn.Module, vocabulary: int, seed: int) -> None:
    """Forward, backward and AdamW on random tokens; replicas of a parameter end with equal bits."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (2, 8), generator=generator)
    positions = torch.arange(8).expand(2, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    # Megatron makes the causal mask on a GPU where it is not given.
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).triu(1)
    loss = model(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean()
    loss.backward()
    for name, value in model.named_parameters():
        for group in _replicas(name, value):
            if value.grad is None:  # an expert that no token came to
                value.grad = torch.zeros_like(value)
            whole = value.grad.float()
            dist.all_reduce(whole, group=group)
            value.grad = whole.to(value.dtype)
    optimizer.step()


def _replicas(name: str, value: torch.Tensor) -> Iterator[Any]:
    """The process groups over which a parameter is held more than once."""
    if ".experts." in name:
        yield parallel_state.get_expert_data_parallel_group()
    else:
        yield parallel_state.get_data_parallel_group()
        if not getattr(value, "tensor_model_parallel", False):
            yield parallel_state.get_tensor_model_parallel_group()
