"""Affine tasks of a parameter whose elements are those of several canonical tensors, by its index map.

Each box of the map becomes one task that reads its own strided part of the local parameter, so that a fused or
interleaved parameter is compared as it lies, and each canonical tensor gets its records without being assembled. A part
that lies in one run is read in place; another one is copied when it is read, one box at a time.
Not handled: projections other than the identity and a cast of the stored values (tensor_reader).

Paper: Section 5 (affine tasks); Appendix A.1   Proofs: affine_destinations   Conditions: SC4, SC5
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nemo_dcr.bits import Words
from nemo_dcr.bits.tensors import dtype_name, integer_view, tensor_from_words
from nemo_dcr.errors import ConditionViolated, UnsupportedMapping
from nemo_dcr.source.pieces import Piece
from nemo_dcr.source.piecewise import IndexMap
from nemo_dcr.source.tasks import AffineTask, Write, served_cast, tensor_reader


def parameter_tasks(index_map: IndexMap, get: Callable[[], Tensor]) -> list[AffineTask]:
    """The affine tasks of one parameter.

    Args:
        index_map: of the local parameter, this rank's shard.
        get: the local parameter; its shape is that of the map. FP32 masters are cast to the dtype of each canonical
            tensor, as it is served.

    Raises: UnsupportedMapping (SC5) when the shape or the dtype is another, or an element is put in twice.
    """
    index_map.check()
    shape = tuple(get().shape)
    if shape != index_map.shape:
        name = ", ".join(tensor.name for tensor in index_map.tensors)
        raise UnsupportedMapping(name, "SC5", f"the parameter has shape {shape}, its map {index_map.shape}")
    held = dtype_name(get().dtype)
    tasks = []
    for piece in index_map.pieces:
        convert = served_cast(held, piece.tensor)
        for part, box in piece.boxes():
            read = tensor_reader(_part(get, index_map, part, box.label), box.label, convert=convert)
            tasks.append(AffineTask.identity(box, read, _writer(get, part, piece.tensor.dtype)))
    return tasks


def _writer(get: Callable[[], Tensor], part: Piece, dtype: str) -> Write:
    """Sets the part to stored words; masters in FP32 become the values that are served."""
    offset, sizes, strides = part.strided()

    def write(stored: Words) -> None:
        whole = get().detach()
        flat = whole.contiguous()
        held = flat.as_strided(sizes, strides, flat.storage_offset() + offset)
        served = tensor_from_words(stored, dtype, sizes)
        if held.dtype == served.dtype:  # as integers, so that every bit arrives
            held, served = integer_view(held), integer_view(served)
        held.copy_(served)
        if flat.data_ptr() != whole.data_ptr():
            whole.copy_(flat)

    return write


def _part(get: Callable[[], Tensor], index_map: IndexMap, part: Piece, key: str) -> Callable[[], Tensor]:
    offset, sizes, strides = part.strided()

    def strided() -> Tensor:
        whole = get().detach()
        if tuple(whole.shape) != index_map.shape:
            detail = f"the parameter is {tuple(whole.shape)}, declared was {index_map.shape}; declare it anew"
            raise ConditionViolated("SC4", key, detail)
        whole = whole.contiguous()
        return whole.as_strided(sizes, strides, whole.storage_offset() + offset)

    return strided
