"""The timeline of one transition: its attempts, and below them what each node did, one row for each stage.

The axis runs from the first attempt to the end of the transition, in seconds, so that a failed attempt and its retry
stand one after the other. Finalization is drawn from the end of the last application to the end. Intervals of a row
that are nearer than a pixel are drawn as one, which says how many they are and how long they work; where there would be
too many marks, also those that are further apart. Of many nodes those are drawn that worked longest, and the picture
says how many are missing.
Not handled: clocks of hosts that differ.

Paper: Appendix C (timed window); Figure C.5; Section 8.7, Figure 11
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_dcr.report.charts import nice_ticks
from nemo_dcr.report.markup import Markup, element, joined
from nemo_dcr.report.run_story import Attempt, Transition, is_owner
from nemo_dcr.runtime.timeline import covered
from nemo_dcr.runtime.timings import Span

OWNERS_DRAWN, RECEIVERS_DRAWN = 6, 8
MARKS = 2000
"""Intervals drawn in one picture at most."""
LONGEST = 12
"""Intervals that are drawn as one are together at most so many gaps long."""
STAGES = ("construct", "encode", "publish", "download", "fetch", "verify", "decode", "apply", "baseline")
"""Rows of a node from top to bottom."""
_WIDTH, _LEFT, _RIGHT, _ROW = 940, 150, 14, 13


@dataclass(frozen=True, slots=True)
class Bar:
    """One drawn interval, in seconds from the beginning of the picture."""

    begin: float
    end: float
    tip: str
    look: str
    """Classes of the style sheet."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a picture."""

    node: str
    stage: str
    bars: tuple[Bar, ...]


Group = tuple[Span, int, float]
"""Intervals drawn as one: from the first to the last, their number, and the seconds that they cover."""


def merged(spans: Iterable[Span], gap: float) -> list[Group]:
    """Intervals in order; those nearer than `gap` seconds as one, up to `LONGEST` times as long."""
    found: list[list[Span]] = []
    reached = float("-inf")
    for span in sorted(spans, key=lambda span: span.begin):
        if found and span.begin - reached < gap and span.end - found[-1][0].begin <= LONGEST * gap:
            found[-1].append(span)
        else:
            found.append([span])
            reached = float("-inf")
        reached = max(reached, span.end)
    groups = []
    for group in found:
        whole = Span(group[0].stage, group[0].begin, max(span.end for span in group), group[0].detail)
        groups.append((whole, len(group), covered((span.begin, span.end) for span in group)))
    return groups


def window(transition: Transition) -> tuple[float, float]:
    """Begin and end of the picture, seconds since the epoch."""
    begin = transition.attempts[0].began.at
    ends = [attempt.over.at for attempt in transition.attempts if attempt.over is not None]
    ends += [span.end for span in _spans(transition.attempts)]
    if transition.ended is not None:
        ends.append(transition.ended)
    begin = min([begin, *(span.begin for span in _spans(transition.attempts))])
    return begin, max([begin + 1e-3, *ends])


def _spans(attempts: Iterable[Attempt]) -> Iterable[Span]:
    return (span for attempt in attempts for timings in attempt.nodes.values() for span in timings.spans)


def _busy(attempts: Sequence[Attempt], owners: bool) -> list[str]:
    """Names of the owners or of the receivers, those first that worked longest."""
    worked: dict[str, float] = {}
    for attempt in attempts:
        for node, timings in attempt.nodes.items():
            if is_owner(node) == owners:
                worked[node] = worked.get(node, 0.0) + covered((span.begin, span.end) for span in timings.spans)
    return sorted(worked, key=lambda node: (-worked[node], node))


def rows(transition: Transition) -> tuple[list[Row], int]:
    """What is drawn, and how many nodes are left out."""
    begin, end = window(transition)
    attempts = transition.attempts
    owners, receivers = _busy(attempts, True), _busy(attempts, False)
    shown = sorted(owners[:OWNERS_DRAWN]) + sorted(receivers[:RECEIVERS_DRAWN])
    by_row: dict[tuple[str, str], list[Span]] = {}
    for attempt in attempts:
        for node, timings in attempt.nodes.items():
            for span in timings.spans if node in shown else ():
                by_row.setdefault((node, span.stage), []).append(span)
    order = {stage: number for number, stage in enumerate(STAGES)}
    keys = sorted(by_row, key=lambda key: (shown.index(key[0]), order.get(key[1], len(order)), key[1]))
    drawn = _drawn(by_row, (end - begin) / (_WIDTH - _LEFT - _RIGHT))
    made = [Row("transition", "attempts", tuple(_attempt_bars(transition, begin, end)))]
    applied = [t.marks["apply_ended"] for a in attempts for t in a.nodes.values() if "apply_ended" in t.marks]
    if applied and transition.ended is not None:
        last, seconds = max(applied) - begin, max(0.0, transition.ended - max(applied))
        tip = f"finalization: {seconds:.3f} s from the end of the last application to the end of the transition"
        made.append(Row("transition", "finalization", (Bar(last, last + seconds, tip, "fill final"),)))
    for node, stage in keys:
        known = order.get(stage)
        look = "fill other" if known is None else f"fill s{known}"
        bars = []
        for span, number, seconds in drawn[node, stage]:
            what = f"{span.detail}" if number == 1 else f"{number} intervals"
            tip = (
                f"{node} {stage} {what}\n{span.begin - begin:.3f} s to {span.end - begin:.3f} s, works {seconds:.3f} s"
            )
            bars.append(Bar(span.begin - begin, span.end - begin, tip, look))
        made.append(Row(node, stage, tuple(bars)))
    return made, len(owners) + len(receivers) - len(shown)


def _drawn(by_row: dict[tuple[str, str], list[Span]], gap: float) -> dict[tuple[str, str], list[Group]]:
    """The intervals of all rows; those nearer than a pixel as one, or than more where there would be too many."""
    while True:
        drawn = {key: merged(spans, gap) for key, spans in by_row.items()}
        if sum(map(len, drawn.values())) <= max(MARKS, len(drawn)):
            return drawn
        gap *= 2


def _attempt_bars(transition: Transition, begin: float, end: float) -> Iterable[Bar]:
    for attempt in transition.attempts:
        over = end if attempt.over is None else attempt.over.at
        told = f"failed: {attempt.failed}" if attempt.failed else "acknowledged by every receiver"
        began = attempt.began
        tip = f"attempt {began.attempt} ({began.mode}, {began.gate} gate), {over - began.at:.3f} s\n{told}"
        yield Bar(began.at - begin, over - begin, tip, "fill failed" if attempt.failed else "fill good")


def draw(transition: Transition, identity: str) -> Markup:
    """The picture; `identity` is unique on the page."""
    made, missing = rows(transition)
    begin, end = window(transition)
    ticks = nice_ticks(end - begin)
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    parts, at, node = [], 16, ""
    for row in made:
        if row.node != node:
            at += 8
            parts.append(element("line", x1=0, x2=_WIDTH, y1=at - 4, y2=at - 4, class_="grid"))
            parts.append(element("text", row.node, x=4, y=at + _ROW - 3, class_="tick name"))
            node = row.node
        parts.append(element("text", row.stage, x=_LEFT - 6, y=at + _ROW - 3, class_="tick end"))
        parts += [_bar(bar, at, scale) for bar in row.bars]
        at += _ROW
    height = at + 26
    axis = []
    for tick in ticks:
        if tick > end - begin:
            continue
        x = f"{_LEFT + tick * scale:.1f}"
        axis.append(element("line", x1=x, x2=x, y1=16, y2=at + 4, class_="grid"))
        axis.append(element("text", f"{tick:g} s", x=x, y=at + 18, class_="tick middle"))
    about = f"{transition.name}: {len(transition.attempts)} attempts in {end - begin:.3f} s, on {len(made)} rows."
    head = (
        element("title", f"Timeline of {transition.name}", id=f"{identity}-title"),
        element("desc", about, id=f"{identity}-about"),
    )
    named = {"aria_labelledby": f"{identity}-title", "aria_describedby": f"{identity}-about"}
    drawing = element(
        "svg", *head, *axis, *parts, viewBox=f"0 0 {_WIDTH} {height}", role="img", class_="chart timeline", **named
    )
    if not missing:
        return drawing
    return joined(drawing, element("p", f"{missing} more nodes, which worked less, are not drawn.", class_="note"))


def _bar(bar: Bar, at: int, scale: float) -> Markup:
    place = {
        "x": f"{_LEFT + max(0.0, bar.begin) * scale:.1f}",
        "width": f"{max(0.7, (bar.end - max(0.0, bar.begin)) * scale):.2f}",
    }
    return element("rect", element("title", bar.tip), class_=f"mark {bar.look}", y=at + 1, height=_ROW - 2, **place)
