"""Charts of a quantity over versions, as SVG: lines for several series, bars for the parts of a sum.

A chart is drawn once, in Python, and has no script. Over each version lies a band that tells all its values when it is
pointed at; the same values stand in the table beside the chart, which is how a chart reads without eyes. Colours are
classes of the style sheet, so that light and dark differ there and nowhere else.
Not handled: what is drawn (see page).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_dcr.report.markup import Markup, element, joined, text

COLOURS = 8
"""Colour classes c0 to c7 of the style sheet."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 220, 64, 12, 10, 26


@dataclass(frozen=True, slots=True)
class Series:
    """One named row of values."""

    name: str
    values: Sequence[float | None]
    """One for each version; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What is drawn."""

    title: str
    about: str
    """One sentence for those who do not see it."""
    labels: Sequence[str]
    """Of the versions, in order."""
    series: Sequence[Series]
    unit: Callable[[float], str]
    """How a value is written."""
    stacked: bool = False
    """Bars of parts, instead of lines."""


def colour(number: int) -> str:
    """The colour class of a series."""
    return f"c{number % COLOURS}"


def nice_ticks(top: float) -> list[float]:
    """Round numbers from 0 to at least `top`, four or five of them."""
    if not top > 0:
        return [0.0, 1.0]
    raw = top / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 2.5, 5, 10) if each * power >= raw)
    return [step * number for number in range(math.ceil(top / step - 1e-9) + 1)]


def draw(chart: Chart, identity: str) -> Markup:
    """The chart with its legend; `identity` is unique on the page."""
    count = len(chart.labels)
    sums = [sum(each.values[at] or 0.0 for each in chart.series) for at in range(count)]
    highest = max((value for each in chart.series for value in each.values if value is not None), default=0.0)
    ticks = nice_ticks(max(sums, default=0.0) if chart.stacked else highest)
    across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    step = across / max(1, count)

    def x(at: int) -> float:
        return _LEFT + step * (at + 0.5)

    def y(value: float) -> float:
        return _TOP + down * (1 - value / ticks[-1])

    parts = [_axis(ticks, y, chart.unit), _labels(chart.labels, x)]
    parts += [_bars(chart, x, y, step)] if chart.stacked else [_line(e, n, x, y) for n, e in enumerate(chart.series)]
    for at, label in enumerate(chart.labels):
        told = "\n".join([label, *(f"{e.name}: {_written(e.values[at], chart.unit)}" for e in chart.series)])
        band = (f"{_LEFT + step * at:.1f}", f"{step:.2f}")
        tip = element("title", told)
        parts.append(element("rect", tip, class_="mark band", x=band[0], y=_TOP, width=band[1], height=down))
    legend = [
        element("li", element("span", class_=f"key {colour(number)}"), each.name)
        for number, each in enumerate(chart.series)
    ]
    head = (
        element("title", chart.title, id=f"{identity}-title"),
        element("desc", chart.about, id=f"{identity}-about"),
    )
    named = {"aria_labelledby": f"{identity}-title", "aria_describedby": f"{identity}-about"}
    picture = element("svg", *head, *parts, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", class_="chart", **named)
    return joined(picture, element("ul", *legend, class_="legend"))


def _written(value: float | None, unit: Callable[[float], str]) -> str:
    return "unknown" if value is None else unit(value)


def _axis(ticks: Sequence[float], y: Callable[[float], float], unit: Callable[[float], str]) -> Markup:
    lines = []
    for tick in ticks:
        at = f"{y(tick):.1f}"
        lines.append(element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=at, y2=at, class_="grid"))
        lines.append(element("text", unit(tick), x=_LEFT - 6, y=at, dy="0.35em", class_="tick end"))
    return element("g", *lines, aria_hidden="true")


def _labels(labels: Sequence[str], x: Callable[[int], float]) -> Markup:
    every = max(1, math.ceil(len(labels) / 10))
    shown = [at for at in range(len(labels)) if at % every == 0]
    texts = [element("text", labels[at], x=f"{x(at):.1f}", y=_HEIGHT - 8, class_="tick middle") for at in shown]
    return element("g", *texts, aria_hidden="true")


def _line(series: Series, number: int, x: Callable[[int], float], y: Callable[[float], float]) -> Markup:
    """A line that breaks where a value is not known; a dot for each value of a short series."""
    path, dots, pen = [], [], "M"
    for at, value in enumerate(series.values):
        if value is None:
            pen = "M"
            continue
        path.append(f"{pen}{x(at):.1f} {y(value):.1f}")
        pen = "L"
        if len(series.values) <= 60:
            dots.append(element("circle", cx=f"{x(at):.1f}", cy=f"{y(value):.1f}", r="2.5"))
    line = element("path", d="".join(path) or "M0 0", class_="line")
    return element("g", line, *dots, class_=colour(number), aria_hidden="true")


def _bars(chart: Chart, x: Callable[[int], float], y: Callable[[float], float], step: float) -> Markup:
    rects = []
    for at in range(len(chart.labels)):
        below = 0.0
        for number, each in enumerate(chart.series):
            value = each.values[at] or 0.0
            if value <= 0:
                continue
            top, bottom = y(below + value), y(below)
            below += value
            place = {"x": f"{x(at) - step * 0.38:.1f}", "y": f"{top:.1f}", "width": f"{step * 0.76:.2f}"}
            rects.append(element("rect", height=f"{bottom - top:.2f}", class_=f"fill {colour(number)}", **place))
    return element("g", *rects, aria_hidden="true")


def note(words: str) -> Markup:
    """A line in place of a chart that has nothing to show."""
    return element("p", text(words), class_="note")
