"""A picture of one refit from a timeline: the Chrome trace JSON of the demo or of the WAN run, drawn as bars.

One row for each node and stage, time from t0 in seconds, the refit's window and its finalization on top. The same file
opens in Perfetto, where it can be zoomed; the picture is for documents. Drawing needs matplotlib, which nothing else
here does: `pip install 'nemo-dcr[plots]'`.

    python -m nemo_dcr.testing.timeline_picture TIMELINE.json PICTURE.png [PART_OF_THE_NAME_OF_THE_REFIT]

Paper: Figure 11; Figure C.5
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_dcr.errors import InvalidConfig, OperatorNeeded

_REFITS = "refits"
_COLOURS = {
    "construct": "#4c78a8", "encode": "#9ecae9", "publish": "#f58518", "fetch": "#ffbf79", "verify": "#d4a6c8",
    "decode": "#b279a2", "apply": "#54a24b", "baseline": "#439894", "finalization": "#bab0ac",
}  # fmt: skip
_OTHER = "#e45756"
_MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class Row:
    """The intervals of one stage of one node."""

    node: str
    stage: str
    spans: tuple[tuple[float, float], ...]
    """Begin and length in seconds from t0; those that touch the window."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What is drawn."""

    name: str
    seconds: float
    """Length of the timed window."""
    rows: tuple[Row, ...]


def picture_of(trace: dict[str, Any], wanted: str = "") -> Picture:
    """The first refit of a trace whose name has `wanted` in it. Raises: InvalidConfig when there is none."""
    events = trace["traceEvents"]
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    slices = [event for event in events if event["ph"] == "X"]
    windows = [e for e in slices if nodes[e["pid"]] == _REFITS and e["name"] != "finalization"]
    found = next((window for window in windows if wanted in window["name"]), None)
    if found is None:
        names = ", ".join(window["name"] for window in windows) or "none"
        raise InvalidConfig("timeline", f"no refit has {wanted!r} in its name; the file has {names}")
    t0, t1 = found["ts"], found["ts"] + found["dur"]
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in sorted(slices, key=lambda event: (event["pid"], event["tid"])):
        if event is not found and event["ts"] < t1 and event["ts"] + event["dur"] > t0:
            span = ((event["ts"] - t0) / _MICROSECONDS, event["dur"] / _MICROSECONDS)
            spans.setdefault((event["pid"], event["name"]), []).append(span)
    rows = tuple(Row(nodes[pid], stage, tuple(sorted(intervals))) for (pid, stage), intervals in spans.items())
    return Picture(found["name"], found["dur"] / _MICROSECONDS, rows)


def draw(picture: Picture, file: Path) -> None:
    """Write the picture; the suffix of the file says how. Raises: OperatorNeeded without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OperatorNeeded("a picture needs matplotlib", "pip install 'nemo-dcr[plots]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.24 * len(picture.rows) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    for at, row in enumerate(picture.rows):
        axes.broken_barh(list(row.spans), (at - 0.4, 0.8), facecolors=_COLOURS.get(row.stage, _OTHER))
        if at and picture.rows[at - 1].node != row.node:
            axes.axhline(at - 0.5, color="#cccccc", linewidth=0.6)
    axes.axvline(picture.seconds, color="black", linewidth=0.8)
    axes.set_yticks(range(len(picture.rows)), [f"{row.node}  {row.stage}" for row in picture.rows], fontsize=7)
    axes.set_ylim(len(picture.rows) - 0.5, -0.5)
    axes.set_xlim(0, picture.seconds * 1.02)
    axes.set_xlabel("seconds from t0; the line is t1")
    axes.set_title(f"{picture.name}: {picture.seconds:.2f} s", fontsize=9)
    figure.savefig(file, dpi=130)


def main(arguments: Sequence[str]) -> None:
    """Draw what the command line names. Raises: InvalidConfig; OperatorNeeded."""
    if not 2 <= len(arguments) <= 3:
        raise InvalidConfig("arguments", "give TIMELINE.json, PICTURE.png and perhaps a part of the refit's name")
    trace = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    draw(picture_of(trace, *arguments[2:]), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
