"""Which files of the repository become pages of the site, and where their links lead there.

Pages of `docs/` keep their place. Those that lie outside are added under their own path; the README is the first page.
A link works in the repository as it is written; on the site it leads to the page that the file became, and a file that
became none (a specification, a picture) is copied as it is. The decisions enter the navigation by number.
Not handled: links from docstrings.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

HOME = "README.md"
OUTSIDE = (HOME, "PROOFS.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
OUTSIDE = (
    *OUTSIDE,
    "spec/README.md",
    "spec/proof/README.md",
    "model_tests/README.md",
    "tests/failures/README.md",
    "bench/report.md",
)
DOCS = "docs/"
LINK = re.compile(r"(?P<head>\]\()(?P<target>[^)#\s:]+)(?P<tail>(?:#[^)\s]*)?\))")
TITLE = re.compile(r"^# (?P<title>.+)$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the decisions in the navigation, by number."""
    root = _root(config)
    for entry in config.nav or []:
        if "Decisions" in entry:
            pages = sorted((root / DOCS / "decisions").glob("*.md"))
            entry["Decisions"] = [{_title(page): f"decisions/{page.name}"} for page in pages]
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside of `docs/`, and the files that pages link to."""
    root = _root(config)
    for path in OUTSIDE:
        files.append(_added(config, path, page_path(path)))
    for file in list(files.documentation_pages()):
        path = repository_path(file.src_uri)
        for target in linked(path, (root / path).read_text(encoding="utf-8")):
            place = page_path(target)
            if files.get_file_from_path(place) is None and (root / target).is_file():
                files.append(_added(config, target, place))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let the links of a page lead to what their files became on the site."""
    path = repository_path(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        target = _resolved(path, link["target"])
        if not (_root(config) / target).exists():
            return link[0]
        place = posixpath.relpath(page_path(target), posixpath.dirname(page.file.src_uri) or ".")
        return f"{link['head']}{place}{link['tail']}"

    return _outside_of_fences(markdown, lambda text: LINK.sub(moved, text))


def page_path(path: str) -> str:
    """The place on the site of a file of the repository."""
    if path == HOME:
        return "index.md"
    return path.removeprefix(DOCS)


def repository_path(place: str) -> str:
    """The file of the repository that is at this place of the site."""
    if place == "index.md":
        return HOME
    return place if place in OUTSIDE else DOCS + place


def linked(path: str, markdown: str) -> list[str]:
    """Files of the repository that a page links to, in order."""
    found: list[str] = []

    def note(text: str) -> str:
        found.extend(_resolved(path, link["target"]) for link in LINK.finditer(text))
        return text

    _outside_of_fences(markdown, note)
    return found


def _outside_of_fences(markdown: str, change: Any) -> str:
    """The text with what is no code block changed."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else change(part) for part in parts)


def _resolved(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def _added(config: MkDocsConfig, path: str, place: str) -> File:
    source = str(_root(config) / path)
    return File.generated(config, place, abs_src_path=source, inclusion=InclusionLevel.INCLUDED)


def _title(page: Path) -> str:
    found = TITLE.search(page.read_text(encoding="utf-8"))
    return page.stem if found is None else found["title"]


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
