"""The site holds every page of the repository, and a fault in one of them fails its build."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("bench", "docs", "spec", "model_tests", "nemo_dcr", "tests/failures")
HREF = re.compile(r'href="(?!https?:|#|mailto:|data:)([^"#?]+)[^"]*"')
QUIET = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}


def pages() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, check=True, capture_output=True)
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name]


def build(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "mkdocs"
    return subprocess.run([program, "build", "--strict"], cwd=root, env=QUIET, capture_output=True, text=True)


def test_every_page_of_the_repository_is_on_the_site():
    built = ROOT / "build/docs"
    missing = []
    for page in pages():
        path = page.relative_to(ROOT).as_posix().removeprefix("docs/")
        place = re.sub(r"(README)?\.md$", lambda end: "index.html" if end[1] else ".html", path)
        if not (built / place).is_file():
            missing.append(path)
    assert missing == []


def test_every_link_of_the_site_leads_to_a_file():
    broken = []
    for file in (ROOT / "build/docs").rglob("*.html"):
        if file.name == "404.html":
            continue
        text = file.read_text(encoding="utf-8")
        broken += [f"{file.name}: {link}" for link in HREF.findall(text) if not (file.parent / link).exists()]
    assert broken == []


def test_a_broken_link_anchor_or_name_and_a_page_left_out_fail_the_build(tmp_path):
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(file, tmp_path)
    glossary = tmp_path / "docs/glossary.md"
    text = glossary.read_text(encoding="utf-8")
    glossary.write_text(f"{text}\n[a](nowhere.md) [b](trace.md#nowhere)\n", encoding="utf-8")
    (tmp_path / "docs/forgotten.md").write_text("# Forgotten\n", encoding="utf-8")
    done = build(tmp_path)
    assert done.returncode != 0
    assert all(word in done.stderr for word in ("nowhere.md", "#nowhere", "forgotten.md"))
    glossary.write_text(text, encoding="utf-8")
    (tmp_path / "docs/forgotten.md").unlink()
    (tmp_path / "docs/api.md").write_text("# API\n\n::: nemo_dcr.config.NoSuchName\n", encoding="utf-8")
    done = build(tmp_path)
    assert done.returncode != 0
    assert "nemo_dcr.config.NoSuchName" in done.stderr
