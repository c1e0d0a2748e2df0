"""A real trainer rank: a `transformers` model under FSDP2, with real gradients and a real optimizer.

Master weights are FP32 shards, compute is BF16, the optimizer is AdamW with a constant rate and no weight decay, the
loss is next-token cross entropy on the built-in prompts. What a refit ships is the BF16 cast of the local shard: that
cast is the source projection's input and is computed on demand, so that no second copy of the weights is held.
While the weights are frozen a step is refused, which keeps the candidate of a transition the same over its attempts.
Not handled: starting torch.distributed (the caller does), pipeline or tensor parallelism, checkpoints of the optimizer.

Paper: Section 3 (trainer ranks, stored values), Section 8 (AdamW, learning rate 1e-6)   Conditions: SC3
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, tensor_from_words
from nemo_dcr.errors import InternalError, InvalidConfig
from nemo_dcr.testing import prompts
from nemo_dcr.testing.bf16_linear import use_wide_products
from nemo_dcr.testing.checkpoint import INDEX_FILE, SINGLE_FILE, tensor_table

STORED_DTYPE = "BF16"
_NO_TARGET = -100
"""The label that cross entropy leaves out."""


class Fsdp2Trainer:
    """Rank `rank` of `world` of a training job that starts from a BF16 Hugging Face checkpoint.

    The caller has initialised torch.distributed (gloo) with the same rank and world size.
    `batch_size` texts of at most `length` tokens are seen by every rank at every step.
    Raises: InvalidConfig when the checkpoint is not BF16 or has tensors that the model does not train.
    """

    def __init__(
        self,
        checkpoint_dir: Path,
        rank: int,
        world: int,
        *,
        lr: float = 1e-6,
        seed: int = 0,
        batch_size: int = 2,
        length: int = 32,
    ) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.checkpoint_dir = Path(checkpoint_dir)
        self.rank = rank
        self.world = world
        self.steps = 0
        self._seed = seed
        self._batch_size = batch_size
        self._length = length
        self._frozen = False
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self.checkpoint_dir)
        model: Any = AutoModelForCausalLM.from_pretrained(self.checkpoint_dir, dtype=torch.float32)
        use_wide_products(model)
        _shard(model, world)
        self.model = model.train()
        self._parameters = _trained(model, self.checkpoint_dir)
        # AdamW is elementwise: on plain local tensors it computes the same as on DTensors, without their dispatch.
        self._locals = {name: p.to_local().detach().requires_grad_() for name, p in self._parameters.items()}
        self._optimizer = torch.optim.AdamW(list(self._locals.values()), lr=lr, weight_decay=0.0, fused=True)

    def step(self) -> float:
        """Do one optimizer step on the next batch and return the mean loss of this rank's batch before it.

        Raises: InternalError when the weights are frozen.
        """
        if self._frozen:
            raise InternalError("the weights are frozen for a transition; call release() after it has ended")
        texts = prompts.batch(seed=self._seed, step=self.steps, rank=self.rank, size=self._batch_size)
        tokens, labels = self._encode(texts)
        loss: Tensor = self.model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimize()
        self.steps += 1
        return float(loss.detach())

    def _optimize(self) -> None:
        for name, parameter in self._parameters.items():
            local = self._locals[name]
            if parameter.to_local().data_ptr() != local.data_ptr() or not isinstance(parameter.grad, DTensor):
                raise InternalError(f"{name}: the optimizer does not hold the shard that the model trains")
            local.grad = parameter.grad.to_local()
        self._optimizer.step()
        for name, parameter in self._parameters.items():
            self._locals[name].grad = parameter.grad = None

    def _encode(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Token ids and labels of shape [texts, longest]; padding follows the text and is no target."""
        rows = [self._tokenizer(text).input_ids[: self._length] for text in texts]
        longest = max(len(row) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        labels = torch.full_like(tokens, _NO_TARGET)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = labels[index, : len(row)] = torch.tensor(row)
        return tokens, labels

    def local_shards(self) -> list[tuple[str, DTensor]]:
        """(canonical name, sharded FP32 parameter), names sorted; tied parameters once, under the checkpoint's name."""
        return list(self._parameters.items())

    def freeze(self) -> None:
        """Refuse steps until `release`, so that the candidate words stay what they are."""
        self._frozen = True

    def release(self) -> None:
        """End of the transition: steps are allowed again."""
        self._frozen = False

    @property
    def frozen(self) -> bool:
        """True between `freeze` and `release`."""
        return self._frozen

    def candidate_words(self, name: str) -> Words:
        """Flat BF16 words of this rank's shard of `name` in row-major order of the local shape; empty shards give none.

        A fresh array on every call, the same bits until the next step.
        """
        return copied_words(self._parameters[name].to_local().detach().to(torch.bfloat16))

    def restore_words(self, name: str, flat: Words) -> None:
        """Set this rank's shard of `name` to stored BF16 words: a dropped candidate goes back to the committed version.

        Raises: ValueError when the number of words does not fit the shard.
        """
        local = self._parameters[name].to_local().detach()
        local.copy_(tensor_from_words(flat, STORED_DTYPE, tuple(local.shape)))

    def gather_canonical(self, directory: Path) -> None:
        """Write the BF16 checkpoint of the current weights to `directory`, on rank 0; every rank must call it.

        For independent checks only: it assembles full tensors, which a refit never does.
        """
        directory = Path(directory)
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            full = parameter.full_tensor().detach()
            if self.rank == 0:
                tensors[name] = full.to(torch.bfloat16).contiguous()
        if self.rank != 0:
            return
        directory.mkdir(parents=True, exist_ok=True)
        for path in self.checkpoint_dir.iterdir():
            if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_FILE:
                shutil.copyfile(path, directory / path.name)
        scratch = directory / f".{SINGLE_FILE}"
        save_file(tensors, scratch, metadata={"format": "pt"})
        scratch.replace(directory / SINGLE_FILE)


def _shard(model: nn.Module, world: int) -> None:
    """Shard every decoder layer, then the root, in place: FP32 masters, BF16 compute, FP32 gradient sums."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    keep: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": False}
    mesh = init_device_mesh("cpu", (world,))
    layer_types = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, mesh=mesh, **keep)
    fully_shard(model, mesh=mesh, **keep)


def _trained(model: nn.Module, checkpoint_dir: Path) -> dict[str, DTensor]:
    """The sharded parameters by canonical name, names sorted, checked against the checkpoint's table."""
    table = {meta.name: meta for meta in tensor_table(checkpoint_dir)}
    found: dict[str, DTensor] = {}
    seen: set[int] = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # A tied parameter has several names in the model and one in the checkpoint.
        if name in table and id(parameter) not in seen:
            if not isinstance(parameter, DTensor):
                raise InternalError(f"{name} was not sharded")
            seen.add(id(parameter))
            found[name] = parameter
    for name, meta in table.items():
        if name not in found:
            raise InvalidConfig("checkpoint", f"the model does not train {name}; remove it from the checkpoint")
        if meta.dtype != STORED_DTYPE or meta.shape != tuple(found[name].shape):
            raise InvalidConfig("checkpoint", f"{name} is {meta.dtype} {meta.shape}; the trainer ships BF16 tensors")
    unnamed = {name for name, parameter in model.named_parameters() if id(parameter) not in seen}
    if unnamed:
        raise InvalidConfig("checkpoint", f"it lacks {', '.join(sorted(unnamed))}, which the model trains")
    return dict(sorted(found.items()))
