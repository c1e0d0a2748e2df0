"""Loader paths in words: what the native loader does with each kind of tensor, for people and for generated pages.

Tensors whose names differ only in numbers between dots are one kind. A kind has a row for each class and way of
loading that occurs among its tensors on the ranks that are summed up.

Paper: Section 6.1 (loader path); Figure A.8   Conditions: LC1-LC12
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nemo_dcr.codec.records import PathClass
from nemo_dcr.receiver.paths import LoaderPath, StepKind

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def kind_of(name: str) -> str:
    """The tensor's name with N for every number between dots."""
    return _NUMBER.sub("N", name)


def way_of(path: LoaderPath) -> str:
    """How the loader writes the tensor, in a few words."""
    if path.breach is not None:
        return f"refused ({path.breach.code}): {path.breach.detail}"
    if path.path_class is PathClass.SKIPPED:
        return "not taken"
    copies = [step for step in path.steps if step.kind is not StepKind.CONSTANT]
    firsts = [step for step in copies if not step.repeats]
    words = ["1 copy" if len(firsts) == 1 else f"{len(firsts)} copies"]
    if any(step.kind is StepKind.DERIVED for step in firsts):
        words.append("computed")
    casts = sorted({step.target.dtype for step in firsts} - {path.tensor.dtype})
    if casts:
        words.append(f"cast from {path.tensor.dtype} to {' and '.join(casts)}")
    if len(copies) > len(firsts):
        words.append("composed: a later copy works on the first one's values")
    if len(path.steps) > len(copies):
        words.append("pad rows stay zero")
    return ", ".join(words)


@dataclass(frozen=True, order=True, slots=True)
class KindRow:
    """Tensors of one kind that load in one way."""

    kind: str
    path_class: PathClass
    way: str


def rows_of(ranks: Iterable[Mapping[str, LoaderPath]]) -> list[KindRow]:
    """Every (kind, class, way) of the paths of some ranks, sorted."""
    return sorted(
        {KindRow(kind_of(name), path.path_class, way_of(path)) for paths in ranks for name, path in paths.items()}
    )


def class_bytes(ranks: Iterable[Mapping[str, LoaderPath]]) -> dict[PathClass, int]:
    """Canonical bytes of each class, over the paths of some ranks."""
    shares = dict.fromkeys(PathClass, 0)
    for paths in ranks:
        for path in paths.values():
            shares[path.path_class] += path.tensor.nbytes
    return shares
