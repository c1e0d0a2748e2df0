"""The sections of a page: refits, seconds by stage, rates of change, payloads, retries and recoveries, versions served.

Each section is a heading, one sentence on what is shown, pictures, and the same figures as a table that is folded away.
Tables and pictures have bounded numbers of rows and marks.
Not handled: how a picture is drawn (see charts, refit_timeline, served_versions).

Paper: Section 1 (Figure 2); Section 8; Appendix C; Appendix D
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from nemo_dcr.report import refit_timeline, served_versions
from nemo_dcr.report.charts import COLOURS, Chart, Series, draw, note
from nemo_dcr.report.markup import Markup, element, joined, table
from nemo_dcr.report.run_story import RunStory, Transition
from nemo_dcr.runtime.change_rates import RunRates, rate
from nemo_dcr.runtime.chronicle import TookOver

ROWS = 200
"""Rows of one table at most."""
KINDS = 40
"""Kinds of tensors in the table at most; COLOURS of them are drawn."""
_STAGES = ("construct", "encode", "publish", "fetch", "decode", "apply", "baseline")


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page."""

    identity: str
    title: str
    about: str
    content: Markup


def seconds_text(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def bytes_text(count: float) -> str:
    """Bytes in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def percent(fraction: float) -> str:
    """A fraction as percents."""
    return f"{100 * fraction:.3g}%"


def sections(story: RunStory, refits: int) -> list[Section]:
    """All sections; `refits` is the number of timelines."""
    left = f" {story.left_out:,} earlier transitions are left out." if story.left_out else ""
    return [
        Section(
            "refits",
            "Refits",
            "Each transition from its first attempt to its end: what owners, transport and receivers did, and how long "
            f"finalization took. Open one to see it.{left}",
            _refits(story, refits),
        ),
        Section(
            "stages",
            "Seconds by stage",
            "Seconds of each stage on its slowest node, in the committed attempt. Stages overlap: they do not add up.",
            _stages(story),
        ),
        Section(
            "rates",
            "Change rate by kind of tensor",
            "Share of the elements of each kind whose stored bits a version changed; a kind is a name without its "
            "numbers.",
            _rates(story.rates),
        ),
        Section(
            "payloads",
            "Payload composition",
            "Bytes that the owners published for each version, those of failed attempts too, and the items of the "
            "committed attempt by encoding.",
            _payloads(story),
        ),
        Section(
            "recoveries",
            "Retries and recoveries",
            "Attempts that failed, candidates that were given up, restores, and coordinators that took over.",
            _recoveries(story),
        ),
        Section(
            "versions",
            "Versions served",
            "What each receiver served over time; two shades take turns with the versions, and a gap is a closed gate.",
            _versions(story),
        ),
    ]


def _folded(caption: str, head: tuple[str, ...], rows: Sequence[tuple[str | float, ...]]) -> Markup:
    """A table behind its summary, cut to its last rows."""
    cut = len(rows) - ROWS
    kept = f"{caption}, the last {ROWS} of {len(rows)}" if cut > 0 else caption
    return element("details", element("summary", kept), table(kept, head, rows[-ROWS:]))


def _refits(story: RunStory, refits: int) -> Markup:
    if not story.transitions:
        return note("No transition was told.")
    latest = story.transitions[-refits:]
    failed = [t for t in story.transitions[:-refits] if any(attempt.failed for attempt in t.attempts)][-refits:]
    drawn = []
    for number, each in enumerate(reversed([*failed, *latest])):
        parts = (element("summary", _summary(each)), refit_timeline.draw(each, f"refit-{number}"))
        # One of them is open at a time, as its name says to the browser.
        drawn.append(element("details", *parts, name="refit", open="" if number == 0 else None))
    rows = [
        (each.name, _ended(each), len(each.attempts), _seconds(each.seconds), _sent(each), each.candidate)
        for each in story.transitions
    ]
    head = ("transition", "outcome", "attempts", "seconds", "payload", "candidate")
    return joined(*drawn, _folded("All transitions", head, rows))


def _summary(each: Transition) -> str:
    attempts = f"{len(each.attempts)} {'attempt' if len(each.attempts) == 1 else 'attempts'}"
    return f"{each.name}: {_ended(each)}, {attempts}, {_seconds(each.seconds)}, {_sent(each)}"


def _ended(each: Transition) -> str:
    if each.given_up is not None:
        return "given up"
    if each.durable is None:
        return "no end was told"
    return "committed" if each.ended is not None else "committed, end not told"


def _seconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3f} s"


def _sent(each: Transition) -> str:
    return bytes_text(sum(attempt.count("payload_bytes") for attempt in each.attempts))


def _committed(story: RunStory) -> list[Transition]:
    return [each for each in story.transitions if each.committed is not None and each.durable is not None]


def _labels(done: list[Transition]) -> list[str]:
    return [f"v{each.durable.version}" for each in done if each.durable is not None]


def _chart(chart: Chart, identity: str, unit: Callable[[float], str]) -> Markup:
    rows: list[tuple[str | float, ...]] = [
        (label, *("unknown" if each.values[at] is None else unit(each.values[at] or 0.0) for each in chart.series))
        for at, label in enumerate(chart.labels)
    ]
    head = ("version", *(each.name for each in chart.series))
    return joined(element("h3", chart.title), draw(chart, identity), _folded(f"{chart.title} as a table", head, rows))


def _stages(story: RunStory) -> Markup:
    done = _committed(story)
    if not done:
        return note("No committed attempt was measured.")
    attempts = [each.committed for each in done]
    series = [Series("transition", [each.seconds for each in done])]
    series += [Series(stage, [None if a is None else a.slowest(stage) for a in attempts]) for stage in _STAGES]
    about = "Lines over the committed versions, one for the whole transition and one for each stage."
    return _chart(Chart("Seconds", about, _labels(done), series, seconds_text), "stages-chart", seconds_text)


def _rates(rates: RunRates | None) -> Markup:
    if rates is None or not rates.versions:
        return note("No owner wrote what changed.")
    rows = rates.versions[-ROWS:]
    kinds = sorted(rates.elements, key=lambda kind: (-rates.elements[kind], kind))
    total = Series("all source elements", [rate(row.changed_elements, row.source_elements, row) for row in rows])
    drawn = kinds[: COLOURS - 1]
    series = [total, *(Series(kind, [rate(r.kinds[kind], rates.elements[kind], r) for r in rows]) for kind in drawn)]
    labels = [f"v{row.version}" for row in rows]
    about = "Lines over the committed versions, one for all elements and one for each of the largest kinds."
    picture = _chart(Chart("Rates of the largest kinds", about, labels, series, percent), "rates-chart", percent)
    latest = rows[-1]
    cells: list[tuple[str | float, ...]] = []
    for kind in islice(kinds, KINDS):
        found = rate(latest.kinds[kind], rates.elements[kind], latest)
        cells.append((kind, f"{rates.elements[kind]:,}", "unknown" if found is None else percent(found)))
    left = f", the largest {KINDS} of {len(kinds)}" if len(kinds) > KINDS else ""
    return joined(picture, _folded(f"Kinds in version {latest.version}{left}", ("kind", "elements", "changed"), cells))


def _payloads(story: RunStory) -> Markup:
    done = _committed(story)
    if not done:
        return note("No committed attempt was measured.")
    good = [0 if each.committed is None else each.committed.count("payload_bytes") for each in done]
    every = [sum(attempt.count("payload_bytes") for attempt in each.attempts) for each in done]
    lost = [whole - part for whole, part in zip(every, good, strict=True)]
    sent = [Series("committed attempt", good), Series("failed attempts", lost)]
    about = "Bars over the committed versions: bytes of the committed attempt, and of those before it."
    size = Chart("Published bytes", about, _labels(done), sent, bytes_text, stacked=True)
    attempts = [each.committed for each in done]
    items = [
        Series(name, [0 if a is None else a.count(key) for a in attempts])
        for name, key in (("XOR items", "xor_items"), ("overwrite items", "overwrite_items"))
    ]
    about = "Bars over the committed versions: items that carry XOR masks, and items that carry values."
    mix = Chart("Items by encoding", about, _labels(done), items, lambda value: f"{value:,.0f}", stacked=True)
    elements = [
        Series(name, [0 if a is None else a.count(key) for a in attempts])
        for name, key in (("emitted elements", "emitted"), ("of them changed", "emitted_changed"))
    ]
    about = "Lines over the committed versions: canonical elements with a record, and those whose bits changed."
    count = Chart("Elements", about, _labels(done), elements, lambda value: f"{value:,.0f}")
    return joined(
        _chart(size, "bytes-chart", bytes_text),
        _chart(mix, "items-chart", lambda value: f"{value:,.0f}"),
        _chart(count, "elements-chart", lambda value: f"{value:,.0f}"),
    )


def _recoveries(story: RunStory) -> Markup:
    rows: list[tuple[float, tuple[str | float, ...]]] = []

    def note_row(at: float, what: str, subject: str, told: str) -> None:
        rows.append((at, (f"{at - story.begin:.3f} s", what, subject, told)))

    for each in story.transitions:
        for attempt in each.attempts:
            if attempt.failed:
                began, over = attempt.began, attempt.over
                lasted = "" if over is None else f" after {over.at - began.at:.3f} s"
                subject = f"attempt {began.attempt} ({began.mode}) of {each.name}"
                note_row(began.at if over is None else over.at, "attempt failed", subject, attempt.failed + lasted)
        if each.given_up is not None:
            note_row(
                each.given_up.at, "candidate given up", each.candidate, each.given_up.reason or "an abort was asked"
            )
    for attempt in story.recoveries:
        told = attempt.failed or "acknowledged"
        subject = f"attempt {attempt.began.attempt}: {', '.join(attempt.began.receivers)}"
        note_row(attempt.began.at, attempt.began.mode, subject, told)
    for node, entry in story.takeovers:
        if isinstance(entry, TookOver):
            note_row(entry.at, "coordinator took over", node, f"epoch {entry.epoch}")
        else:
            note_row(entry.at, "coordinator was replaced", node, entry.reason)
    if not rows:
        return note("Nothing failed, and nothing was recovered.")
    shown = [cells for _, cells in sorted(rows, key=lambda row: row[0])][-ROWS:]
    left = f", the last {ROWS} of {len(rows)}" if len(rows) > ROWS else ""
    return table(f"In order of time{left}", ("time", "what", "who", "told"), shown)


def _versions(story: RunStory) -> Markup:
    if not story.gates:
        return note("No receiver told of its gate.")
    served = [served_versions.served_by(name, moves, story.end) for name, moves in story.gates.items()]
    rows: list[tuple[str | float, ...]] = [
        (row.receiver, "none" if row.last is None else row.last, len(row.strips), f"{row.closed_s:.3f} s")
        for row in served
    ]
    head = ("receiver", "last version", "openings", "gate closed")
    return joined(served_versions.draw(story, "versions-chart"), _folded("All receivers", head, rows))
