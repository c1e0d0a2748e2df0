"""The page of a run in a real browser without a network: no error, tooltips, light and dark, keyboard, phones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_dcr.report.page import page as page_of
from nemo_dcr.report.run_story import read_run
from tests.unit.report.run_directory import write_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
HOSTILE = "</title><img src=x onerror=document.title='pwned'><script>document.title='pwned'</script>"


class Opened:
    """A page in a tab, with everything that it said, asked for and failed in."""

    def __init__(self, tab: Any, file: Path) -> None:
        self.tab = tab
        self.said: list[str] = []
        self.asked: list[str] = []
        tab.on("console", lambda message: self.said.append(message.text))
        tab.on("pageerror", lambda error: self.said.append(str(error)))
        tab.on("request", lambda request: self.asked.append(request.url))
        tab.goto(file.as_uri())


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    # Imported here: the plain installation has no Playwright, and collects this file too.
    from playwright.sync_api import sync_playwright

    program = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if program is None:
        pytest.fail(f"none of {', '.join(BROWSERS)} is here; on Debian: apt-get install chromium-headless-shell")
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses root a sandbox
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    write_run(directory, versions=4, reason=HOSTILE, kinds=(f"{HOSTILE}.weight", "model.norm.weight"))
    written = directory / "report.html"
    written.write_bytes(page_of(read_run(directory, last=9), HOSTILE))
    return written


@pytest.fixture
def opened(chromium: Any, file: Path, request: pytest.FixtureRequest) -> Iterator[Opened]:
    """The page on a screen as the test's parameters say; offline."""
    options = {"color_scheme": "light", "viewport": {"width": 1200, "height": 800}, **getattr(request, "param", {})}
    context = chromium.new_context(offline=True, **options)
    yield Opened(context.new_page(), file)
    context.close()


def test_the_page_opens_offline_without_an_error_and_asks_for_nothing(opened: Opened, file: Path) -> None:
    opened.tab.wait_for_load_state("networkidle")
    assert opened.said == []
    assert opened.asked == [file.as_uri()]
    assert opened.tab.title() == f"Run {HOSTILE}"
    assert opened.tab.locator("img").count() == 0


def test_a_hostile_script_does_not_run_even_where_it_is_put_into_the_page(opened: Opened) -> None:
    opened.tab.evaluate("document.body.append(document.createRange().createContextualFragment('<script>x=1</script>'))")
    assert opened.tab.evaluate("typeof x") == "undefined"
    assert any("Content Security Policy" in line for line in opened.said)


def test_the_screenshot_is_not_empty_and_every_picture_has_visible_marks(chromium: Any, opened: Opened) -> None:
    blank = chromium.new_page(viewport={"width": 1200, "height": 800})
    empty = len(blank.screenshot())
    blank.close()
    assert len(opened.tab.screenshot()) > 5 * empty
    pictures = opened.tab.locator("svg.chart:visible")
    assert pictures.count() >= 7
    for number in range(pictures.count()):
        picture = pictures.nth(number)
        assert picture.bounding_box()["height"] > 40
        marks = picture.locator(".fill, .line")
        assert marks.count() > 0
        box = marks.first.bounding_box()
        assert box["width"] > 0.5


def test_a_mark_tells_what_it_is_when_it_is_pointed_at_and_falls_silent_after(opened: Opened) -> None:
    tab = opened.tab
    tip = tab.locator("#tip")
    assert not tip.is_visible()
    tab.locator("svg.timeline:visible .mark.s2").first.hover()
    assert tip.is_visible()
    assert tip.inner_text().startswith("owner-0 publish")
    tab.locator("#rates-chart-title").locator("..").locator(".band").nth(1).hover()
    assert tip.inner_text().splitlines()[0] == "v2"
    assert "all source elements: " in tip.inner_text()
    tab.keyboard.press("Escape")
    assert not tip.is_visible()
    assert opened.said == []


def test_a_tooltip_holds_hostile_text_as_text(opened: Opened) -> None:
    tab = opened.tab
    tab.locator("details[name=refit] summary", has_text="version 2").click()
    tab.locator("svg.timeline:visible .mark.failed").first.hover()
    assert HOSTILE in tab.locator("#tip").inner_text()
    assert tab.title() == f"Run {HOSTILE}"
    assert tab.locator("#tip img").count() == 0


def test_one_refit_is_open_at_a_time_and_the_keyboard_opens_another(opened: Opened) -> None:
    tab = opened.tab
    refits = tab.locator("details[name=refit]")
    assert [refits.nth(number).get_attribute("open") is not None for number in range(4)] == [True, False, False, False]
    refits.nth(2).locator("summary").focus()
    tab.keyboard.press("Enter")
    assert [refits.nth(number).get_attribute("open") is not None for number in range(4)] == [False, False, True, False]


def test_light_and_dark_differ_and_both_are_readable(chromium: Any, file: Path) -> None:
    shots, grounds = [], []
    for scheme in ("light", "dark"):
        context = chromium.new_context(offline=True, color_scheme=scheme)
        opened = Opened(context.new_page(), file)
        shots.append(opened.tab.screenshot())
        colours = "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
        ground, ink = (brightness(colour) for colour in opened.tab.evaluate(colours))
        assert abs(ground - ink) > 150, "ink stands out from paper"
        grounds.append(ground)
        context.close()
    assert grounds[0] > 200 > 60 > grounds[1]
    assert shots[0] != shots[1]


def brightness(colour: str) -> float:
    """Of a colour as the browser writes it, `rgb(1, 2, 3)`: 0 to 255."""
    parts = [float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    return sum(parts) / len(parts)


@pytest.mark.parametrize("opened", [{"java_script_enabled": False}], indirect=True)
def test_without_scripts_everything_is_there_and_refits_open(opened: Opened) -> None:
    tab = opened.tab
    assert tab.locator("svg.timeline .mark title").count() > 10
    tab.locator("details[name=refit] summary", has_text="version 1").click()
    assert tab.locator("details[name=refit]", has_text="version 1").locator("svg").is_visible()


@pytest.mark.parametrize("opened", [{"viewport": {"width": 360, "height": 640}}], indirect=True)
def test_a_narrow_screen_scrolls_down_and_never_sideways(opened: Opened) -> None:
    widths = opened.tab.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert widths[0] <= widths[1]


def test_pictures_have_names_and_tables_have_heads_for_those_who_do_not_see_them(opened: Opened) -> None:
    tree = opened.tab.evaluate(
        "[...document.querySelectorAll('svg[role=img]')].map(s => ["
        "document.getElementById(s.getAttribute('aria-labelledby'))?.textContent,"
        "document.getElementById(s.getAttribute('aria-describedby'))?.textContent])"
    )
    assert tree
    assert all(name and about for name, about in tree)
    assert opened.tab.locator("table:not(:has(caption))").count() == 0
    assert opened.tab.locator("table:not(:has(th[scope=col]))").count() == 0
    assert opened.tab.locator("html[lang=en]").count() == 1
    assert opened.tab.locator("h1").count() == 1
