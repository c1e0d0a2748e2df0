"""Files, modules and names of the package that a page names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.documents.blocks import ROOT
from tests.documents.test_document_blocks import PAGES

FILE = re.compile(r"`((?:nemo_dcr|tests|spec|model_tests|examples|requirements)/[\w/.-]+?)/?(?: [^`]*)?`")
DOTTED = re.compile(r"`?(?<![\w./])(nemo_dcr(?:\.\w+)+)")
HISTORY = {"CHANGELOG.md"}
"""What a version brought may be gone in a later one."""


@cache
def defined(path: Path) -> frozenset[str]:
    """Names that a module defines or imports at its top, and `Class.member` for what a class holds."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            members = [each for each in ast.walk(node) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{each.name}" for each in members}
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {f"{node.name}.{each.id}" for each in fields if isinstance(each, ast.Name)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found)


def resolves(dotted: str, root: Path = ROOT) -> bool:
    """Whether a dotted name is a package, a module, or something that a module defines."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = root.joinpath(*parts[:length])
        rest = ".".join(parts[length:])
        module = place.with_suffix(".py") if place.with_suffix(".py").is_file() else place / "__init__.py"
        if module.is_file():
            return not rest or rest in defined(module)
    return False


def test_files_that_a_page_names_exist():
    missing = [
        f"{page}: {path}"
        for page, text in PAGES.items()
        if page not in HISTORY
        for path in FILE.findall(text)
        if "*" not in path and not (ROOT / path).exists()
    ]
    assert missing == []


def test_modules_and_names_that_a_page_names_exist():
    named = [(page, name) for page, text in PAGES.items() if page not in HISTORY for name in DOTTED.findall(text)]
    assert len(named) > 100
    assert [f"{page}: {name}" for page, name in named if not resolves(name)] == []


def test_a_name_that_does_not_exist_is_found():
    assert resolves("nemo_dcr.config.RefitConfig")
    assert resolves("nemo_dcr.config.RefitConfig.heartbeat_s")
    assert resolves("nemo_dcr.adapters.owner.Owner.from_module")
    assert resolves("nemo_dcr.control.open_control")
    for name in ("nemo_dcr.nowhere", "nemo_dcr.config.Absent", "nemo_dcr.config.RefitConfig.absent"):
        assert not resolves(name)
    assert FILE.findall("in `nemo_dcr/codec/buckets.py` or `spec/`") == ["nemo_dcr/codec/buckets.py"]
