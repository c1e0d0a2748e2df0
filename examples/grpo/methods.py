"""The methods that are compared: what a refit sends, and over what it travels.

All of them use the owners, the coordinator, the receivers and the vLLM plugin of this project, so they differ only in
what the name says. `dense` overwrites every element: the owners give up their baseline before each refit, which is the
protocol's own way to a dense attempt. Through vLLM's reload from a file the same bits would arrive, but a server could
not be killed in the middle of it under the same watch.
Not handled: NCCL, which has no place without GPUs.

Paper: Section 8.3 (dense refit, object storage, relay tree)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_dcr.cli.job import VLLM, DemoJob, plan_job
from nemo_dcr.cli.payload_store import FILE, RELAY, S3, PayloadStore, open_payload_store
from nemo_dcr.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class RefitMethod:
    """One of them."""

    name: str
    transport: str
    dense: bool = False
    """Send every element."""


METHODS = {
    "dense": RefitMethod("dense", FILE, dense=True),
    "store": RefitMethod("store", FILE),
    "s3": RefitMethod("s3", S3),
    "relay": RefitMethod("relay", RELAY),
}


def methods_named(names: str) -> tuple[RefitMethod, ...]:
    """The methods of a list with commas. Raises: InvalidConfig for a name that is none, or comes twice."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if not wanted or len(set(wanted)) < len(wanted) or not set(wanted) <= set(METHODS):
        raise InvalidConfig("--methods", f"{names!r}: give some of {', '.join(METHODS)}, each once")
    return tuple(METHODS[name] for name in wanted)


@contextmanager
def open_method(
    method: RefitMethod, directory: Path, model: Path, *, learning_rate: float, seed: int
) -> Iterator[tuple[DemoJob, PayloadStore]]:
    """The job of one life of a method, with its transport open."""
    with open_payload_store(method.transport, None, directory / "transport") as store:
        job = plan_job(
            *(directory / "run", model, VLLM, store.url), name=store.name, tree=store.tree, nodes=store.nodes
        )
        job = replace(job, learning_rate=learning_rate, seed=seed, post_apply_check=False)
        job.save()
        yield job, store
