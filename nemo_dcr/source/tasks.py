"""Conversion tasks: what a rank holds, how its bits are read, and which canonical elements they feed.

An *affine* task reads one box of local words and projects each of them to its own canonical element. A *residual* task
converts inputs into parts of canonical tensors by a rule of the training framework; its inputs are watched one by one,
and names tie them to the outputs that depend on them. `read` returns the stored bits of the local shard, flat and in
row-major order: for FP32 master shards that train a BF16 policy, the BF16 cast of the shard. It must return the same
bits as long as the candidate is frozen. Keys are equal on all replicas of a shard and different otherwise.
A shard whose dtype, shape or length drifts from its declaration fails the attempt; it is never compared.

Paper: Section 5 (tasks, direct projection, residual conversion); Appendix A.1   Conditions: SC1, SC4, SC5, SC6
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from nemo_dcr.bits import Words, unsigned
from nemo_dcr.bits.tensors import copied_words, dtype_name, resident_words, torch_dtype
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.source.projection import Identity, Projection

Read = Callable[[], Words]
"""Returns the stored words of a local shard; the result may alias live weights and is not written to."""
Write = Callable[[Words], None]
"""Sets a local shard to stored words that `Read` returned before, of this shard or of a replica."""


def _checked(words: Words, dtype: str, count: int, key: str, condition: str = "SC4") -> Words:
    if words.dtype != unsigned(dtype) or words.shape != (count,):
        found = f"{words.shape} words of {words.dtype.itemsize} bytes"
        raise ConditionViolated(condition, key, f"{found} were read, {count} elements of {dtype} are declared")
    return words


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AffineTask:
    """Source elements that each feed one canonical element of `map.tensor`.

    Raises: UnsupportedMapping (SC5) when the projection does not end in the tensor's dtype.
    """

    map: BoxMap
    projection: Projection
    read: Read
    write: Write | None = None
    """For a candidate that is given up; None where only the trainer can go back."""

    def __post_init__(self) -> None:
        if self.projection.target != self.tensor.dtype:
            detail = f"the projection gives {self.projection.target}, the tensor is {self.tensor.dtype}"
            raise UnsupportedMapping(self.tensor.name, "SC5", detail)

    @classmethod
    def identity(cls, box: BoxMap, read: Read, write: Write | None = None) -> AffineTask:
        """The task that hands the stored bits of the box through."""
        return cls(map=box, projection=Identity(box.tensor.dtype), read=read, write=write)

    @property
    def tensor(self) -> TensorMeta:
        """The canonical tensor."""
        return self.map.tensor

    @property
    def key(self) -> str:
        """Name of the shard."""
        return self.map.label

    @property
    def nbytes(self) -> int:
        """Bytes of the source shard: what Appendix C counts towards a chunk."""
        return self.map.domain * unsigned(self.projection.source).itemsize

    def words(self) -> Words:
        """The source words of the candidate.

        Raises: ConditionViolated (SC4) when width or length are not the declared ones.
        """
        return _checked(self.read(), self.projection.source, self.map.domain, self.key)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidualInput:
    """One local source shard that a residual task reads."""

    name: str
    """Name that tasks depend on; equal for all shards of one parameter."""
    shard: str
    """Which shard of it; equal on replicas."""
    dtype: str
    count: int
    read: Read

    @property
    def key(self) -> str:
        """Name of the shard."""
        return f"{self.name}#{self.shard}"

    @property
    def nbytes(self) -> int:
        """Bytes of the source shard."""
        return self.count * unsigned(self.dtype).itemsize

    def words(self) -> Words:
        """The source words of the candidate.

        Raises: ConditionViolated (SC4) when width or length are not the declared ones.
        """
        return _checked(self.read(), self.dtype, self.count, self.key)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some elements of one converted canonical tensor: a box and its canonical words in source order.

    Raises: ConditionViolated (SC6) when the words do not fit the box.
    """

    map: BoxMap
    words: Words

    def __post_init__(self) -> None:
        _checked(self.words, self.map.tensor.dtype, self.map.domain, self.map.label, "SC6")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResidualTask:
    """A conversion whose parts are assembled and compared as whole canonical tensors."""

    name: str
    """Equal for all shards of one conversion. Other tasks may depend on it."""
    shard: str
    """Which shard of the conversion; equal on ranks that convert the same parts."""
    outputs: tuple[TensorMeta, ...]
    """Canonical tensors that it converts parts of; empty for a step that only feeds other tasks."""
    depends: tuple[str, ...]
    """Names of the inputs and tasks that it reads: all of them, or a change is missed (SC6)."""
    nbytes: int
    """Rough bytes that a conversion reads; balances replicas."""
    convert: Callable[[TensorMeta], Sequence[Part]]
    """This shard's parts of one output; may be none. Deterministic: the same inputs give the same bits."""

    @property
    def key(self) -> str:
        """Name of the shard of the conversion."""
        return f"{self.name}#{self.shard}"


def served_cast(held: str, tensor: TensorMeta) -> str | None:
    """The dtype that a trainer's stored values are cast to when they are served, or None when they are served as held.

    Only FP32 masters are cast: of any other dtype nobody said so.

    Raises: UnsupportedMapping (SC5).
    """
    if held not in (tensor.dtype, "F32"):
        detail = f"the parameter is {held}, the canonical tensor {tensor.dtype}; declare a task with a Cast projection"
        raise UnsupportedMapping(tensor.name, "SC5", detail)
    return None if held == tensor.dtype else tensor.dtype


def tensor_reader(get: Callable[[], Tensor], key: str, *, convert: str | None = None) -> Read:
    """Read the stored bits of a torch tensor of any strides and device; optionally of its cast to dtype `convert`.

    The dtype and shape of `get()` at this call are its declaration. A contiguous CPU tensor is read in place.
    Raises (the returned function): ConditionViolated (SC4) when dtype or shape differ from the declaration.
    """
    declared = get()
    dtype, shape = declared.dtype, tuple(declared.shape)
    target = dtype if convert is None else torch_dtype(convert)
    dtype_name(target)

    def read() -> Words:
        tensor = get().detach()
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            found, wanted = f"{tuple(tensor.shape)} of {tensor.dtype}", f"{shape} of {dtype}"
            raise ConditionViolated("SC4", key, f"the shard is {found}, declared was {wanted}; declare it anew")
        tensor = tensor.to(target)
        if tensor.is_contiguous() and tensor.device.type == "cpu":
            return resident_words(tensor)
        return copied_words(tensor)

    return read
