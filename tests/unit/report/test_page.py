"""The page: nothing of a run's names becomes markup, nothing is fetched, and its size is bounded."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from nemo_dcr.report.charts import Chart, Series, draw, nice_ticks
from nemo_dcr.report.markup import LONGEST, Markup, element, text
from nemo_dcr.report.page import page
from nemo_dcr.report.run_story import read_run
from tests.unit.report.run_directory import write_run

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\x00\x1b[31m</svg></title>‮"
FILE_NAME = HOSTILE.replace("/", "").replace("\x00", "")
VOID = {"meta", "br", "hr"}


class Elements(HTMLParser):
    """Every element with its attributes, and whether all of them are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def elements(content: bytes) -> Elements:
    parser = Elements()
    parser.feed(content.decode())
    parser.close()
    assert parser.open == []
    return parser


def test_text_is_escaped_markup_is_not_and_forbidden_characters_are_replaced() -> None:
    made = element("b", "<i>", element("i", "a&b"), title='"x"', class_="k", aria_label=None)
    assert made == '<b title="&quot;x&quot;" class="k">&lt;i&gt;<i>a&amp;b</i></b>'
    assert text("a\x00\x1bb\ud800") == "a\ufffd\ufffdb\ufffd"
    assert len(text("x" * 10_000)) == LONGEST
    assert text(Markup("<br>")) == "<br>"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Elements:
    directory = write_run(
        tmp_path_factory.mktemp("run"),
        receivers=(f"{FILE_NAME}/0", "e1/0"),
        kinds=(f"{HOSTILE}.weight", "norm.weight"),
        reason=f"receiver {HOSTILE} is lost",
        coordinator=f"coordinator-{FILE_NAME}",
    )
    return elements(page(read_run(directory, last=9), HOSTILE))


def test_hostile_names_stay_text_and_bring_no_element_and_no_handler(hostile: Elements) -> None:
    names = {name for name, _ in hostile.found}
    assert names <= {
        *(
            "html",
            "head",
            "meta",
            "title",
            "style",
            "script",
            "body",
            "main",
            "header",
            "h1",
            "h2",
            "h3",
            "p",
            "ul",
            "li",
        ),
        *("b", "span", "nav", "a", "section", "details", "summary", "div", "table", "caption", "thead", "tbody", "tr"),
        *("th", "td", "svg", "desc", "line", "text", "g", "path", "circle", "rect"),
    }
    assert sum(name == "script" for name, _ in hostile.found) == 1
    assert not [key for _, attributes in hostile.found for key in attributes if key.startswith("on") or key == "style"]
    assert any("<script>alert(1)</script>" in words for words in hostile.words)


def test_the_page_refers_to_nothing_outside_itself(hostile: Elements) -> None:
    references = [
        value
        for _, attributes in hostile.found
        for key, value in attributes.items()
        if key in ("src", "href", "data", "action", "srcset", "xlink:href", "poster")
    ]
    assert references
    assert all(value is not None and value.startswith("#") for value in references)
    identities = [attributes["id"] for _, attributes in hostile.found if "id" in attributes]
    assert len(set(identities)) == len(identities)
    assert {reference[1:] for reference in references if reference} <= set(identities)
    named = [v for _, a in hostile.found for k, v in a.items() if k in ("aria-labelledby", "aria-describedby")]
    assert set(named) <= set(identities)


def test_the_policy_of_the_page_allows_its_own_style_and_script_and_nothing_else(tmp_path: Path) -> None:
    content = page(read_run(write_run(tmp_path), last=9), "r").decode()
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', content)
    assert found is not None
    policy = found[1].replace("&#x27;", "'")
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for name in ("style", "script"):
        body = re.search(f"<{name}>(.*?)</{name}>", content, re.DOTALL)
        assert body is not None
        digest = base64.b64encode(hashlib.sha256(body[1].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy


def test_the_page_of_a_very_long_run_is_bounded(tmp_path: Path) -> None:
    names = tuple(f"engine-{number}/0" for number in range(50))
    kinds = tuple(f"model.block{number}.weight" for number in range(150))
    write_run(tmp_path, versions=130, receivers=names, owners=8, kinds=kinds, payloads=4, failing=frozenset({7, 125}))
    content = page(read_run(tmp_path, last=100), "long")
    assert len(content) < 2_500_000
    words = content.decode()
    assert "30 earlier transitions are left out." in words
    assert "2 more receivers are not drawn." in words
    assert "the largest 40 of 150" in words


def test_a_run_of_which_nothing_is_known_yet_has_a_page_that_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, versions=0, receivers=())
    words = page(read_run(tmp_path, last=9), "young").decode()
    for note in ("No transition was told.", "No committed attempt was measured.", "No receiver told of its gate."):
        assert note in words


def test_a_chart_breaks_its_line_where_a_value_is_not_known() -> None:
    chart = Chart("t", "a", ("v1", "v2", "v3"), (Series("s", (1.0, None, 2.0)),), lambda value: f"{value:g}")
    drawn = draw(chart, "i")
    found = re.search(r'<path d="([^"]*)"', drawn)
    assert found is not None
    assert found[1].count("M") == 2
    assert "v2\ns: unknown" in drawn


def test_ticks_are_round_and_reach_the_highest_value() -> None:
    assert nice_ticks(0.0) == [0.0, 1.0]
    for top in (1e-6, 0.3, 1.0, 7.0, 12.0, 1e9):
        ticks = nice_ticks(top)
        assert ticks[0] == 0.0
        assert top <= ticks[-1] <= top * 2
        assert 3 <= len(ticks) <= 6


def test_the_command_writes_the_page_and_says_what_is_in_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(f"{out}: 3 transitions, ")
    assert out.read_bytes().startswith(b"<!doctype html>")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".report")] == []
    missing = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "no" / "page.html")])
    assert "could not be written" in str(missing.exception)
