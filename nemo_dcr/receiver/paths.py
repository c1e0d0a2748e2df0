"""Loader paths: what prewarm found for each canonical name on one rank, and the union over ranks.

A path is the ordered list of writes that the native loader makes for one name. The same list has to come again at every
application; anything else fails the attempt before it is written. The class of a path goes to the coordinator, which
unites the ranks: one rank that needs overwrites makes the name overwrite-only everywhere, one rank that cannot take a
name refuses it, and a name that no rank takes is refused too.

Paper: Section 6.1 (loader path); Figure A.8; Table A.2   Proofs: L4 xor_reconstructs   Conditions: LC3, LC5
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.codec.records import PathClass, unite
from nemo_dcr.errors import UnsupportedLoaderPath
from nemo_dcr.ids import ReceiverId
from nemo_dcr.receiver.conditions import Breach, TakenSomewhere
from nemo_dcr.receiver.residents import Residents
from nemo_dcr.receiver.scratch import Scratch
from nemo_dcr.receiver.views import View


class StepKind(StrEnum):
    """How a write of a path gets its value."""

    DIRECT = "direct"
    """A copy whose source is a view of the scratch."""
    DERIVED = "derived"
    """A copy whose source was computed from the scratch, or from a resident view that this path already wrote."""
    CONSTANT = "constant"
    """A fill, or a copy of a value that depends on nothing: checked against the resident bits, never executed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One write of a loader path."""

    kind: StepKind
    target: View
    """Resident elements that are written."""
    source: View | None
    """Canonical elements of a DIRECT step, in the same order as the target."""
    repeats: bool
    """An earlier step of the path wrote the same view (a composed loader): its mask serves this step too."""


@dataclass(frozen=True, slots=True)
class LoaderPath:
    """Everything that one rank knows about one canonical name."""

    tensor: TensorMeta
    path_class: PathClass
    steps: tuple[Step, ...] = ()
    copies: int = 0
    covered: int = 0
    """Canonical elements that this rank takes; for a derived path the outputs that depend on the tensor."""
    by_index: int | None = None
    """Where every copy has an index map: elements that the copies take, one that two copies take counted twice."""
    consumed_before_next: bool = True
    """The loader may be given another tensor of the same call afterwards (LC11)."""
    two_pass: bool = False
    """An overwrite needs two passes: some mask cannot be read off the scratch."""
    placeholders: tuple[int, int] | None = None
    """Two words that the path maps to different bits at every output; probed, for paths with a derived step."""
    constant_at: Mapping[int, Tensor] = field(default_factory=dict)
    """By step number: flat mask of the outputs of a derived copy that depend on nothing (padding)."""
    breach: Breach | None = None
    """Why the path is unsupported."""


class LoaderTable:
    """The loader paths of one rank, and the scratch that was reserved for them."""

    def __init__(
        self, paths: Mapping[str, LoaderPath], residents: Residents, *, grouped: bool, unwritten: tuple[str, ...]
    ) -> None:
        self.paths = dict(paths)
        self.residents = residents
        self.grouped = grouped
        """Several names may travel in one `load_weights` call (LC11); otherwise each item gets a call."""
        self.unwritten = unwritten
        """Resident names that no path writes: constant tables, or tensors derived from weights (LC10)."""
        self.shadow_bytes = 0
        """Extra memory of the largest shadow that prewarm made."""
        self.scratch = Scratch(max((path.tensor.nbytes for path in paths.values()), default=0))

    @property
    def classes(self) -> dict[str, PathClass]:
        """Class of each name, as the coordinator needs it."""
        return {name: path.path_class for name, path in self.paths.items()}

    @property
    def reasons(self) -> dict[str, tuple[str, str]]:
        """(condition code, detail) of each unsupported name."""
        return {name: (path.breach.code, path.breach.detail) for name, path in self.paths.items() if path.breach}

    @property
    def skipped(self) -> frozenset[str]:
        """Names that this rank takes nothing of; their items need not be decoded."""
        return frozenset(name for name, path in self.paths.items() if path.path_class is PathClass.SKIPPED)

    def refuse(self, breach: Breach) -> None:
        """Make every path unsupported for one reason that concerns the loader as a whole."""
        self.paths = {
            name: LoaderPath(
                path.tensor, PathClass.UNSUPPORTED, breach=breach, consumed_before_next=path.consumed_before_next
            )
            for name, path in self.paths.items()
        }

    def check(self) -> None:
        """Refuse the table when a path is unsupported.

        Raises: UnsupportedLoaderPath for the first such name.
        """
        for name, (code, detail) in sorted(self.reasons.items()):
            raise UnsupportedLoaderPath(name, code, detail)


def unite_tables(
    tables: Mapping[ReceiverId, Mapping[str, PathClass]] | Mapping[str, Mapping[str, PathClass]],
    reasons: Mapping[str, Mapping[str, tuple[str, str]]] | None = None,
) -> dict[str, PathClass]:
    """The class of every name over all receivers; `reasons` (`LoaderTable.reasons` by receiver) makes errors precise.

    Raises: UnsupportedLoaderPath when a receiver cannot take a name, does not know it, or no receiver takes it (LC3).
    """
    names = sorted({name for table in tables.values() for name in table})
    # Broken conditions first: a name that nobody takes may be the consequence of one.
    for name in names:
        for receiver, table in tables.items():
            if name not in table:
                raise UnsupportedLoaderPath(
                    name,
                    "LC3",
                    f"receiver {receiver} was not prewarmed with it; prewarm all ranks with one tensor table",
                )
            if table[name] is PathClass.UNSUPPORTED:
                code, detail = (reasons or {}).get(str(receiver), {}).get(name, ("LC1-LC12", "see its loader table"))
                raise UnsupportedLoaderPath(name, code, f"receiver {receiver}: {detail}")
    united: dict[str, PathClass] = {}
    for name in names:
        found = [table[name] for table in tables.values()]
        united[name] = unite(found)
        takers = sum(path_class is not PathClass.SKIPPED for path_class in found)
        wrong = TakenSomewhere(receivers=len(found), takers=takers).check()
        if wrong is not None:
            raise UnsupportedLoaderPath(name, TakenSomewhere.code, wrong)
    return united
