"""What the house rules look at: every module of the package, every test, every file of the checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.house.modules import ROOT, Module, parse, read_tree


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
