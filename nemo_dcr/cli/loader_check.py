"""The command `check-loader`: what vLLM's loader would do with a model, before any engine or weight is there."""

from __future__ import annotations

import json as jsonlib
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nemo_dcr.codec.records import PathClass
from nemo_dcr.errors import InvalidConfig, OperatorNeeded

if TYPE_CHECKING:
    from nemo_dcr.adapters.vllm.check_loader import LoaderCheck

EXIT_REFUSED = 3

commands = typer.Typer()


@commands.command()
def check_loader(
    model: Annotated[Path, typer.Argument(help="Directory with a config.json; headers of safetensors are used.")],
    tp: Annotated[int, typer.Option(min=1, help="Ranks of an instance (tensor parallel).")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Ranks that share out the experts: 1, or a multiple of --tp.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Say how vLLM's loader takes each tensor of a model, and refuse what could not be exact."""
    if not model.is_dir():
        raise InvalidConfig("MODEL", f"{model} is not a directory")
    if ep > 1 and ep % tp:
        raise InvalidConfig("--ep", f"it is 1, or a multiple of --tp ({tp}); vLLM has no other layout")
    try:
        from nemo_dcr.adapters.vllm.check_loader import check_loader as check
    except ImportError as missing:
        raise OperatorNeeded(
            f"vLLM is not installed ({missing})", "make setup-vllm, or install nemo-dcr[vllm]"
        ) from None
    logging.disable(logging.WARNING)  # vLLM tells on standard output how it would configure an engine
    found = check(model, tp=tp, ep=ep)
    typer.echo(jsonlib.dumps(asdict(found)) if json else _told(found))
    if found.refused:
        raise typer.Exit(EXIT_REFUSED)


def _told(found: LoaderCheck) -> str:
    shares = ", ".join(f"{found.shares[kind]:.1%} {kind}" for kind in PathClass)
    kinds = {row.kind for row in found.rows}
    wide = max((len(kind) for kind in kinds), default=0)
    rows = [f"{row.kind:{wide}}  {row.path_class:11}  {row.way}" for row in found.rows]
    head = f"{found.served_by}, {found.layout}: {found.tensors} tensors in {len(kinds)} kinds on {found.ranks} ranks"
    verdict = f"refused: {found.refused}" if found.refused else "every tensor can be refitted exactly"
    return "\n".join([*rows, "", head, f"bytes: {shares}", verdict])


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.registered_commands += commands.registered_commands
