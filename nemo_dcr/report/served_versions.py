"""Which version each receiver served, and when its gate was closed, as strips over the whole run.

A strip is drawn from each opening of a gate to its next move, in two shades that take turns with the versions; between
them the gate was closed. Of very many receivers and moves the latest are drawn, and the picture says how many are not.
Not handled: receivers that never opened their gate (they have no strip and stand in the table).

Paper: Section 8.7 (receivers over a failure)   Spec: OpenGate, CloseGate
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_dcr.ids import Version
from nemo_dcr.report.charts import nice_ticks
from nemo_dcr.report.markup import Markup, element, joined
from nemo_dcr.report.run_story import RunStory
from nemo_dcr.runtime.chronicle import GateMoved

RECEIVERS_DRAWN = 48
STRIPS = 2400
"""Strips in the picture at most."""
_WIDTH, _LEFT, _RIGHT, _ROW = 940, 150, 14, 16


@dataclass(frozen=True, slots=True)
class Served:
    """One receiver."""

    receiver: str
    strips: tuple[tuple[float, float, Version], ...]
    """Begin, end and version of every open gate; seconds since the epoch."""
    closed_s: float
    """Seconds with a closed gate, from the first opening on."""

    @property
    def last(self) -> Version | None:
        """The version served last; None when the gate never opened."""
        return self.strips[-1][2] if self.strips else None


def served_by(receiver: str, moves: list[GateMoved], end: float) -> Served:
    """The strips of one receiver; a gate that is still open is drawn to `end`."""
    strips: list[tuple[float, float, Version]] = []
    opened: GateMoved | None = None
    for move in moves:
        if opened is not None and opened.version is not None:
            strips.append((opened.at, move.at, opened.version))
        opened = move if move.is_open else None
    if opened is not None and opened.version is not None:
        strips.append((opened.at, max(end, opened.at), opened.version))
    open_s = sum(strip[1] - strip[0] for strip in strips)
    return Served(receiver, tuple(strips), max(0.0, end - strips[0][0] - open_s) if strips else 0.0)


def draw(story: RunStory, identity: str) -> Markup:
    """The picture; `identity` is unique on the page."""
    served = [served_by(receiver, moves, story.end) for receiver, moves in story.gates.items()]
    shown = served[:RECEIVERS_DRAWN]
    each = max(1, STRIPS // max(1, len(shown)))
    cut = sum(max(0, len(row.strips) - each) for row in shown)
    kept = {row.receiver: row.strips[-each:] for row in shown}
    begin = min((strips[0][0] for strips in kept.values() if strips), default=story.begin)
    seconds = max(1e-3, story.end - begin)
    scale = (_WIDTH - _LEFT - _RIGHT) / seconds
    parts, height = [], 12 + _ROW * len(shown)
    for tick in nice_ticks(seconds):
        if tick <= seconds:
            x = f"{_LEFT + tick * scale:.1f}"
            parts.append(element("line", x1=x, x2=x, y1=8, y2=height, class_="grid"))
            parts.append(element("text", f"{tick:g} s", x=x, y=height + 14, class_="tick middle"))
    for number, row in enumerate(shown):
        y = 10 + _ROW * number
        parts.append(element("text", row.receiver, x=_LEFT - 6, y=y + _ROW - 5, class_="tick end"))
        for opened, closed, version in kept[row.receiver]:
            tip = (
                f"{row.receiver} serves version {version}\nfor {closed - opened:.3f} s, from {opened - begin:.3f} s on"
            )
            place = {"x": f"{_LEFT + (opened - begin) * scale:.1f}", "width": f"{(closed - opened) * scale:.2f}"}
            look = f"mark fill v{version % 2}"
            parts.append(element("rect", element("title", tip), class_=look, y=y, height=_ROW - 4, **place))
    head = (
        element("title", "Versions served by each receiver", id=f"{identity}-title"),
        element("desc", f"{len(shown)} receivers over {seconds:.1f} s; gaps are closed gates.", id=f"{identity}-about"),
    )
    named = {"aria_labelledby": f"{identity}-title", "aria_describedby": f"{identity}-about"}
    picture = element("svg", *head, *parts, viewBox=f"0 0 {_WIDTH} {height + 22}", role="img", class_="chart", **named)
    told = []
    if len(served) > len(shown):
        told.append(f"{len(served) - len(shown)} more receivers are not drawn.")
    if cut:
        told.append(f"{cut} earlier strips are not drawn.")
    return joined(picture, element("p", " ".join(told), class_="note")) if told else picture
