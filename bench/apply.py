"""Application of changed elements to resident weights through a native loader, beside the loaders of public projects.

The engine holds experts as vLLM does: one fused parameter for gate and up projections, into whose halves the loader
copies narrow views. All methods get the same changes, decoded and ready to apply, and go through the same loader; each
one's result is compared bit by bit with a dense load. vLLM's patch and verl's loader are the unmodified files of their
wheels: vLLM's without its check for unique indices, verl's without its check sum. The bound is the scatter alone,
without a loader. A second engine of very small tensors shows what an item costs beside the loader's own work.
Not handled: decoding of payloads, devices.

Paper: Section 8 (application); Table A.2
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.clock import best_together
from bench.rows import Row, Rows, Settings
from bench.weights import Pair, experts, nbytes
from nemo_dcr.bits.tensors import copied_words, tensor_from_words
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import Encoding, Item
from nemo_dcr.ids import AttemptId
from nemo_dcr.kernels import placement, placement_fast
from nemo_dcr.receiver.apply import Applier
from nemo_dcr.receiver.prewarm import Checksums, prewarm

GROUP = "apply"
_TINY, _TINY_ITEMS = 2048, 1000
_LOW_RATE = 0.012
_DEMANDS = {"vLLM's patch": (12.0, 8.0), "verl's loader": (9.0, 6.0), "a dense load": (1.0, 1 / 1.3)}
"""Times faster than each, up to 1.2% and above."""


class FusedExperts(torch.nn.Module):
    """Experts of which two share one slot of the parameter, each in its half of the rows."""

    def __init__(self, pairs: list[Pair]) -> None:
        super().__init__()
        self._rows, columns = pairs[0].shape
        fused = torch.zeros(-(-len(pairs) // 2), 2 * self._rows, columns, dtype=torch.bfloat16)
        self.w13 = torch.nn.Parameter(fused, requires_grad=False)
        self._place = {pair.name: divmod(number, 2) for number, pair in enumerate(pairs)}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Copy each expert into its half."""
        for name, tensor in weights:
            slot, half = self._place[name]
            self.w13.data[slot].narrow(0, half * self._rows, self._rows).copy_(tensor)
        return {"w13"}


def rows(settings: Settings) -> Rows:
    """Every rate beside the peers, and the cost of a small item."""
    placement.warm(placement.WORTH_BYTES, {2})
    ours: dict[float, float] = {}
    for rate in settings.rates:
        settings.progress(f"application, {rate:.1%}")
        pairs = experts(settings, rate)
        seconds = best_together(methods(pairs), settings)
        ours[rate] = seconds["this package"]
        changed = sum(int(np.count_nonzero(pair.old != pair.new)) for pair in pairs)
        for name, took in seconds.items():
            yield Row(f"{name}, {rate:.1%}", nbytes(pairs) / took / 1e9, "GB/s", None, True, GROUP)
        yield Row(f"this package, {rate:.1%}", ours[rate] / changed * 1e9, "ns/chg", None, False, GROUP)
        for name, (low, high) in _DEMANDS.items():
            demand = low if rate <= _LOW_RATE else high
            yield Row(f"faster than {name}, {rate:.1%}", seconds[name] / ours[rate], "x", demand, True, GROUP)
    if min(ours) <= 0.006 and max(ours) >= 0.05:
        share = ours[min(ours)] / ours[max(ours)]
        yield Row(f"time at {min(ours):.1%} over time at {max(ours):.1%}", share, "x", 0.5, False, GROUP)
    yield from small_items(settings)


def small_items(settings: Settings) -> Rows:
    """Time of one item of a few changes beside the loader's own work."""
    settings.progress("application of small items")
    words = np.zeros(_TINY, dtype="<u2")
    new = words.copy()
    new[::100] = 1
    pairs = [Pair(f"experts.{number}.w", (16, _TINY // 16), words, new) for number in range(_TINY_ITEMS)]
    seconds = best_together(
        {name: call for name, call in methods(pairs).items() if name in ("this package", "a dense load")}, settings
    )
    each = {name: took / _TINY_ITEMS * 1e6 for name, took in seconds.items()}
    for name, took in each.items():
        yield Row(f"{name}, item of {_TINY} elements", took, "us", None, False, GROUP)
    over = each["this package"] - each["a dense load"]
    yield Row("item over the plain loader", over, "us", 25.0, False, GROUP)


def methods(pairs: list[Pair]) -> dict[str, Callable[[], object]]:
    """A call for each method that applies the changes to a model of its own; each was checked once.

    Raises: RuntimeError when a result differs from a dense load; FileNotFoundError when a peer is not installed.
    """
    made = {
        "this package": _ours(pairs),
        "a dense load": _dense(pairs),
        "vLLM's patch": _vllm(pairs),
        "verl's loader": _verl(pairs),
    }
    dense = _filled(pairs, new=True)
    for name, (model, call) in made.items():
        call()
        if not np.array_equal(copied_words(model.w13), copied_words(dense.w13)):
            raise RuntimeError(f"{name} does not end in the bits of a dense load")
    calls: dict[str, Callable[[], object]] = {name: call for name, (_, call) in made.items()}
    calls["the scatter alone"] = _scatter(pairs)
    return calls


Method = tuple[FusedExperts, Callable[[], object]]


def _filled(pairs: list[Pair], *, new: bool) -> FusedExperts:
    model = FusedExperts(pairs)
    model.load_weights((pair.name, _tensor(pair.new if new else pair.old, pair.shape)) for pair in pairs)
    return model


def _tensor(words: Any, shape: tuple[int, ...]) -> Tensor:
    return tensor_from_words(words, "BF16", shape)


def _changes(pair: Pair) -> Any:
    return np.flatnonzero(pair.old != pair.new).astype(np.int64)


def _ours(pairs: list[Pair]) -> Method:
    model = _filled(pairs, new=False)
    metas = [TensorMeta(pair.name, pair.shape, "BF16") for pair in pairs]
    applier, attempts, items = Applier(model, prewarm(model, metas, keep=Checksums)), count(1), []
    for pair, meta in zip(pairs, metas, strict=True):
        at = _changes(pair)
        items.append(Item.of(meta, Encoding.XOR, at, pair.old[at] ^ pair.new[at]))
    return model, lambda: applier.apply(items, attempt=AttemptId(next(attempts)))


def _dense(pairs: list[Pair]) -> Method:
    model = _filled(pairs, new=False)
    weights = [(pair.name, _tensor(pair.new, pair.shape)) for pair in pairs]
    return model, lambda: model.load_weights(weights)


def _vllm(pairs: list[Pair]) -> Method:
    spec = importlib.util.find_spec("vllm")
    folder = Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else Path("vllm")
    peer = _file(folder / "model_executor/model_loader/checkpoint_weight_patch.py", "make setup-vllm")
    model, patches = _filled(pairs, new=False), []
    for pair in pairs:
        at = _changes(pair)
        values = _tensor(pair.new[at], (len(at),))
        patches.append(peer.CheckpointWeightPatch(pair.name, pair.shape, torch.bfloat16, values, torch.from_numpy(at)))
    return model, lambda: peer.load_checkpoint_weight_patches(model, patches, validate_unique_indices=False)


def _verl(pairs: list[Pair]) -> Method:
    folder = Path(sys.prefix) / "peers/verl/workers/rollout/sglang_rollout"
    peer = _file(folder / "delta_loader.py", "make setup-peers")
    model, positions, values, manifest = _filled(pairs, new=False), [], [], []
    place = 0
    for pair in pairs:
        at = _changes(pair)
        positions.append(torch.from_numpy(at.astype("<i4")).view(torch.uint8))
        values.append(_tensor(pair.new[at], (len(at),)))
        end = place + len(at)
        manifest.append(
            {
                "name": pair.name,
                "dtype": "bfloat16",
                "shape": list(pair.shape),
                "pos_start": 4 * place,
                "pos_end": 4 * end,
                "val_start": place,
                "val_end": end,
            }
        )
        place = end
    all_positions, all_values = torch.cat(positions), torch.cat(values)

    def call() -> None:
        # As in its apply_delta; one chunk, since all tensors together are below its limit.
        with peer._masked_copy():
            model.load_weights(
                [
                    (str(entry["name"]), peer._decode_one("indices", all_positions, all_values, entry))
                    for entry in manifest
                ]
            )

    return model, call


def _scatter(pairs: list[Pair]) -> Callable[[], object]:
    model = _filled(pairs, new=False)
    words = model.w13.data.view(torch.int16).flatten().numpy().view("<u2")
    length = pairs[0].old.size
    entries = [(at, pair.old[at] ^ pair.new[at]) for pair in pairs for at in [_changes(pair)]]

    def call() -> None:
        for number, (at, masks) in enumerate(entries):
            placement_fast.xor_block(words, number * length, at, 0, length, masks)

    return call


def _file(path: Path, how: str) -> Any:
    """One file of a peer, alone: the package around it imports what is not installed here."""
    spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is missing; run {how}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
