"""The command `plan`: what a refit will cost before anything is built, and when not to use it.

Every figure is projected from a calibration, and the last line says from which.
"""

from __future__ import annotations

import json as jsonlib
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nemo_dcr.errors import InvalidConfig
from nemo_dcr.planner.calibration import BUNDLED, Calibration, read_calibration
from nemo_dcr.planner.coding import Coding
from nemo_dcr.planner.models import NAMED, read_model
from nemo_dcr.planner.plan import Delivery, Deployment, Plan, make_plan


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("plan")(plan)


def plan(
    model: Annotated[
        str, typer.Option(help=f"{', '.join(NAMED)}, a size such as 500GB, a checkpoint directory or a config.json.")
    ],
    change: Annotated[str, typer.Option(help="Elements that change in a step, such as 1.2% or 0.012.")] = "1.2%",
    train_nodes: Annotated[int, typer.Option(help="Training nodes; each has a cross-cluster flow of its own.")] = 8,
    owners: Annotated[int | None, typer.Option(help="Owner processes on all of them; 4 a node by default.")] = None,
    rollout_nodes: Annotated[int, typer.Option(help="Nodes that serve.")] = 8,
    gbps: Annotated[float, typer.Option(help="Cross-cluster flow of one node, 10^9 bits a second.")] = 5.0,
    transport: Annotated[Delivery, typer.Option(help="How payloads travel.")] = Delivery.relay,
    codec: Annotated[Coding, typer.Option(help="This project's coding, or the paper's.")] = Coding.planes,
    calibration: Annotated[str, typer.Option(help=f"{', '.join(BUNDLED)} or a TOML file of rates.")] = "paper",
    json: Annotated[bool, typer.Option("--json", help="Print JSON: seconds and bytes.")] = False,
) -> None:
    """Predict latency, traffic and memory of a refit, and where a full checkpoint is the better choice."""
    rates = read_calibration(calibration)
    deployment = Deployment(
        model=read_model(model, _count),
        change=fraction(change),
        delivery=transport,
        training_nodes=train_nodes,
        owners=4 * train_nodes if owners is None else owners,
        rollout_nodes=rollout_nodes,
        gbps=gbps,
        coding=codec,
    )
    found = make_plan(deployment, rates)
    typer.echo(jsonlib.dumps(as_json(found, rates), indent=2) if json else "\n".join(lines(found, rates)))


def _count(config: Path) -> int:
    from nemo_dcr.adapters.huggingface import count_elements  # torch and transformers take seconds to import

    return count_elements(config)


def fraction(text: str) -> float:
    """`1.2%` or `0.012` as a fraction. Raises: InvalidConfig."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(%?)", text.strip())
    if match is None:
        raise InvalidConfig("--change", f"must be a share such as 1.2% or 0.012, got {text!r}")
    return float(match[1]) / (100 if match[2] else 1)


def as_json(found: Plan, rates: Calibration) -> dict[str, Any]:
    """Every figure of a plan, and where it comes from."""
    return {**asdict(found), "speedup": found.speedup, "provenance": rates.provenance}


def lines(found: Plan, rates: Calibration) -> list[str]:
    """A plan for a terminal."""
    deployment = found.deployment
    size = deployment.model.nbytes
    rows = [
        ("model", f"{deployment.model.name}, {_bytes(size)} in BF16, {deployment.owners} owners"),
        ("refit", f"{_seconds(found.latency_s)}, {found.speedup:.1f} times the speed of the full checkpoint"),
        ("  construction bound", _share(found.construction_s, found)),
        ("  transport bound", _share(found.transport_s, found)),
        ("  finalization", _seconds(found.finalization_s)),
        (
            "payloads",
            f"{found.payloads}, together {_bytes(found.v_payload)}, {found.v_payload / size:.2%} of the model",
        ),
        ("across the boundary", f"{_bytes(found.v_cross)} ({deployment.delivery})"),
        ("memory of an owner", f"{_bytes(found.owner_bytes)} on the host"),
        ("memory of a receiver", f"{_bytes(found.receiver_bytes)} on the host, beside its resident weights"),
        ("full checkpoint instead", f"{_seconds(found.reference_s)} (transfer alone)"),
        ("it is there first", _crossover(found)),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows] + [rates.provenance]


def _crossover(found: Plan) -> str:
    parts = []
    if found.speedup <= 1:
        return "already: send the full checkpoint"
    if found.crossover_gbps is not None:
        parts.append(f"from {found.crossover_gbps:,.0f} Gbit/s a node")
    if found.crossover_change is not None:
        parts.append(f"from {found.crossover_change:.0%} changed elements")
    return " or ".join(parts) or "at no link speed up to 10,000 Gbit/s and no change rate"


def _share(seconds: float, found: Plan) -> str:
    return f"{_seconds(seconds)}, {seconds / found.latency_s:.0%} of it"


def _seconds(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 600 else f"{seconds:.1f} s"


def _bytes(nbytes: float) -> str:
    return f"{nbytes / 10**9:,.1f} GB" if nbytes >= 10**9 else f"{nbytes / 10**6:,.1f} MB"
