"""The page of a run: one HTML file that needs no network, no other file, and no script to be read.

Style and script stand in the page, and its content security policy allows these two by their digests and nothing else:
whatever a run put into its names, nothing of it runs or is fetched. Its size is bounded, whatever the size of the run:
so many versions, pictures, marks and rows, and each section says what it leaves out.
Not handled: what the sections show (see sections).

Paper: Section 8 (figures of the evaluation)
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from statistics import median

from nemo_dcr.report.markup import Markup, element, joined, text
from nemo_dcr.report.run_story import RunStory
from nemo_dcr.report.sections import Section, bytes_text, seconds_text, sections

REFITS_DRAWN = 8
"""Timelines on a page: those of the latest transitions, and of those with a failed attempt before them."""


def page(story: RunStory, name: str, refits: int = REFITS_DRAWN) -> bytes:
    """The whole page as UTF-8; `name` is the run's, `refits` the number of timelines."""
    made = sections(story, refits)
    style, script = _file("page.css"), _file("page.js")
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=f"{policy}; form-action 'none'"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"Run {name}"),
        element("style", style),
    )
    main = element("main", _header(story, name), _contents(made), *(_drawn(section) for section in made))
    tip = element("div", id="tip", role="presentation", hidden="")
    body = element("body", main, tip, element("script", script))
    document = joined(Markup("<!doctype html>\n"), element("html", head, body, lang="en"), "\n")
    return document.encode("utf-8", errors="replace")


def _file(name: str) -> Markup:
    """A file of this package, which is trusted as this code is."""
    return Markup(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _header(story: RunStory, name: str) -> Markup:
    begin = datetime.fromtimestamp(story.begin, UTC)
    lasted = seconds_text(story.end - story.begin)
    when = f"Began {begin:%Y-%m-%d %H:%M:%S} UTC; the last entry is {lasted} later."
    tiles = (element("li", element("b", value), element("span", what)) for what, value in _tiles(story))
    return element("header", element("h1", f"Run {name}"), element("p", when), element("ul", *tiles, class_="tiles"))


def _tiles(story: RunStory) -> list[tuple[str, str]]:
    done = [each for each in story.transitions if each.durable is not None]
    seconds = [each.seconds for each in done if each.seconds is not None]
    sent = [each.committed.count("payload_bytes") for each in done if each.committed is not None]
    failed = sum(bool(attempt.failed) for each in story.transitions for attempt in each.attempts)
    rates = [] if story.rates is None else [row for row in story.rates.versions if not row.missing]
    changed = [row.changed_elements / row.source_elements for row in rates if row.source_elements]
    return [
        (
            "versions committed",
            f"{len(done):,}" + (f" of the latest {len(story.transitions):,}" * bool(story.left_out)),
        ),
        ("attempts that failed", f"{failed:,}"),
        ("median transition", seconds_text(median(seconds)) if seconds else "unknown"),
        ("median payload", bytes_text(median(sent)) if sent else "unknown"),
        ("median change rate", f"{100 * median(changed):.3f}%" if changed else "unknown"),
        ("receivers", f"{len(story.gates):,}"),
        ("commit conflicts", f"{story.conflicts:,}"),
    ]


def _contents(made: Sequence[Section]) -> Markup:
    links = (element("li", element("a", section.title, href=f"#{section.identity}")) for section in made)
    return element("nav", element("ul", *links), aria_label="Sections")


def _drawn(section: Section) -> Markup:
    heading = element("h2", section.title, id=section.identity)
    return element("section", heading, element("p", text(section.about)), section.content)
