"""The geometry table of all ranks and what follows from it: owners, coverage, dependencies.

Each rank writes one row for each shard that it holds, from shapes and placements alone. The rows are exchanged once,
before the first transition; then every rank computes the same plan and refuses the same faults: a canonical element
without an owner or with two, a tensor that is affine here and residual there, or one that ranks describe differently.
Replicas are ranks with the same key. Coverage of residual tensors is checked where their parts are assembled.

Paper: Section 5 (fixed shard geometry); Appendix A.1   Proofs: one_owner   Conditions: SC1, SC2
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.ids import OwnerId
from nemo_dcr.source.maps import BoxMap, overlapping
from nemo_dcr.source.ownership import Shard, assign_owners
from nemo_dcr.source.tasks import AffineTask, ResidualInput, ResidualTask


class ShardKind(StrEnum):
    """What a row describes."""

    AFFINE = "affine"
    INPUT = "input"
    RESIDUAL = "residual"


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard on one rank. Plain data: it travels as MessagePack."""

    rank: OwnerId
    kind: ShardKind
    key: str
    name: str
    """Canonical name of an affine shard; name of an input or of a residual task."""
    nbytes: int
    box: BoxMap | None = None
    """Affine shards only."""
    outputs: tuple[TensorMeta, ...] = ()
    """Residual tasks only."""
    depends: tuple[str, ...] = ()
    """Residual tasks only."""


def affine_row(rank: OwnerId, task: AffineTask) -> ShardRow:
    """The row of an affine task."""
    return ShardRow(rank, ShardKind.AFFINE, task.key, task.tensor.name, task.nbytes, task.map)


def input_row(rank: OwnerId, watched: ResidualInput) -> ShardRow:
    """The row of a residual input."""
    return ShardRow(rank, ShardKind.INPUT, watched.key, watched.name, watched.nbytes)


def residual_row(rank: OwnerId, task: ResidualTask) -> ShardRow:
    """The row of one shard of a residual task."""
    return ShardRow(
        rank, ShardKind.RESIDUAL, task.key, task.name, task.nbytes, outputs=task.outputs, depends=task.depends
    )


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Which canonical tensors a changed input reaches, directly or over other residual tasks."""

    depends: Mapping[str, frozenset[str]]
    """Task name -> names of the inputs and tasks that it reads."""
    outputs: Mapping[str, tuple[TensorMeta, ...]]
    """Task name -> canonical tensors that it converts."""

    def required(self, changed: Iterable[str]) -> tuple[TensorMeta, ...]:
        """U_req: the residual tensors that a change of the named inputs can alter, sorted by name."""
        reached = set(changed)
        grew = True
        while grew:
            more = {name for name, reads in self.depends.items() if name not in reached and reads & reached}
            reached |= more
            grew = bool(more)
        return tuple(sorted({tensor for name in reached for tensor in self.outputs.get(name, ())}))

    def all_tensors(self) -> tuple[TensorMeta, ...]:
        """Every residual tensor, sorted by name."""
        return tuple(sorted({tensor for tensors in self.outputs.values() for tensor in tensors}))


@dataclass(frozen=True, slots=True)
class Plan:
    """What all ranks agree on before the first transition."""

    tensors: tuple[TensorMeta, ...]
    """All canonical tensors, sorted by name."""
    owners: Mapping[str, OwnerId]
    """Owner of every shard by key."""
    dependencies: Dependencies
    holders: Mapping[str, tuple[OwnerId, ...]] = field(default_factory=dict)
    """Ranks that hold each shard; two or more are replicas (SC2)."""

    def owned_affine(self, rank: OwnerId, tasks: Iterable[AffineTask]) -> tuple[AffineTask, ...]:
        """Those of a rank's tasks that it owns."""
        return tuple(task for task in tasks if self.owners[task.key] == rank)

    def owned_inputs(self, rank: OwnerId, inputs: Iterable[ResidualInput]) -> tuple[ResidualInput, ...]:
        """Those of a rank's residual inputs that it watches."""
        return tuple(watched for watched in inputs if self.owners[watched.key] == rank)

    def owned_residual(self, rank: OwnerId, tasks: Iterable[ResidualTask]) -> tuple[ResidualTask, ...]:
        """Those of a rank's residual tasks that it converts."""
        return tuple(task for task in tasks if self.owners[task.key] == rank)


def make_plan(rows: Iterable[ShardRow], *, expected: Iterable[TensorMeta] | None = None) -> Plan:
    """Check the table of all ranks and assign owners. The order of the rows does not matter.

    `expected` are the tensors of the checkpoint, where they are known: the tasks must make all of them and no other.
    Raises: UnsupportedMapping (SC1) when the affine boxes of a tensor do not cover each element exactly once, when
    tensors or shards are described in two ways, or when a residual task depends on a name that nobody declares.
    """
    table = list(rows)
    tensors: dict[str, TensorMeta] = {}
    boxes: dict[str, dict[str, BoxMap]] = defaultdict(dict)
    depends: dict[str, set[str]] = defaultdict(set)
    outputs: dict[str, set[TensorMeta]] = defaultdict(set)
    for row in table:
        described = (row.box.tensor,) if row.box is not None else row.outputs
        for tensor in described:
            if tensors.setdefault(tensor.name, tensor) != tensor:
                detail = f"one rank describes it as {tensors[tensor.name]}, another as {tensor}"
                raise UnsupportedMapping(tensor.name, "SC1", detail)
        if row.box is not None:
            boxes[row.box.tensor.name][row.key] = row.box
        if row.kind is ShardKind.RESIDUAL:
            depends[row.name].update(row.depends)
            outputs[row.name].update(row.outputs)
    if expected is not None:
        _check_table(tensors, {tensor.name: tensor for tensor in expected})
    residual = {tensor.name for made in outputs.values() for tensor in made}
    for name in sorted(residual & set(boxes)):
        raise UnsupportedMapping(name, "SC1", "it has affine and residual tasks; make all of its tasks residual")
    for name, cuts in boxes.items():
        check_cover(tensors[name], list(cuts.values()))
    declared = {row.name for row in table if row.kind is not ShardKind.AFFINE}
    for task, names in depends.items():
        for missing in sorted(names - declared):
            raise UnsupportedMapping(task, "SC6", f"it depends on {missing!r}, which no rank declares as an input")
    shards = _shards(table)
    return Plan(
        tensors=tuple(sorted(tensors.values())),
        owners=assign_owners(shards),
        dependencies=Dependencies(
            {name: frozenset(names) for name, names in depends.items()},
            {name: tuple(sorted(made)) for name, made in outputs.items()},
        ),
        holders={shard.key: shard.holders for shard in shards},
    )


def _check_table(made: Mapping[str, TensorMeta], expected: Mapping[str, TensorMeta]) -> None:
    for name in sorted(made.keys() | expected.keys()):
        if made.get(name) != expected.get(name):
            detail = f"the checkpoint has {expected.get(name)}, the tasks make {made.get(name)}"
            raise UnsupportedMapping(name, "SC1", detail)


def _shards(table: Sequence[ShardRow]) -> list[Shard]:
    holders: dict[str, list[OwnerId]] = defaultdict(list)
    first: dict[str, ShardRow] = {}
    for row in table:
        seen = first.setdefault(row.key, row)
        if (seen.kind, seen.name, seen.nbytes) != (row.kind, row.name, row.nbytes):
            detail = f"rank {seen.rank} holds {seen.nbytes} bytes of {seen.kind}, rank {row.rank} {row.nbytes}"
            raise UnsupportedMapping(row.key, "SC2", f"replicas are described differently: {detail} of {row.kind}")
        if row.rank in holders[row.key]:
            raise UnsupportedMapping(row.key, "SC1", f"rank {row.rank} declares this shard twice")
        holders[row.key].append(row.rank)
    return [Shard(key, first[key].nbytes, tuple(sorted(ranks))) for key, ranks in sorted(holders.items())]


def check_cover(tensor: TensorMeta, boxes: Sequence[BoxMap]) -> None:
    """Check that the distinct `boxes` of `tensor` cover each of its elements exactly once.

    Raises: UnsupportedMapping (SC1).
    """
    boxes = [box for box in boxes if box.domain]
    total = sum(box.domain for box in boxes)
    if total != tensor.numel:
        detail = f"its shards hold {total} elements of {tensor.numel}: each needs exactly one owner"
        raise UnsupportedMapping(tensor.name, "SC1", detail)
    if len(boxes) > 1 and overlapping(boxes):
        raise UnsupportedMapping(tensor.name, "SC1", "different shards of it overlap: an element has two owners")
