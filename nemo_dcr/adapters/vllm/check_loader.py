"""What vLLM's loader would do with a model: prewarm on empty ranks of any layout, from a configuration alone.

Every rank of the layout is built in this process, one after another, with the model's own sizes; nothing is downloaded
and no weight is read. Constant writes (zeroed pad rows) are compared with zeroed storage. What happens to weights after
loading, and whether an engine fits into memory, is found out when the engine starts.
Not handled: weights that other weights of the checkpoint decide on (re-tied embeddings).

Paper: Section 6.1 (prewarm), Figure A.8   Conditions: LC1-LC12
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_dcr.adapters.vllm.checkpoint_table import table_of_directory
from nemo_dcr.adapters.vllm.forged import ForgedModel, Place
from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import OperatorNeeded, UnsupportedLoaderPath
from nemo_dcr.receiver.live_storage import Checksums
from nemo_dcr.receiver.paths import LoaderPath, unite_tables
from nemo_dcr.receiver.prewarm import prewarm
from nemo_dcr.receiver.residents import storage_bytes
from nemo_dcr.receiver.summary import KindRow, class_bytes, rows_of


@dataclass(frozen=True)
class LoaderCheck:
    """The loader paths of all ranks of one layout."""

    layout: str
    served_by: str
    """vLLM's class."""
    ranks: int
    tensors: int
    rows: list[KindRow]
    shares: dict[PathClass, float]
    """Of the canonical bytes, each rank counted."""
    refused: str
    """Why a coordinator would refuse the layout; empty when it would not."""


def check_loader(directory: Path, *, tp: int = 1, ep: int = 1, dtype: str = "auto") -> LoaderCheck:
    """Prewarm every rank of a layout of the model in `directory`.

    Raises: InvalidConfig for a directory without a usable configuration; OperatorNeeded when vLLM cannot build or load
    the model; ValueError for a layout that vLLM does not have.
    """
    tensors = table_of_directory(directory)
    places = Place.of(tp, ep)
    paths: dict[str, Mapping[str, LoaderPath]] = {}
    served_by = ""
    for rank, place in enumerate(places):
        try:
            model = ForgedModel(directory, place, dtype=dtype)
        except Exception as problem:
            lines = str(problem).splitlines() or [""]
            raise OperatorNeeded(
                f"vLLM cannot build {directory} as {place.layout}: {type(problem).__name__}: {lines[0]}",
                "choose another layout, or a model that this vLLM has",
            ) from problem
        served_by = type(model.module).__name__
        paths[str(rank)] = _paths(model, tensors)
    shares = class_bytes(paths.values())
    whole = sum(shares.values()) or 1
    return LoaderCheck(
        layout=places[0].layout,
        served_by=served_by,
        ranks=len(places),
        tensors=len(tensors),
        rows=rows_of(paths.values()),
        shares={path_class: nbytes / whole for path_class, nbytes in shares.items()},
        refused=_refusal(paths),
    )


def _paths(model: ForgedModel, tensors: Sequence[TensorMeta]) -> Mapping[str, LoaderPath]:
    for _, tensor in model.named_parameters(remove_duplicate=False):
        storage = storage_bytes(tensor.detach())
        # Fresh memory is zero and takes no room until it is written; only used memory has to be cleared.
        if bool(storage.any()):
            storage.zero_()
    # Nothing is served from this rank, so that a change which is noticed need not be undone.
    return prewarm(model, tensors, keep=Checksums).paths


def _refusal(paths: Mapping[str, Mapping[str, LoaderPath]]) -> str:
    classes = {rank: {name: path.path_class for name, path in found.items()} for rank, found in paths.items()}
    reasons = {
        rank: {name: (path.breach.code, path.breach.detail) for name, path in found.items() if path.breach}
        for rank, found in paths.items()
    }
    try:
        unite_tables(classes, reasons)
    except UnsupportedLoaderPath as refusal:
        return str(refusal)
    return ""
