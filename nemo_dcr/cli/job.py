"""What the processes of one demo run have in common, as a file in the run directory."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.ids import InstanceId, receiver_id
from nemo_dcr.runtime.chronicle import DIRECTORY as CHRONICLE
from nemo_dcr.testing.checkpoint import read_config, tensor_table
from nemo_dcr.testing.llama_config import LlamaShape

REFERENCE, VLLM = "reference", "vllm"
OWNERS = 2
PAYLOADS_AT_LEAST = 15
TARGET_BYTES = 4 << 20
VOCAB_PADDING = 1000


@dataclass(frozen=True, kw_only=True)
class DemoJob:
    """Settings of a run; written once by the driver, read by every child."""

    run: str
    """Run directory: addresses, logs, traces, payload store, commit record."""
    model: str
    """Hugging Face directory that trainer and engines start from."""
    owners: int
    """Trainer ranks."""
    instances: dict[str, int]
    """Engine instances and their tensor-parallel degrees."""
    chunk_target_bytes: int
    bucket_target_bytes: int
    name: str
    """Marks the payload store, so that two runs never share one."""
    transport: str = ""
    """URL of the payload store; empty for `store` in the run directory. Holds no credentials."""
    engine: str = REFERENCE
    """What serves: the reference engine of this package, or real vLLM servers."""
    listen: dict[str, str] = field(default_factory=dict)
    """Control address of each process by name; a free loopback port for those that are not named."""
    keys: str = ""
    """Folder with a key directory for each process; empty for plaintext on loopback addresses."""
    tree: str = ""
    """JSON file of the relay tree; empty for none."""
    relay_nodes: dict[str, str] = field(default_factory=dict)
    """The node of the tree at which each receiver reads."""
    post_apply_check: bool = True
    """Engines read every written bit back before they acknowledge."""
    learning_rate: float = 1e-6
    seed: int = 0

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.run)

    @property
    def addresses(self) -> Path:
        """Where processes publish their addresses."""
        return self.directory / "addresses"

    @property
    def traces(self) -> Path:
        """One trace file for each process life."""
        return self.directory / "traces"

    @property
    def chronicle(self) -> Path:
        """What each process life lived through, with times: see `nemo-dcr report`."""
        return self.directory / CHRONICLE

    @property
    def store(self) -> Path:
        """Directory of the payload store, unless `transport` names another."""
        return self.directory / "store"

    @property
    def transport_url(self) -> str:
        """The payload store as every process opens it."""
        return self.transport or self.store.resolve().as_uri()

    def url_at(self, receiver: str) -> str:
        """What the receiver hands to `open_transport`: the relay tree at its node, or the payload store."""
        if not self.tree:
            return self.transport_url
        tree = Path(self.tree).resolve().as_uri().removeprefix("file")
        return f"relay{tree}?{urlencode({'node': self.relay_nodes[receiver]})}"

    @property
    def record(self) -> str:
        """URL of the commit record."""
        return f"sqlite:///{self.directory / 'record.sqlite'}"

    @property
    def file(self) -> Path:
        """Where this job is written."""
        return self.directory / "job.json"

    def save(self) -> Path:
        """Write the job and make its directories; returns its path."""
        for directory in (self.directory, self.addresses, self.traces, self.store, self.directory / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(msgspec.json.format(msgspec.json.encode(self)))
        return self.file


def plan_job(
    run: Path,
    model: Path,
    engine: str = REFERENCE,
    transport: str = "",
    *,
    name: str = "",
    tree: Path | None = None,
    nodes: Sequence[str] = (),
) -> DemoJob:
    """The job for a model: two instances, and enough payloads for a fault.

    The second reference instance is sharded by a degree that the model allows; vLLM serves two unsharded ones. Chunk
    and bucket targets are 4 MiB, or less for a small model, so that every owner sends at least 15 payloads. `name` is
    that of the run, a new one by default. With a relay `tree` the instances read at its `nodes` in turn.
    Raises: InvalidConfig when the directory is no checkpoint, or of a family that the reference engine does not serve.
    """
    config = read_config(model)
    instances = {"left": 1, "right": 1}
    if engine == REFERENCE:
        LlamaShape.of(config, rank=0, tp=1, vocab_padding=VOCAB_PADDING)
        degree = next((degree for degree in (3, 2, 4) if _splits(config, degree)), 1)
        instances = {"solo": 1, f"tp{degree}": degree}
    target = target_bytes(model)
    places = dict(zip(instances, cycle(nodes), strict=False)) if nodes else {}
    return DemoJob(
        run=str(run),
        model=str(model),
        name=name or secrets.token_hex(8),
        owners=OWNERS,
        instances=instances,
        chunk_target_bytes=target,
        bucket_target_bytes=target,
        engine=engine,
        transport=transport,
        tree="" if tree is None else str(tree),
        relay_nodes={
            receiver_id(InstanceId(instance), rank): node
            for instance, node in places.items()
            for rank in range(instances[instance])
        },
    )


def target_bytes(model: Path) -> int:
    """Chunk and bucket target with which every owner sends at least 15 payloads: 4 MiB, or less for a small model.

    Raises: InvalidConfig when the directory is no checkpoint.
    """
    return max(
        1, min(TARGET_BYTES, sum(meta.nbytes for meta in tensor_table(model)) // (2 * OWNERS * PAYLOADS_AT_LEAST))
    )


def _splits(config: Mapping[str, Any], degree: int) -> bool:
    try:
        LlamaShape.of(config, rank=0, tp=degree, vocab_padding=VOCAB_PADDING)
    except InvalidConfig:
        return False
    return True


def load_job(path: Path) -> DemoJob:
    """Read a job file."""
    return msgspec.json.decode(path.read_bytes(), type=DemoJob)
