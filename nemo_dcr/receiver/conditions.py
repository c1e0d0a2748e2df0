"""The loader conditions of Table A.2, one class for each row.

An instance holds the facts that the row judges; `check` returns None, or says in one sentence what is wrong. A row that
is broken at prewarm makes the path unsupported, before any live write; a row that is broken at a copy fails the attempt
before that copy executes. What each row cannot see is said in its docstring.

Paper: Section 6.1 (loader conditions); Table A.2   Proofs: L4 xor_reconstructs, L5 inactive_unchanged
Conditions: LC1-LC12
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from enum import Flag, auto
from typing import ClassVar

from nemo_dcr.errors import ConditionViolated


class When(Flag):
    """When a row is checked."""

    PREWARM = auto()
    EVERY_COPY = auto()


class Condition(ABC):
    """One row. Subclasses are frozen dataclasses of facts."""

    code: ClassVar[str]
    paper: ClassVar[str]
    """The row in our words."""
    when: ClassVar[When]

    @abstractmethod
    def check(self) -> str | None:
        """What is wrong, or None."""

    def require(self, tensor: str) -> None:
        """Enforce the row at run time.

        Raises: ConditionViolated with this row's code.
        """
        wrong = self.check()
        if wrong is not None:
            raise ConditionViolated(self.code, tensor, wrong)


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken row of one loader path."""

    code: str
    detail: str


def first_breach(*rows: Condition) -> Breach | None:
    """The first row, in order, that does not hold."""
    for row in rows:
        wrong = row.check()
        if wrong is not None:
            return Breach(row.code, wrong)
    return None


@dataclass(frozen=True, slots=True)
class InterceptedWrites(Condition):
    """LC1. A write that torch does not dispatch on this thread is seen by the bits that it changes, after the fact.

    At prewarm all live storage is compared with what it held before, and put back. An unseen write that changes
    nothing then, and one that comes only later, are not seen; see LC2 and LC9 for what shows them.
    """

    code = "LC1"
    paper = "every write into resident storage is an intercepted copy, or a write proved constant and harmless"
    when = When.PREWARM | When.EVERY_COPY

    operator: str = ""
    """The operator that writes; empty if none does."""
    constant: bool = False
    """It writes a value that depends on nothing."""
    bits_present: bool = False
    """The resident bits already are that value."""
    overlaps: str = ""
    """A name whose copies share a byte with the write; empty if none."""
    escape: str = ""
    """A function of a tensor that hands out its memory; empty if none was called."""
    unseen: Collection[str] = ()
    """Resident names that were written without an operator on this thread."""
    running: Collection[str] = ()
    """Threads that began during the load and outlive it."""

    def check(self) -> str | None:
        """Only a constant write of bits that are there already, away from all copies, may pass."""
        if self.escape:
            return f"Tensor.{self.escape} hands out memory that can be written unseen; use copy_ from the given tensor"
        if self.unseen:
            return (
                f"resident {', '.join(sorted(self.unseen)[:4])} was written where no operator of the loading thread "
                "shows it (an array, an address, another thread) and was put back; use copy_ from the given tensor"
            )
        if self.running:
            return (
                f"threads that began during prewarm still run and could write unseen: "
                f"{', '.join(sorted(self.running)[:4])}; end them inside load_weights, or start them before prewarm"
            )
        if not self.operator:
            return None
        if not self.constant:
            return f"{self.operator} writes resident storage and is not a copy; write it as copy_ from the given tensor"
        if self.overlaps:
            return f"{self.operator} overwrites bytes that {self.overlaps!r} copies to"
        if not self.bits_present:
            return f"{self.operator} writes a constant that resident storage does not hold; load the engine first"
        return None


@dataclass(frozen=True, slots=True)
class ReportedAsCopied(Condition):
    """LC2. A loader that reports nothing is judged by its copies alone."""

    code = "LC2"
    paper = "the names that the loader reports as loaded match the intercepted copies, name by name"
    when = When.PREWARM | When.EVERY_COPY

    not_copied: Collection[str] = ()
    """Reported resident names without an intercepted copy."""
    not_reported: Collection[str] = ()
    """Names with an intercepted copy that the report leaves out."""
    other: str = ""
    """Any other difference between what was announced and what was seen."""

    def check(self) -> str | None:
        """Both lists are empty."""
        if self.not_copied:
            return f"reported as loaded without an intercepted copy: {', '.join(sorted(self.not_copied)[:4])}"
        if self.not_reported:
            return f"copied but not reported as loaded: {', '.join(sorted(self.not_reported)[:4])}"
        return self.other or None


@dataclass(frozen=True, slots=True)
class TakenSomewhere(Condition):
    """LC3. Judged on the union of all ranks; a rank without a copy is a native skip once LC2 holds there."""

    code = "LC3"
    paper = "an item without a copy is a native skip on that rank, and some rank takes every tensor"
    when = When.PREWARM

    receivers: int
    takers: int

    def check(self) -> str | None:
        """At least one receiver copies the tensor."""
        return None if self.takers else f"none of {self.receivers} receivers takes it; remove it from the export"


@dataclass(frozen=True, slots=True)
class Elementwise(Condition):
    """LC4. Dependence is probed with a bounded number of patterns, so a rare dependence on a value can hide."""

    code = "LC4"
    paper = "each output element comes from one canonical element, independently and deterministically"
    when = When.PREWARM | When.EVERY_COPY

    deterministic: bool = True
    independent: bool = True
    """Changing one canonical element changes its own outputs and no others."""
    foreign_read: str = ""
    """A resident name that the value is computed from besides the canonical tensor."""
    other: str = ""

    def check(self) -> str | None:
        """No other element, tensor, state or chance has a part in an output."""
        if self.foreign_read:
            return f"the loaded value also depends on resident {self.foreign_read!r}"
        if not self.deterministic:
            return "two loads of the same tensor gave different bits or different copies"
        if not self.independent:
            return "an output depends on more than one canonical element"
        return self.other or None


@dataclass(frozen=True, slots=True)
class BitsPreserved(Condition):
    """LC5. Decides between XOR and overwrite at prewarm; an edit of the scratch itself is not supported.

    The one exception erases it: a fill of the whole tensor before anything is copied from it makes the path a constant,
    so that the rank skips the tensor.
    """

    code = "LC5"
    paper = "XOR: the copy's source shares storage with the scratch, has the same dtype, and its bits are unchanged"
    when = When.PREWARM | When.EVERY_COPY

    shares_scratch: bool = True
    same_dtype: bool = True
    edited_by: str = ""
    """An operator that writes into the tensor that the loader was given."""

    def check(self) -> str | None:
        """The masks arrive at the copy as they left the scratch."""
        if self.edited_by:
            return f"{self.edited_by} edits the given tensor in place; work on a copy of it"
        if not self.shares_scratch:
            return "the copy's source does not share storage with the scratch"
        if not self.same_dtype:
            return "the copy casts"
        return None


@dataclass(frozen=True, slots=True)
class DisjointXor(Condition):
    """LC6. Across the items of one `apply` call always; across calls of an attempt when its id is given."""

    code = "LC6"
    paper = "XOR byte ranges are disjoint from all other writes of the attempt, also across items"
    when = When.PREWARM | When.EVERY_COPY

    repeated: int = 0
    """Canonical elements that this attempt already changed."""
    partner: str = ""
    """A name whose copies share bytes with this path."""

    def check(self) -> str | None:
        """No byte is changed twice."""
        if self.partner:
            return f"its copies share bytes with copies of {self.partner!r}"
        return f"{self.repeated} elements come twice in one attempt" if self.repeated else None


@dataclass(frozen=True, slots=True)
class OverlapAgrees(Condition):
    """LC7. Copies in sequence into one view are composed (LC8); any other overlap could differ from a dense refit."""

    code = "LC7"
    paper = "overlapping overwrites yield the bits of a dense refit"
    when = When.PREWARM

    partner: str = ""
    """Canonical name of the other copy; may be the name itself."""

    def check(self) -> str | None:
        """No two different views share bytes."""
        if not self.partner:
            return None
        return f"its copies share bytes with copies of {self.partner!r}, and the last one to load would win; export one"


@dataclass(frozen=True, slots=True)
class DistinctPlaceholder(Condition):
    """LC8. A free bit pattern tells positions apart in one pass; two passes with two placeholders do it otherwise."""

    code = "LC8"
    paper = "overwrite: active positions are told apart at the first copy into each view, and later copies reuse them"
    when = When.PREWARM | When.EVERY_COPY

    first_from_resident: bool = False
    """The first copy into a view has a source computed from resident storage."""
    separable: bool = True
    """Some pair of placeholders gives different bits at every output."""
    scratch_ok: bool = True
    """The source at the copy is the one that prewarm saw."""

    def check(self) -> str | None:
        """The mask is defined by the item alone."""
        if self.first_from_resident:
            return "the first copy into a view takes its value from resident storage"
        if not self.separable:
            return "no two placeholders give different bits at every output of the path"
        return None if self.scratch_ok else "the copy's source is not the one that prewarm saw"


@dataclass(frozen=True, slots=True)
class StableTargets(Condition):
    """LC9. Checked for every parameter and buffer around each application."""

    code = "LC9"
    paper = "targets keep storage, pointer, shape, stride and dtype since prewarm"
    when = When.PREWARM | When.EVERY_COPY

    moved: Collection[str] = ()
    other: str = ""

    def check(self) -> str | None:
        """Nothing moved."""
        if self.moved:
            return f"moved or replaced: {', '.join(sorted(self.moved)[:4])}; captured graphs would read the old place"
        return self.other or None


@dataclass(frozen=True, slots=True)
class NothingDerived(Condition):
    """LC10. Sees resident tensors that hold the same words as a loaded one in any order, and no path writes.

    A tensor that is derived by arithmetic or from a part of a loaded one cannot be told from a constant table;
    `LoaderTable.unwritten` lists all that no path writes, for the integration to judge.
    """

    code = "LC10"
    paper = "nothing else is derived from resident parameters, or an alias proves that it follows"
    when = When.PREWARM

    derived: Collection[str] = ()

    def check(self) -> str | None:
        """No unwritten resident tensor is a rearranged copy of this one."""
        if not self.derived:
            return None
        return f"{', '.join(sorted(self.derived)[:4])} holds a copy of its values that no load would update"


@dataclass(frozen=True, slots=True)
class ConsumedInOrder(Condition):
    """LC11. A loader that looks ahead gets one call for each item, so that the scratch is never reused under it."""

    code = "LC11"
    paper = "the loader consumes a yielded tensor before the next one reuses the scratch"
    when = When.PREWARM | When.EVERY_COPY

    current: str = ""
    late: str = ""
    """The name whose copy came while another one was current."""

    def check(self) -> str | None:
        """A copy belongs to the tensor that was yielded last."""
        return f"{self.late!r} is copied after {self.current!r} was taken" if self.late else None


@dataclass(frozen=True, slots=True)
class NoStateAcrossCalls(Condition):
    """LC12. State that changes neither the copies nor their sources is not seen and does no harm."""

    code = "LC12"
    paper = "no loader state spans calls, or the items that it ties together travel in one call"
    when = When.PREWARM | When.EVERY_COPY

    tied_to: Collection[str] = ()
    """Other canonical names without which this one is not written as in a joint load."""
    outside: str = ""
    """An operator that writes a tensor which is neither resident nor made in this call."""
    order: bool = False
    """The copies depend on the order or the grouping of the load."""

    def check(self) -> str | None:
        """Each tensor alone is loaded as it is among all others."""
        if self.outside:
            return f"{self.outside} writes a tensor that outlives the call and is no parameter or buffer"
        if self.tied_to:
            return f"it is loaded only together with {', '.join(sorted(self.tied_to)[:4])}"
        return "its copies depend on the order or the grouping of the load" if self.order else None


CONDITIONS: tuple[type[Condition], ...] = (
    InterceptedWrites,
    ReportedAsCopied,
    TakenSomewhere,
    Elementwise,
    BitsPreserved,
    DisjointXor,
    OverlapAgrees,
    DistinctPlaceholder,
    StableTargets,
    NothingDerived,
    ConsumedInOrder,
    NoStateAcrossCalls,
)
"""Table A.2 in order."""
