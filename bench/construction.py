"""An owner's whole work for a real checkpoint: compare, encode every bucket, and afterwards commit its baseline.

The checkpoint is SmolLM2-135M, its change one step of AdamW at rate 1e-6 on text, both in BF16. It is made from the
weights of the demo, which have to be installed, unless a directory is given. The commit copies every word, as an owner
does; a peer scatters the changes.

Paper: Section 5; Section 8; Appendix C
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import distributed as dist

from bench.clock import best_together
from bench.encode import KEY, changed_items, sizes
from bench.limits import comparison
from bench.rows import Row, Rows, Settings
from bench.weights import DTYPE, Pair, nbytes
from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import copied_words, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.payload import encode_payload
from nemo_dcr.codec.records import Encoding, PathClass
from nemo_dcr.ids import OwnerId, Version
from nemo_dcr.record import AttemptMode
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.tasks import AffineTask
from nemo_dcr.testing.checkpoint import smollm2_checkpoint
from nemo_dcr.testing.trainer import Fsdp2Trainer

GROUP = "Construction of SmolLM2-135M after a real step"
STEPS = 2
"""The first step of AdamW moves every element alike; the second is like those that follow."""


def rows(settings: Settings) -> Rows:
    """Construction and commit in GB/s of checkpoint bytes, and payload size."""
    settings.progress("train SmolLM2-135M for two steps")
    pairs = real_steps(settings)
    settings.progress("construct and commit SmolLM2-135M")
    yield from measured(pairs, settings)


def measured(pairs: list[Pair], settings: Settings) -> Rows:
    """The rows for these tensors."""
    total = nbytes(pairs)
    held = {pair.name: pair.old for pair in pairs}
    tensors = [TensorMeta(pair.name, pair.shape, DTYPE) for pair in pairs]
    tasks = [
        AffineTask.identity(BoxMap.whole(meta), lambda name=meta.name: held[name])  # type: ignore[misc]
        for meta in tensors
    ]
    owner = DeltaOwner(OwnerId(0), tasks)
    owner.capture(Version(0))
    held = {pair.name: pair.new for pair in pairs}
    classes = {meta.name: PathClass.XOR for meta in tensors}
    version = [0]

    def construct() -> int:
        buckets = owner.stream(AttemptMode.XOR, classes)
        return sum(len(encode_payload(KEY, bucket.items).data) for bucket in buckets)

    def commit() -> None:
        version[0] += 1
        owner.update_baseline(Version(version[0]))

    changes = changed_items(pairs, Encoding.OVERWRITE)
    names = {item.tensor.name: item for item in changes}
    at = {name: torch.from_numpy(item.flat_indices()) for name, item in names.items()}
    values = {name: tensor_from_words(item.values, DTYPE, (item.count,)) for name, item in names.items()}
    kept = {pair.name: tensor_from_words(pair.old.copy(), DTYPE, (len(pair.old),)) for pair in pairs}

    def index_copy() -> None:
        for name, places in at.items():
            kept[name].index_copy_(0, places, values[name])

    built = best_together({"compare": comparison(pairs), "construct": construct}, settings)
    committed = best_together({"commit": commit, "index_copy": index_copy}, settings)
    share = sum(item.count for item in changes) / sum(len(pair.old) for pair in pairs)
    yield Row("changed elements", share * 100, "%", None, True, GROUP)
    yield Row("compare, encode, zstd, digest", total / built["construct"] / 1e9, "GB/s", 2.0, True, GROUP)
    yield Row("the same over comparison alone", built["compare"] / built["construct"], "x", None, True, GROUP)
    yield Row("commit of the baseline", total / committed["commit"] / 1e9, "GB/s", None, True, GROUP)
    yield Row(
        "commit over index_copy_ of the changes", committed["index_copy"] / committed["commit"], "x", 1.0, True, GROUP
    )
    for row in sizes(pairs, "real step", 1.07):
        yield Row(row.name, row.value, row.unit, row.demand, row.at_least, GROUP)


def real_steps(settings: Settings) -> list[Pair]:
    """Every tensor of the checkpoint before and after the last of `STEPS` steps."""
    with tempfile.TemporaryDirectory() as place:
        directory = settings.checkpoint or smollm2_checkpoint(Path(place) / "checkpoint")
        dist.init_process_group("gloo", init_method=(Path(place) / "meeting").as_uri(), rank=0, world_size=1)
        try:
            trainer = Fsdp2Trainer(directory, 0, 1)
            for _ in range(STEPS - 1):
                trainer.step()
            before = {name: _stored(shard.to_local()) for name, shard in trainer.local_shards()}
            trainer.step()
            return [
                Pair(name, tuple(shard.shape), before[name], _stored(shard.to_local()))
                for name, shard in trainer.local_shards()
            ]
        finally:
            dist.destroy_process_group()


def _stored(local: torch.Tensor) -> Words:
    return copied_words(local.detach().to(torch.bfloat16))
