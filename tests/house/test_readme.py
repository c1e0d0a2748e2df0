"""What the README says is true: its example runs, its commands exist, and CI calls the same ones."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = re.compile(r"^```python\n(.*?)^```$\n*^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
COMMAND = re.compile(r"(?:^|`|; |LE=\w+ )make ([a-z][a-z-]*)", re.MULTILINE)
HELPED = re.compile(r"^([a-z-]+):[^#\n]*## \S", re.MULTILINE)


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def makefile(root: Path) -> str:
    return (root / "Makefile").read_text(encoding="utf-8")


def test_python_example_has_twenty_lines_and_prints_what_the_readme_shows(readme, tmp_path):
    ((source, expected),) = EXAMPLE.findall(readme)
    assert len([line for line in source.splitlines() if line.strip()]) <= 20
    (tmp_path / "example.py").write_text(source, encoding="utf-8")
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == (expected, "", 0)


def test_commands_in_the_pages_exist(root, makefile):
    targets = set(TARGET.findall(makefile))
    pages = [root / name for name in ("README.md", "CONTRIBUTING.md")]
    named = {name for page in pages for name in COMMAND.findall(page.read_text(encoding="utf-8"))}
    assert {"demo", "test"} <= named
    assert sorted(named - targets) == []


def test_demo_options_in_the_pages_exist(root, readme):
    shown = subprocess.run(
        [Path(sys.executable).parent / "nemo-dcr", "demo", "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
    ).stdout
    text = readme + (root / ".ci/run").read_text(encoding="utf-8")
    named = {
        option for line in text.splitlines() if "nemo-dcr demo" in line for option in re.findall(r"--[a-z-]+", line)
    }
    assert {"--steps", "--json"} <= named
    assert sorted(option for option in named if option not in shown) == []


def test_make_help_lists_every_target(root, makefile):
    shown = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True).stdout
    listed = {line.split()[1] for line in shown.splitlines() if line.startswith("  make ")}
    assert listed == set(TARGET.findall(makefile)) == set(HELPED.findall(makefile))


def test_ci_runs_the_commands_of_the_readme(root):
    script = root / ".ci/run"
    steps = re.findall(r"^step \w+ (.*)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert {"make setup", "make check", "make test"} <= set(steps)
    assert script.stat().st_mode & stat.S_IXUSR


def test_extras_and_pins_speak_of_the_same_packages(root):
    pins = (root / "requirements/constraints.txt").read_text(encoding="utf-8")
    pinned = set(re.findall(r"^([\w-]+)==[\w.]+$", pins, re.MULTILINE))
    needed = set(re.findall(r'^\s*"([\w-]+)[<>=]', (root / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE))
    assert sorted(needed - pinned - {"setuptools"}) == []
    checkpoint = (root / "requirements/checkpoint.txt").read_text(encoding="utf-8")
    assert all(line in pins for line in checkpoint.splitlines() if not line.startswith("#"))


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("#!/bin/sh\nexit 1\n", "Python 3.11 or newer is needed"),
        ('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\n', "apt-get install python3-venv"),
    ],
)
def test_setup_says_in_one_line_what_the_machine_lacks(script, line, root, tmp_path):
    shutil.copytree(root / "requirements", tmp_path / "requirements")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(root / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(script, encoding="utf-8")
    python.chmod(0o755)
    # These tests run under `make check` too; a nested make would number itself and inherit its flags.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "setup", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, text=True)
    said = [row for row in done.stderr.splitlines() if not row.startswith("make:")]
    assert (done.returncode, len(said)) == (2, 1)
    assert line in said[0]
    assert not (tmp_path / ".venv").exists()
