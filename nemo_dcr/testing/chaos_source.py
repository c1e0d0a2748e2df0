"""The weights of a chaos system: every process can make up every candidate from its name and its parent's.

A trainer that came back, and the oracle that looks at everybody's bits, need the same words without a shared memory. A
candidate's parent stands in a file; its words follow from them, the seed and the name.

Paper: Section 3   Conditions: SC2, SC4
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import msgspec
import numpy as np

from nemo_dcr.canonical import TensorMeta
from nemo_dcr.config import GateMode, RefitConfig
from nemo_dcr.errors import ConditionViolated
from nemo_dcr.ids import NO_CANDIDATE, CandidateId, OwnerId
from nemo_dcr.runtime.owner_node import OwnerNode
from nemo_dcr.runtime.rpc import LOOPBACK
from nemo_dcr.source.delta import DeltaOwner
from nemo_dcr.testing.local_oracle import DenseOracle
from nemo_dcr.testing.local_source import LocalRank, LocalSource
from nemo_dcr.testing.toy_loader import Composed, PadRows, Rule, Slice, Transpose
from nemo_dcr.trace import Action, Emit
from nemo_dcr.transport.relay.keys import Security
from nemo_dcr.transport.s3_client import S3Credentials

TENSORS = (
    TensorMeta("a.w", (8, 4), "BF16"),
    TensorMeta("b.w", (5, 6), "F32"),
    TensorMeta("c.w", (9, 5), "F16"),
    TensorMeta("d.w", (4, 4), "I64"),
    TensorMeta("e.w", (6, 3), "BF16"),
)
RULES: dict[str, Rule] = {
    "a.w": Slice(0),
    "b.w": Composed(),
    "c.w": PadRows(4),
    "d.w": Slice(1),
    "e.w": Transpose(contiguous=True),
}
RATE = 0.4
"""Share of the elements that a candidate changes."""


class RecordPlace(StrEnum):
    """Where the commit record of a system lies."""

    SQLITE = "sqlite"
    """In a file, which no fault takes away."""
    ETCD = "etcd"
    S3 = "s3"

    @property
    def is_server(self) -> bool:
        """A process of the system serves it."""
        return self is not RecordPlace.SQLITE


@dataclass(frozen=True, kw_only=True)
class SystemPlan:
    """What every process of one system is told."""

    directory: Path
    seed: int
    owners: int
    instances: dict[str, int]
    """Ranks of each engine instance."""
    gate: GateMode
    skew_s: dict[str, float] = field(default_factory=dict)
    """How far the wall clock of a coordinator is off, by its name."""
    run: str | None = None
    """Name of the run in the payload store."""
    lost_after_s: float = 0.4
    """An endpoint that is silent for so long is lost."""
    takeover_after_s: float = 0.8
    """A standby takes over from a coordinator that is silent for so long."""
    keeps_baselines: bool = False
    """Baselines lie in files, and outlive their processes."""
    record: RecordPlace = RecordPlace.SQLITE
    record_at: str = ""
    """HOST:PORT of the server of the commit record; empty where it is a file."""
    record_keys: S3Credentials | None = None
    """What an S3 server of the record demands."""
    relays: dict[str, str] = field(default_factory=dict)
    """Where each relay node listens, by its name; empty: payloads lie in files."""
    hosts: dict[str, str] = field(default_factory=dict)
    """The address on which a process listens, by its name; empty: on loopback, where nothing can be cut."""

    @property
    def refit(self) -> RefitConfig:
        """Short deadlines, so that faults are noticed while a test waits."""
        return RefitConfig(
            gate=self.gate,
            heartbeat_s=0.1,
            call_timeout_s=0.4,
            lost_after_s=self.lost_after_s,
            attempt_deadline_s=4.0,
            commit_deadline_s=1.0,
            clock_skew_s=0.2,
            max_attempts=12,
        )

    @property
    def addresses(self) -> Path:
        """Where processes say where they answer."""
        return self.directory / "addresses"

    @property
    def traces(self) -> Path:
        """One file for each process life."""
        return self.directory / "traces"

    @property
    def strikes(self) -> Path:
        """What was struck."""
        return self.directory / "strikes.ndjson"

    @property
    def served(self) -> Path:
        """What requests saw, one file for each engine life."""
        return self.directory / "served"

    @property
    def payloads(self) -> Path:
        """Where payloads lie."""
        return self.directory / "store"

    def listen(self, name: str) -> str:
        """Where a process listens."""
        return f"tcp://{self.hosts[name]}:*" if name in self.hosts else LOOPBACK

    @property
    def security(self) -> Security:
        """Plaintext, also on the addresses of a namespace that nobody else reaches."""
        return Security(plaintext=bool(self.hosts))


class Lineage:
    """The trainer's weights of every candidate that was ever named."""

    def __init__(self, plan: SystemPlan) -> None:
        self.source = LocalSource(TENSORS, seed=plan.seed, owners=plan.owners)
        self.oracle = DenseOracle(self.source, RULES)
        self._seed = plan.seed
        self._directory = plan.directory / "candidates"
        self._directory.mkdir(exist_ok=True)

    def name(self, candidate: CandidateId, parent: CandidateId) -> None:
        """Make a candidate out of another one; every process can then derive it."""
        write_whole(self._directory / candidate, parent.encode())

    def derive(self, candidate: CandidateId) -> None:
        """Have the candidate's words at hand."""
        if candidate in self.source.weights:
            return
        parent = CandidateId((self._directory / candidate).read_text(encoding="utf-8"))
        self.derive(parent)
        self.source.rng = np.random.default_rng([self._seed, zlib.crc32(candidate.encode())])
        self.source.draw(candidate, parent, RATE)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a trainer rank finds again after a crash: in a checkpoint, or with a replica."""

    committed: CandidateId
    frozen: CandidateId


class ChaosTrainer:
    """One trainer rank whose candidate survives its crash exactly when the trace says that it was frozen."""

    def __init__(self, plan: SystemPlan, owner: OwnerId) -> None:
        self.lineage = Lineage(plan)
        self.rank: LocalRank = self.lineage.source.ranks[owner]
        self.node: OwnerNode | None = None
        self._file = plan.directory / f"trainer-{owner}.json"
        self.is_first = not self._file.exists()
        if not self.is_first:
            state = msgspec.json.decode(self._file.read_bytes(), type=TrainerState)
            self.rank.committed, self.rank.frozen = state.committed, state.frozen
            self._load(state.frozen or state.committed)

    def _load(self, candidate: CandidateId) -> None:
        self.lineage.derive(candidate)
        self.rank.load(candidate)

    def written(self, emitted: Emit) -> None:
        """Remember what a line of the owner says about the candidate."""
        match emitted.action:
            case Action.BEGIN_TRANSITION:
                self._save(self.rank.committed, CandidateId(str(emitted.post["frozen"])))
            case Action.END_TRANSITION:
                self._save(CandidateId(str(emitted.args["candidate"])), NO_CANDIDATE)
            case Action.DROP_CANDIDATE:
                self._save(self.rank.committed, NO_CANDIDATE)
            case _:
                pass

    def _save(self, committed: CandidateId, frozen: CandidateId) -> None:
        write_whole(self._file, msgspec.json.encode(TrainerState(committed, frozen)))

    def end_transition(self, candidate: CandidateId) -> None:
        """As `FrozenTrainer.end_transition`."""
        self.rank.end_transition(candidate)

    def reload(self, delta: DeltaOwner) -> CandidateId:
        """As `FrozenTrainer.reload`."""
        self.lineage.derive(self.rank.committed)
        return self.rank.reload(delta)

    def train(self, candidate: CandidateId) -> str:
        """One optimizer step: take the candidate's weights and freeze them. A text says why not."""
        if self.node is None:
            return "the owner is not ready"
        if self.node.report.candidate == candidate:
            return ""
        try:
            self.node.weights_changed()
        except ConditionViolated as problem:
            return str(problem)
        self._load(candidate)
        self.rank.frozen = candidate
        refusal = self.node.freeze(candidate)
        if refusal:
            self.rank.frozen = NO_CANDIDATE
        return refusal


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file that is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)
