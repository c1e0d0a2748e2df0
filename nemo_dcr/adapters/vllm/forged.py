"""vLLM models at any rank of any parallel layout, built and loaded in one process without an engine.

A model of vLLM asks its process groups for rank and size while it is built and while it loads, and for nothing else.
Groups of one process are really made; their rank and size are then forged for the time of a build or a load. The
collectives of a forged group must never run, so that a forged model can load and cannot compute.
Not handled: pipeline stages; layers whose build asks a device.

Paper: Section 6.1 (native loader)
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
from vllm.distributed import parallel_state as groups
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.utils.torch_utils import set_default_torch_dtype


@dataclass(frozen=True, order=True, slots=True)
class Place:
    """One rank of a parallel layout; `ep` is 1, or the size of all ranks together, as in vLLM."""

    tp: int = 1
    tp_rank: int = 0
    dp: int = 1
    dp_rank: int = 0
    expert_parallel: bool = False

    @property
    def ep(self) -> int:
        """Ranks that share out the experts."""
        return self.tp * self.dp if self.expert_parallel else 1

    @property
    def layout(self) -> str:
        """`TP2`, or `TP2 EP4` where experts are shared out."""
        return f"TP{self.tp} EP{self.ep}" if self.expert_parallel else f"TP{self.tp}"

    @classmethod
    def of(cls, tp: int, ep: int = 1) -> list[Place]:
        """Every rank of a layout with `tp` ranks an instance, and experts shared out over `ep` ranks.

        Raises: ValueError when `ep` is neither 1 nor a multiple of `tp`.
        """
        if ep > 1 and ep % tp:
            raise ValueError(f"experts over {ep} ranks need instances of {tp} ranks to fit; choose a multiple of {tp}")
        dp = max(1, ep // tp)
        return [cls(tp, rank, dp, replica, ep > 1) for replica in range(dp) for rank in range(tp)]


@contextmanager
def _forged_groups(place: Place) -> Iterator[None]:
    if not model_parallel_is_initialized():
        meeting = Path(tempfile.mkdtemp(prefix="nemo-dcr-forged-")) / "groups"
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
            initialize_model_parallel(1, 1)
    ranks = {"_TP": (place.tp_rank, place.tp), "_DP": (place.dp_rank, place.dp)}
    ranks["_EP"] = (place.dp_rank * place.tp + place.tp_rank, place.tp * place.dp)
    with ExitStack() as undo:
        for name, (rank, size) in ranks.items():
            group = getattr(groups, name)
            if group is None:
                continue
            undo.callback(vars(group).update, rank_in_group=group.rank_in_group, world_size=group.world_size)
            undo.callback(vars(group).update, ranks=group.ranks)
            group.rank_in_group, group.world_size, group.ranks = rank, size, list(range(size))
        yield


def _register_in_process(directory: Path) -> None:
    """Import the model's class here; vLLM would otherwise start a process to look at it, which takes seconds."""
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in settings.get("architectures") or ():
        lazy = ModelRegistry.models.get(name)
        if lazy is not None and type(lazy).__name__.startswith("_Lazy"):
            ModelRegistry.register_model(name, lazy.load_model_cls())


class ForgedModel:
    """One rank of a vLLM model with its native loader; see `NativeModel`."""

    def __init__(self, directory: Path, place: Place, *, dtype: str = "bfloat16", **options: Any) -> None:
        """Build the model that `config.json` in `directory` describes; its weights are not loaded, or looked at."""
        self.place = place
        with _forged_groups(Place()):
            _register_in_process(directory)
            arguments: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "max_num_seqs": 4}
            arguments |= {"max_model_len": 128, "max_num_batched_tokens": 256, "load_format": "dummy"} | options
            self.config = EngineArgs(model=str(directory), dtype=dtype, **arguments).create_engine_config()
        parallel = self.config.parallel_config
        parallel.tensor_parallel_size = parallel.world_size = place.tp
        parallel.data_parallel_size, parallel.data_parallel_rank = place.dp, place.dp_rank
        parallel.enable_expert_parallel = place.expert_parallel
        with self.at_its_place(), set_default_torch_dtype(self.config.model_config.dtype):
            self.module: Any = initialize_model(self.config)

    @contextmanager
    def at_its_place(self) -> Iterator[None]:
        """Within it, vLLM's process groups show this model's rank and size."""
        with _forged_groups(self.place), set_current_vllm_config(self.config), torch.no_grad():
            yield

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str] | None:
        """The native loader, at the model's place."""
        with self.at_its_place():
            reported: Iterable[str] | None = self.module.load_weights(weights)
            return reported

    def named_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """As in `torch.nn.Module`."""
        yield from self.module.named_modules()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """As in `torch.nn.Module`."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """As in `torch.nn.Module`."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)
