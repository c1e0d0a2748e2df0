"""What must hold of a live chaos system after each transition, and of everything it left behind.

Bits of all receivers and trackers equal a dense load of the committed version; every version was committed once, by one
attempt that all its required receivers acknowledged in the incarnations that the record names; requests saw one
committed version from beginning to end; no receiver wrote under an attempt that it had not installed, or had stopped;
each failed attempt was told with the process that it failed for and the phase in which it did.

Paper: Section 6.3; Proposition 1   Spec: CommitExact, CommitAcked, SingleCommit, BaselineBound, GateSafe, FenceMono
Conditions: SC3, SC7
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nemo_dcr.bits import Words
from nemo_dcr.ids import InstanceId, OwnerId, ReceiverId, receiver_id
from nemo_dcr.record import ControlPlane, Record
from nemo_dcr.runtime.methods import DUMP, Nothing, Storage
from nemo_dcr.runtime.rpc import Bulk
from nemo_dcr.runtime.trace_file import read_log
from nemo_dcr.source.maps import BoxMap
from nemo_dcr.testing.chaos_roles import bits_digest, read_served
from nemo_dcr.testing.chaos_source import TENSORS, Lineage, SystemPlan
from nemo_dcr.testing.chaos_system import ChaosSystem
from nemo_dcr.testing.local_oracle import StoredBits
from nemo_dcr.trace import Action, Event

DUMP_S = 60.0
FAILURE = re.compile(
    r"(receiver \S+/\d+|owner \d+|deadline passed without|abort was requested)\b.*, in phase [a-z]+", re.DOTALL
)
"""What the reason of a failed attempt says: who, why, and in which phase."""
METAS = {meta.name: meta for meta in TENSORS}


def wrong_bits(system: ChaosSystem, lineage: Lineage, record: Record) -> list[str]:
    """Receivers and trackers whose stored bits are not those of the committed version."""
    lineage.derive(record.candidate)
    found = []
    plan = system.plan
    dumps = system.endpoints.call_receivers(DUMP, Nothing(), DUMP_S)
    for instance, ranks in plan.instances.items():
        for rank in range(ranks):
            name = receiver_id(InstanceId(instance), rank)
            stored = _stored(*dumps[name])
            expected = lineage.oracle.expected(rank, ranks, record.candidate)
            found += [
                f"{name}: {tensor} is not that of version {record.version}"
                for tensor in sorted(expected.keys() | stored.keys())
                if stored.get(tensor) != expected.get(tensor)
            ]
    for owner, (storage, bulk) in system.endpoints.call_owners(DUMP, Nothing(), DUMP_S).items():
        found += _wrong_trackers(owner, storage, bulk, lineage.source.weights[record.candidate], record)
    return found


def _stored(storage: Storage, bulk: Bulk) -> StoredBits:
    rows = zip(storage.tensors, bulk.frames, strict=True)
    return {row.name: (row.dtype, tuple(row.shape), frame) for row, frame in rows}


def _wrong_trackers(
    owner: OwnerId, storage: Storage, bulk: Bulk, source: dict[str, Words], record: Record
) -> list[str]:
    found = []
    for row, box, frame in zip(storage.tensors, storage.boxes, bulk.frames, strict=True):
        part = BoxMap.box(METAS[row.name], box.start, box.extent, view=box.view, axes=box.axes)
        if part.take(source[row.name]).tobytes() != frame:
            found.append(f"owner {owner}: the tracker of {row.name} is not version {record.version}")
    return found


def wrong_records(control: ControlPlane, traces: Path) -> list[str]:
    """Records that were not committed exactly once, or without the acknowledgement of a required receiver."""
    history, journal = control.history(), control.journal()
    found = []
    if [record.version for record in history] != list(range(len(history))):
        found.append(f"versions are {[record.version for record in history]}")
    commits = [entry for entry in journal if entry.action.value in ("Commit", "Bootstrap")]
    if [entry.post["version"] for entry in commits] != [record.version for record in history]:
        found.append(f"commits {[entry.post['version'] for entry in commits]} for {len(history)} versions")
    for what, values in (
        ("attempt", [record.attempt for record in history]),
        ("candidate", [record.candidate for record in history]),
    ):
        if len(set(values)) != len(values):
            found.append(f"one {what} was committed twice: {values}")
    for record in history[1:]:
        for member in record.required:
            events = _events(traces / f"{member.receiver.replace('/', '-')}-{member.incarnation}.ndjson")
            if not any(event.action == "Flush" and event.attempt == record.attempt for event in events):
                found.append(f"version {record.version} was committed without {member.receiver}")
    return found


def wrong_served(system: ChaosSystem, lineage: Lineage) -> tuple[int, list[str]]:
    """How many requests were served, and those that did not see one version that was committed before they began."""
    plan, history = system.plan, system.control.history()
    clocks = {
        entry.post["version"]: entry.clock
        for entry in system.control.journal()
        if entry.action.value in ("Commit", "Bootstrap")
    }
    count, found = 0, []
    for path in sorted(plan.served.glob("*.ndjson")):
        instance, rank, _ = path.stem.rsplit("-", 2)
        known: dict[str, int] = {}
        for record in history:
            lineage.derive(record.candidate)
            bits = lineage.oracle.expected(int(rank), plan.instances[instance], record.candidate)
            known.setdefault(bits_digest(bits), clocks[record.version])
        for served in read_served(path):
            count += 1
            if served.first != served.last:
                found.append(f"request {served.request} saw storage change")
            elif served.first not in known:
                found.append(f"request {served.request} saw a mixture")
            elif known[served.first] >= served.clock:
                found.append(f"request {served.request} saw a version before its commit")
    return count, found


def wrong_traces(traces: Path) -> list[str]:
    """Attempts that went backwards, writes behind a fence, and failed attempts of which nobody can tell why."""
    found = []
    for path in sorted(traces.glob("*.ndjson")):
        if path.name in ("killed.ndjson", "control.ndjson"):
            continue
        events = read_log(path).events
        found += [f"{path.name}: {fault}" for fault in [*fence_faults(events), *nameless_failures(events)]]
    return found


def fence_faults(events: Iterable[Event]) -> list[str]:
    """Lines of one process life that break FenceMono or FenceSafe."""
    found, installed, stopped = [], 0, set[int]()
    for event in events:
        attempt = event.post.get("att")
        if attempt is None:
            continue
        if attempt < installed:
            found.append(f"line {event.seq + 1}: attempt {attempt} after attempt {installed}")
        installed = attempt
        if event.action == "StopAndWait":
            stopped.add(event.attempt)
        if event.action == "ApplyItem" and (event.attempt != installed or event.attempt in stopped):
            found.append(f"line {event.seq + 1}: wrote under attempt {event.attempt}, installed {installed}")
    return found


def nameless_failures(events: Iterable[Event]) -> list[str]:
    """Failed attempts whose reason does not name a process and a phase."""
    failed = [(event, str(event.args["reason"])) for event in events if event.action == Action.FAIL_ATTEMPT]
    return [f"line {event.seq + 1}: {reason!r}" for event, reason in failed if not FAILURE.fullmatch(reason)]


def _events(path: Path) -> tuple[Event, ...]:
    return read_log(path).events if path.exists() else ()


def receivers_of(plan: SystemPlan) -> list[ReceiverId]:
    """Every rank of every instance."""
    return [receiver_id(InstanceId(i), rank) for i, ranks in plan.instances.items() for rank in range(ranks)]
