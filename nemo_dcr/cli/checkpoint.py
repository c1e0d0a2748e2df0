"""The commands for checkpoint files: `diff`, `apply`, `verify`, `inspect`.

Results go to standard output, as a few lines or with `--json` as one JSON object; progress goes to standard error.
"""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from tqdm import tqdm

from nemo_dcr.checkpoint.apply import ApplyReport
from nemo_dcr.checkpoint.apply import apply as apply_deltas
from nemo_dcr.checkpoint.diff import DIFF_CODEC, DiffReport
from nemo_dcr.checkpoint.diff import diff as diff_checkpoints
from nemo_dcr.checkpoint.in_place import apply_in_place
from nemo_dcr.checkpoint.inspection import Inspection
from nemo_dcr.checkpoint.inspection import inspect as inspect_files
from nemo_dcr.checkpoint.progress import SILENT, Progress
from nemo_dcr.checkpoint.verify import VerifyReport
from nemo_dcr.checkpoint.verify import verify as verify_checkpoints
from nemo_dcr.config import MIB, CodecConfig
from nemo_dcr.errors import InvalidConfig

EXIT_DIFFER = 1

commands = typer.Typer()

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bars.")]
Sync = Annotated[bool, typer.Option("--sync/--no-sync", help="Force the result to the disk before it appears.")]


class Bars:
    """A tqdm bar on standard error for each stage."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None

    def stage(self, name: str, nbytes: int) -> None:
        """See `Progress.stage`."""
        self.close()
        self._bar = tqdm(total=nbytes, desc=name, unit="B", unit_scale=True, leave=False)

    def advance(self, nbytes: int) -> None:
        """See `Progress.advance`."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.close()


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.registered_commands += commands.registered_commands


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    if quiet:
        yield SILENT
        return
    bars = Bars()
    try:
        yield bars
    finally:
        bars.close()


@commands.command()
def diff(
    old: Annotated[Path, typer.Argument(help="Hugging Face directory that receivers have.")],
    new: Annotated[Path, typer.Argument(help="Hugging Face directory that they are to have.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for the delta; new or empty.")],
    bucket_mib: Annotated[int, typer.Option(min=1, help="MiB of changed tensors behind one payload.")] = 64,
    zstd_level: Annotated[int, typer.Option(min=1, max=22, help="Higher is slower and seldom smaller.")] = 1,
    sync: Sync = True,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write what turns one checkpoint into another, bit for bit, as a directory of payloads and a manifest."""
    codec = CodecConfig(
        chunk_target_bytes=DIFF_CODEC.chunk_target_bytes, bucket_target_bytes=bucket_mib * MIB, zstd_level=zstd_level
    )
    with _progress(quiet) as progress:
        report = diff_checkpoints(old, new, out, codec=codec, sync=sync, progress=progress)
    _print(report, json, _diff_lines(report))


@commands.command()
def apply(
    base: Annotated[Path, typer.Argument(help="Hugging Face directory that the first delta was made from.")],
    deltas: Annotated[list[Path], typer.Argument(help="Delta directories, in order.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory for the result; new or empty.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Change BASE itself; a killed run can be repeated.")] = (
        False
    ),
    sync: Sync = True,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make the checkpoint that the deltas give on BASE; anything wrong is refused before a byte is written."""
    if in_place == (out is not None):
        raise InvalidConfig("--out", "give either --out DIR or --in-place")
    if in_place and not sync:
        raise InvalidConfig("--no-sync", "an application in place always forces its files to the disk; leave it out")
    with _progress(quiet) as progress:
        if out is None:
            report = apply_in_place(base, deltas, progress=progress)
        else:
            report = apply_deltas(base, deltas, out, sync=sync, progress=progress)
    _print(report, json, _apply_lines(report, base if out is None else out))


@commands.command()
def verify(
    left: Annotated[Path, typer.Argument(metavar="A", help="Hugging Face directory.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Hugging Face directory.")],
    files: Annotated[bool, typer.Option("--files", help="Compare layout, metadata and other files too.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare every stored bit of two checkpoints; the exit code is 0 when all are equal and 1 when not."""
    with _progress(quiet) as progress:
        report = verify_checkpoints(left, right, files=files, progress=progress)
    _print(report, json, _verify_lines(report))
    if not report.equal:
        raise typer.Exit(EXIT_DIFFER)


@commands.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Delta directory or payload file.")],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List what a delta or a payload holds: items, encodings, locations, sizes, digests, change rates."""
    with _progress(quiet) as progress:
        report = inspect_files(path, progress=progress)
    _print(report, json, _inspect_lines(report))


def _print(report: Any, json: bool, lines: list[str]) -> None:
    typer.echo(jsonlib.dumps(asdict(report)) if json else "\n".join(lines))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.3%}" if whole else "0%"


def _diff_lines(report: DiffReport) -> list[str]:
    return [
        f"{report.changed_tensors} of {report.tensors} tensors changed, {report.dense_tensors} new or reshaped, "
        f"{report.removed_tensors} removed",
        f"{report.changed_elements} of {report.total_elements} elements changed "
        f"({_share(report.changed_elements, report.total_elements)})",
        f"{report.payloads} payloads of {report.payload_bytes} bytes, {report.carried_files} other files",
        f"delta of {report.delta_bytes} bytes, {_share(report.delta_bytes, report.checkpoint_bytes)} of the checkpoint",
        f"base {report.base}, target {report.target}",
    ]


def _apply_lines(report: ApplyReport, place: Path) -> list[str]:
    if report.already_applied:
        return [f"{place} already is the result; nothing to do (digest {report.digest})"]
    removed = f", {report.removed_files} removed" if report.removed_files else ""
    return [
        f"{place}: {report.tensors} tensors; {report.written_files} files of {report.written_bytes} bytes written"
        f"{removed}",
        f"digest {report.digest}, read back and equal",
    ]


def _verify_lines(report: VerifyReport) -> list[str]:
    lines = [
        f"{report.differing_elements} of {report.total_elements} elements differ in {report.differing_tensors} of "
        f"{report.tensors} tensors; {report.unlike_tensors} with other dtype or shape, {report.missing_tensors} missing"
    ]
    if report.first is not None:
        first = report.first
        at = "" if first.index is None else f" at index {first.index}"
        lines.append(f"first: {first.tensor!r}{at}: {first.left or 'missing'} and {first.right or 'missing'}")
    if report.differing_files:
        lines.append(f"other files: {', '.join(report.differing_files)}")
    return [*lines, "equal" if report.equal else "different"]


def _inspect_lines(report: Inspection) -> list[str]:
    lines = []
    if report.delta is not None:
        delta = report.delta
        lines += [
            f"base {delta.base}, target {delta.target}",
            f"{delta.tensors} tensors: {delta.changed_tensors} changed, {delta.dense_tensors} dense, "
            f"{delta.unchanged_tensors} unchanged; {len(delta.removed_tensors)} removed",
            f"{delta.changed_elements} of {delta.total_elements} elements changed "
            f"({_share(delta.changed_elements, delta.total_elements)})",
            f"{report.nbytes} bytes, {_share(report.nbytes, delta.checkpoint_bytes)} of the checkpoint",
            f"other files: {len(delta.carried_files)} carried, {len(delta.kept_files)} kept, "
            f"{len(delta.removed_files)} removed",
        ]
    for payload in report.payloads:
        lines.append(
            f"{payload.file}: {payload.nbytes} bytes, {len(payload.items)} items, key {payload.key}, "
            f"digest {payload.digest}"
        )
        lines += [
            f"  {item.tensor}  {item.dtype} {list(item.shape)}  {item.encoding} {item.location}  "
            f"{item.changed} changed ({item.rate:.3%})  {item.location_bytes} + {item.value_bytes} bytes"
            for item in payload.items
        ]
    counts = (*report.encodings.items(), *report.locations.items())
    return [*lines, "items: " + ", ".join(f"{count} {name}" for name, count in counts)]
