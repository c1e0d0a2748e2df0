"""What all ranks together know of each conversion task of Bridge, and which of the tasks are residual.

Bridge makes the same list of tasks on all ranks; rank by rank the same place of the list is the same parameter, or with
expert parallelism the experts of the same local number. A rank describes what it holds; the others of its pipeline
learn it here. A place is residual when its class is, when ranks describe it differently, and when a tensor that it
becomes is also that of a residual place; such places are converted together. A bridge whose class or object replaced a
step of the export (`EXPORT_STEPS`) may do anything to any tensor, so with it every place is residual.
Not handled: making tasks (source).

Paper: Section 5 (tasks, fixed shard geometry)   Conditions: SC1, SC6
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nemo_dcr.adapters.megatron.mappings import Described
from nemo_dcr.errors import UnsupportedMapping
from nemo_dcr.source.classes import Degree, Handling, MappingClass, handling
from nemo_dcr.source.classes import Mapping as Use
from nemo_dcr.source.exchange import Exchange
from nemo_dcr.source.maps import Shape

EXPORT_STEPS = (
    "stream_weights_megatron_to_hf",
    "build_conversion_tasks",
    "maybe_modify_converted_hf_weight",
    "_cast_export_weight_dtype",
    "_accumulate_grouped_export",
)
"""Methods of a bridge that make the export what its mapping objects say."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank says of one place. Plain data: it travels as MessagePack."""

    place: int
    input: str
    """Name of the parameter over all ranks."""
    mapping: MappingClass
    degree: Degree
    outputs: tuple[str, ...]
    shape: Shape
    """Of the local parameter."""
    reason: str


@dataclass(frozen=True, slots=True)
class Place:
    """What all ranks say of one place."""

    place: int
    mapping: MappingClass
    degree: Degree
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    shapes: tuple[Shape, ...]
    reason: str


_ROWS = msgspec.msgpack.Decoder(tuple[int, list[Row]])


def described_row(place: int, name: str, shape: Shape, described: Described) -> Row:
    """The row of a parameter that this rank holds."""
    return Row(place, name, described.mapping, described.degree, described.outputs, shape, described.reason)


def agree(exchange: Exchange, count: int, rows: Sequence[Row]) -> tuple[Place, ...]:
    """All places that some rank describes, in order; all ranks call this.

    Args:
        exchange: of the trainer ranks.
        count: length of this rank's list of tasks.
        rows: of this rank.

    Raises: UnsupportedMapping (SC1) when the lists of the ranks have different lengths; EndpointLost.
    """
    told = [_ROWS.decode(data) for data in exchange.gather(msgspec.msgpack.encode((count, list(rows))))]
    if len({length for length, _ in told}) != 1:
        lengths = [length for length, _ in told]
        raise UnsupportedMapping(
            "", "SC1", f"Bridge lists {lengths} conversion tasks on the ranks; their order differs"
        )
    by_place: dict[int, list[Row]] = defaultdict(list)
    for _, each in told:
        for row in each:
            by_place[row.place].append(row)
    return tuple(_joined(by_place[place]) for place in sorted(by_place))


def _joined(rows: Sequence[Row]) -> Place:
    first = rows[0]
    mapping, reason = first.mapping, next((row.reason for row in rows if row.reason), "")
    if {(row.mapping, row.degree) for row in rows} != {(first.mapping, first.degree)}:
        kinds = sorted({str(row.mapping) for row in rows})
        mapping, reason = MappingClass.UNKNOWN, f"ranks describe it as {', '.join(kinds)}"
    return Place(
        first.place,
        mapping,
        first.degree,
        tuple(sorted({row.input for row in rows})),
        tuple(sorted({name for row in rows for name in row.outputs})),
        tuple(sorted({row.shape for row in rows})),
        reason,
    )


def replaced_steps(bridge: Any) -> tuple[str, ...]:
    """Steps of the export that the bridge does in a way of its own."""
    from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge

    return tuple(
        name
        for name in EXPORT_STEPS
        if name in vars(bridge) or getattr(type(bridge), name, None) is not getattr(MegatronModelBridge, name, None)
    )


def residual_groups(places: Iterable[Place], use: Use, *, everything: bool = False) -> tuple[tuple[Place, ...], ...]:
    """Places that are converted, in groups that share tensors; groups and places in order.

    Args:
        places: of all ranks.
        use: under which classes are index maps.
        everything: all places are one group.
    """
    places = tuple(places)
    if everything:
        return (places,) if places else ()
    of_tensor: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        for name in place.outputs:
            of_tensor[name].append(place)
    seen: set[int] = set()
    groups = []
    for start in places:
        if handling(start.mapping, use) is not Handling.RESIDUAL or start.place in seen:
            continue
        reached, todo = {start.place: start}, [start]
        while todo:
            for name in todo.pop().outputs:
                for other in of_tensor[name]:
                    if other.place not in reached:
                        reached[other.place] = other
                        todo.append(other)
        seen |= set(reached)
        groups.append(tuple(reached[place] for place in sorted(reached)))
    return tuple(groups)


def by_tensor(places: Iterable[Place], names: Mapping[str, object]) -> dict[str, Place]:
    """For each canonical tensor of `names`, the first place that becomes it."""
    found: dict[str, Place] = {}
    for place in places:
        for name in place.outputs:
            if name in names:
                found.setdefault(name, place)
    return found
