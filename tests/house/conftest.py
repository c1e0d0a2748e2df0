"""What the house rules look at: every module of the package, every test, every file of the checkout."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One parsed Python file."""

    path: str
    """Relative to the repository root, with forward slashes."""
    name: str
    """Dotted name; a package carries its own name, without `__init__`."""
    text: str
    tree: ast.Module


def parse(path: str, text: str) -> Module:
    """Parse source text under a path that need not exist, so that a rule can be tried on a bad example."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return Module(path, ".".join(parts), text, ast.parse(text))


def read_tree(*folders: str) -> tuple[Module, ...]:
    """All Python files under the folders, sorted by path."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return tuple(parse(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files)


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def package() -> tuple[Module, ...]:
    """Modules of nemo_dcr."""
    return read_tree("nemo_dcr")


@pytest.fixture(scope="session")
def tests() -> tuple[Module, ...]:
    """Modules of tests and model_tests."""
    return read_tree("tests", "model_tests")


@pytest.fixture(scope="session")
def checkout() -> tuple[Path, ...]:
    """Files that are tracked or would be: everything that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    files = (ROOT / name for name in sorted(set(listed.stdout.decode().split("\0"))) if name)
    return tuple(file for file in files if file.is_file())


@pytest.fixture(scope="session")
def parse_module():
    """The parser, for the self-tests of the rules."""
    return parse
