"""What happens to weights between the native load and serving: found out by watching it, never assumed.

vLLM may repack, pad, requantise or copy parameters once they are loaded. A refit writes parameters through the loader
and runs no such step again, so that whatever the step made of a weight would go stale, or be overwritten in another
layout. The watch runs around the step. It sees every operator, and remembers which new tensors were made from
resident ones. Afterwards it walks over all that the model reaches: a parameter that is gone, empty, in another shape,
has other bits, or shares the storage of another one, is refused, and so is a reachable tensor that was made from a
parameter and lies elsewhere. A view of a parameter lies in its storage and follows by itself: the proof by alias.
A parameter that native code turns into a handle (an operator of its own that returns a number) is refused as well.
Not handled: native code that is called past torch's dispatcher.

Paper: Section 6.1 (resident layout); Table A.2   Conditions: LC9, LC10
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dcr.errors import UnsupportedLoaderPath
from nemo_dcr.receiver.conditions import NothingDerived, StableTargets
from nemo_dcr.receiver.escapes import leaves_torch
from nemo_dcr.receiver.hook import operator_of, tensors_in
from nemo_dcr.receiver.live_storage import checksum
from nemo_dcr.receiver.observe import SHAPE_ONLY_NAMES
from nemo_dcr.receiver.provenance import NOTHING, Origins
from nemo_dcr.receiver.residents import NativeModel, Residents, storage_bytes, storage_key, weak_storage


@dataclass(frozen=True, slots=True)
class Transform:
    """One thing that a refit would not keep true."""

    code: str
    """The broken row of Table A.2."""
    name: str
    """Resident name, or the attribute path of a derived tensor."""
    reason: str


@dataclass(frozen=True, slots=True)
class _Before:
    place: tuple[Any, ...]
    storage: Any
    """A weak reference, so that the identity is not used again."""
    key: int
    sum: int
    loader: bool


class TransformWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active while the step runs; `transforms` tells afterwards what it did."""

    def __init__(self, model: NativeModel) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._residents = Residents(model)
        self._origins = Origins(self._residents)
        self._before = {
            name: _Before(
                _place(tensor),
                weak_storage(tensor),
                storage_key(tensor),
                _sum(tensor),
                hasattr(tensor, "weight_loader"),
            )
            for name, tensor in _named(model)
        }
        self._handed: dict[int, str] = {}
        """Operator by resident storage (as an origin): native code was given it and returned a handle."""

    def __torch_dispatch__(
        self, func: Any, kinds: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch for every operator of the step."""
        kwargs = kwargs or {}
        operator = operator_of(func)
        inputs = [*tensors_in(list(args)), *tensors_in(list(kwargs.values()))]
        origins = NOTHING if func._schema.name in SHAPE_ONLY_NAMES else self._origins.of(inputs)
        result = func(*args, **kwargs)
        if operator.is_view:
            return result
        if leaves_torch(result) and not operator.name.startswith(("aten.", "prims.")):
            self._handed |= {number: operator.name for number in origins if number < 0}
        for tensor in operator.written(args, kwargs):
            if self._residents.number_of(tensor) is None:
                self._origins.add(tensor, origins)
        for made in tensors_in(result):
            if self._residents.number_of(made) is None and storage_key(made):
                self._origins.add(made, origins)
        return result

    def transforms(self) -> list[Transform]:
        """Every parameter that is not what was loaded, and every reachable tensor that was made from one."""
        now = dict(_named(self._model))
        found = [
            Transform(StableTargets.code, name, reason)
            for name, before in self._before.items()
            if (reason := self._change(before, now.get(name)) or self._shared(before, now[name]))
        ]
        seen = {storage_key(now[name]) for name in self._before.keys() & now.keys()}
        made = [(name, tensor) for name, tensor in now.items() if name not in self._before]
        for path, tensor in [*made, *reachable_tensors(self._model)]:
            key = storage_key(tensor)
            if not key or key in seen or tensor.numel() == 0 or self._residents.number_of(tensor) is not None:
                continue
            seen.add(key)
            origins = self._origins.get(tensor) or frozenset()
            sources = sorted({self._residents.names[-1 - number][0] for number in origins if number < 0})
            if sources:
                reason = f"made from {', '.join(sources[:3])} after loading, in memory of its own that no refit updates"
                found.append(Transform(NothingDerived.code, path, reason))
        for number, operator in self._handed.items():
            reason = f"given to {operator} after loading, which keeps what no refit updates"
            found.append(Transform(NothingDerived.code, self._residents.names[-1 - number][0], reason))
        return sorted(found, key=lambda entry: entry.name)

    def _change(self, before: _Before, now: Tensor | None) -> str:
        """What is different about a resident tensor; empty when a load would do what it did before."""
        if now is None:
            return "it is gone after loading; the engine keeps something else"
        if now.numel() == 0 and 0 not in before.place[0]:
            return "it was emptied after loading; the engine computes with a packed copy"
        if _place(now) != before.place:
            return f"it was {_told(before.place)} and is {_told(_place(now))} after loading"
        if _sum(now) != before.sum:
            return "its bits were rearranged or changed after loading"
        if before.loader and not hasattr(now, "weight_loader"):
            return "it was replaced after loading by a tensor that has no loader"
        return ""

    def _shared(self, before: _Before, now: Tensor) -> str:
        """Whether a resident tensor lies in the storage of another one now; empty when it does not."""
        if (key := storage_key(now)) != before.key:
            for name, other in self._before.items():
                if other.key == key:
                    return (
                        f"it shares the storage of {name} since it was loaded, and a later version may tell them apart"
                    )
        return ""


def require_loader_layout(found: Sequence[Transform]) -> None:
    """Refuse the engine for the first transform.

    Raises: UnsupportedLoaderPath with the name and the reason.
    """
    for transform in found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UnsupportedLoaderPath(transform.name, transform.code, transform.reason + more)


_REPORT = "_nemo_dcr_transforms"


def transforms_of(model: Any) -> list[Transform] | None:
    """What the watch of `watching` found for this model; None when no watch saw it."""
    found: list[Transform] | None = getattr(model, _REPORT, None)
    return found


def watching(process: Callable[..., None]) -> Callable[..., None]:
    """vLLM's post-load step under the watch; the findings stay with the model for `transforms_of`."""

    @functools.wraps(process)
    def watched(model: Any, *args: Any, **kwargs: Any) -> None:
        with watch(model) as seen:
            process(model, *args, **kwargs)
        object.__setattr__(model, _REPORT, seen.transforms())

    return watched


@contextmanager
def watch(model: NativeModel) -> Iterator[TransformWatch]:
    """The watch around a step that the caller runs."""
    seen = TransformWatch(model)
    with seen:
        yield seen


def reachable_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the model holds: parameters, buffers, attributes, containers, helper objects, closures."""
    seen: set[int] = set()
    held: list[Any] = []
    stack: list[tuple[str, Any]] = [("", getattr(model, "module", model))]
    while stack:
        path, value = stack.pop()
        if id(value) in seen or isinstance(value, type | types.ModuleType | str | bytes | int | float):
            continue
        seen.add(id(value))
        held.append(value)
        if isinstance(value, Tensor):
            yield path, value
            continue
        stack += [(f"{path}.{key}" if path else key, entry) for key, entry in _parts(value)]


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), entry) for key, entry in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(number), entry) for number, entry in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
        yield "function", value.__func__
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if _is_set(cell))
    elif isinstance(value, torch.nn.Module):
        for group in ("_parameters", "_buffers", "_modules"):
            yield from ((key, entry) for key, entry in vars(value)[group].items() if entry is not None)
        yield from ((key, entry) for key, entry in vars(value).items() if not key.startswith("_") or _holds(entry))
    elif hasattr(value, "__dict__") and not isinstance(value, types.BuiltinFunctionType):
        yield from vars(value).items()


def _is_set(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _holds(entry: Any) -> bool:
    """A private attribute that may hold tensors; torch's own bookkeeping of hooks does not."""
    return isinstance(entry, Tensor | list | tuple | types.FunctionType | functools.partial)


def _named(model: NativeModel) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _told(place: tuple[Any, ...]) -> str:
    shape, stride, dtype = place
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} with strides {list(stride)}"


def _sum(tensor: Tensor) -> int:
    """A checksum of the tensor's own words in row-major order, wherever they lie."""
    if tensor.numel() == 0 or tensor.is_meta:
        return 0
    whole = (
        tensor if tensor.is_contiguous() and tensor.numel() == len(storage_bytes(tensor)) // tensor.itemsize else None
    )
    return checksum(storage_bytes(tensor if whole is not None else tensor.detach().contiguous().clone()))
