"""HTML and SVG as text that is escaped wherever it did not come from here.

An element takes children and attributes. Plain text among them is escaped, whoever wrote it; only what `element` made
is markup. Characters that no page may hold become U+FFFD, and text is cut at a length, so that a hostile or endless
name stays a short text.
Not handled: scripts and styles, whose text HTML does not escape (see page, which takes them from files of the package).
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

LONGEST = 600
"""Characters kept of one text."""
_VOID = frozenset({"meta", "br", "hr"})
_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: str | float) -> Markup:
    """A value as escaped text; markup stays as it is."""
    if isinstance(value, Markup):
        return value
    plain = str(value)
    cut = plain if len(plain) <= LONGEST else f"{plain[: LONGEST - 1]}…"
    return Markup(html.escape(_FORBIDDEN.sub("\ufffd", cut)))


def element(name: str, /, *children: str | float, **attributes: str | float | None) -> Markup:
    """One element. `class_` stands for class and `_` for `-`; an attribute that is None is left out."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{''.join(text(child) for child in children)}</{name}>")


def joined(*parts: str | float) -> Markup:
    """Parts one after the other."""
    return Markup("".join(text(part) for part in parts))


def table(caption: str, head: tuple[str, ...], rows: Sequence[tuple[str | float, ...]]) -> Markup:
    """A table; the first cell of a row is its heading."""
    heads = element("tr", *(element("th", cell, scope="col") for cell in head))
    body = [
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    ]
    parts = (element("caption", caption), element("thead", heads), element("tbody", *body))
    return element("div", element("table", *parts), class_="scroll", tabindex="0", role="region", aria_label=caption)
