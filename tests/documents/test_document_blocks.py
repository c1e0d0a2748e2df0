"""Every code block of every page runs: here, or in a test that its mark names, or it is listed here with its reason."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec

import pytest
import typer
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from tests.documents.blocks import PARSED, ROOT, Block, blocks_of, ci_targets, unexplained
from tests.documents.scenes import SCENES

PYTHON = ".venv/bin/python"
CI = ci_targets((ROOT / ".ci/run").read_text(encoding="utf-8"))

NOT_RUN = {
    "docs/chaos.md": [
        f"{PYTHON} -m nemo_dcr.cli.chaos --record s3",
        f"{PYTHON} -m nemo_dcr.cli.chaos --seed",
        f"{PYTHON} -m nemo_dcr.cli.chaos --transitions",
        "make chaos N=",
    ],
    "docs/rl-run.md": [
        "make grpo",
        "make grpo STEPS=50",
        "python -m examples.grpo.run --methods relay",
        "python -m examples.grpo.run --methods store,relay",
    ],
    "docs/tutorial.md": ["cd nemo-dcr", "git clone"],
    "docs/wan.md": [
        "make wan ARGS=",
        "make wan DIRECTORY=",
        "make wan-all",
        "make wan-all ARGS=",
    ],
    "model_tests/README.md": [f"{PYTHON} -m model_tests.mutants", "HYPOTHESIS_PROFILE=long make model"],
    "spec/README.md": [f"{PYTHON} spec/tlc.py graph", f"{PYTHON} spec/tlc.py run", "make spec-deep"],
}
"""The beginning of each command that no test runs, by page. The page says why, in the mark above the block."""


def tracked_pages() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = sorted(name for name in listed.stdout.decode().split("\0") if (ROOT / name).is_file() and name)
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in names}


PAGES = tracked_pages()
BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]
HERE = [
    (block, command, mark.value)
    for block in BLOCKS
    for command in block.commands
    if (mark := block.mark(command)) is not None and mark.kind == "run"
]
"""What this file runs: in order, because a command finds what the one before it left."""


def run_command(command: str, replaced: dict[str, str]) -> None:
    words = [replaced.get(word, word) for word in shlex.split(command)]
    if words[0] == "nemo-dcr":
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, (command, done.output, done.exception)
        return
    assert words[0] == PYTHON, f"{command}: run it elsewhere, or teach this test the program"
    subprocess.run([sys.executable, *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("page", sorted({block.page for block, _, _ in HERE}))
def test_commands_and_code_of_a_page_run_as_they_are_written(page, tmp_path, monkeypatch):
    scenes = {}
    for block, command, name in HERE:
        if block.page != page:
            continue
        if name not in scenes:
            place = tmp_path / name
            place.mkdir()
            monkeypatch.chdir(place)
            scenes[name] = SCENES[name](place)
        scene = scenes[name]
        monkeypatch.chdir(tmp_path / name)
        if block.language == "python":
            code = compile("\n" * block.line + command, ROOT / page, "exec")
            exec(code, scene.names)  # noqa: S102
        else:
            run_command(command, dict(scene.words))
    for scene in scenes.values():
        scene.close()


def test_every_block_of_every_page_is_run_or_says_why_not():
    assert [fault for block in BLOCKS for fault in unexplained(block, CI)] == []


def test_commands_that_no_test_runs_are_these():
    found: dict[str, list[str]] = {}
    for block in BLOCKS:
        marks = {mark for command in block.commands if (mark := block.mark(command)) is not None}
        found.setdefault(block.page, []).extend(mark.command for mark in marks if mark.kind == "no-run")
    assert {page: sorted(names) for page, names in found.items() if names} == NOT_RUN


@pytest.mark.parametrize("block", [each for each in BLOCKS if each.language in PARSED], ids=lambda each: each.where)
def test_data_on_a_page_is_what_it_says(block: Block):
    {"json": json.loads, "toml": tomllib.loads}[block.language](block.text)


def test_every_command_line_of_a_page_is_one_that_the_program_takes():
    program = typer.main.get_command(app)
    tried = 0
    for block in BLOCKS:
        for command in block.commands if block.language not in PARSED | {"python", "hex"} else ():
            words = shlex.split(command)
            if words[0] == "nemo-dcr":
                takes(program, words[1:], block.where)
                tried += 1
            elif "-m" in words:
                module = words[words.index("-m") + 1]
                assert find_spec(module) is not None, f"{block.where}: no module {module}"
    assert tried > 10


def takes(command, words: list[str], where: str) -> None:
    """Parse the words as the command line would, without running anything."""
    if hasattr(command, "commands"):
        assert words[0] in command.commands, f"{where}: {words[0]} is no command"
        takes(command.commands[words[0]], words[1:], where)
        return
    _, _, order = command.make_parser(typer.Context(command)).parse_args(list(words))
    assert order, f"{where}: {words}"


def sample(marks: str, language: str, text: str, page: str = "docs/a.md") -> Block:
    (block,) = blocks_of(page, f"Text.\n\n{marks}```{language}\n{text}\n```\n")
    return block


@pytest.mark.parametrize(
    ("marks", "language", "text"),
    [
        ("", "sh", "nemo-dcr status RUN"),
        ("", "python", "owner.refit()"),
        ("", "hex", "00"),
        ("", "", "make wan-all   # an hour"),
        ("", "text", "nemo-dcr status RUN"),
        ("", "sh", "make test\nmake spec-deep"),
        ('<!-- no-run "make x": long -->\n', "sh", "make y"),
        ("<!-- no-run: nothing needs this -->\n", "", "a picture"),
        ("<!-- run-by: make demo; tests/house/test_readme.py -->\n", "sh", "nemo-dcr demo"),
        ("<!-- run-by: make test; tests/absent.py -->\n", "sh", "nemo-dcr demo"),
        ("<!-- run-by: make test -->\n", "sh", "nemo-dcr demo"),
        ("<!-- run-by: make test; tests/house/test_readme.py -->\n", "sh", "nemo-dcr demo --not-an-option"),
        ("<!-- run-by: make test; tests/house/test_readme.py -->\n", "python", "x = no_such_call()"),
    ],
)
def test_a_block_that_nothing_runs_is_a_fault(marks, language, text):
    assert unexplained(sample(marks, language, text), frozenset({"make test"})) != []


@pytest.mark.parametrize(
    ("marks", "language", "text"),
    [
        ("<!-- run: record -->\n", "sh", "nemo-dcr record show URL"),
        ("<!-- no-run: a server of yours -->\n", "sh", "nemo-dcr status RUN"),
        ('<!-- no-run "make spec-deep": an hour -->\n', "sh", "make test\nmake spec-deep  # all"),
        ("<!-- run-by: make test; tests/house/test_readme.py -->\n", "sh", "nemo-dcr demo --help"),
        ("<!-- run-by: make test; tests/house/test_readme.py -->\n", "python", "subprocess.run(1)"),
        ("", "", "a ──> b, made by owners"),
        ("", "json", "{}"),
    ],
)
def test_a_block_that_is_run_or_excused_is_none(marks, language, text):
    assert unexplained(sample(marks, language, text), frozenset({"make test"})) == []


def test_commands_are_split_as_a_shell_does():
    block = sample("", "sh", "a --b \\\n  'c d'  # why\n\n# only a comment\ne")
    assert block.commands == ("a --b 'c d'", "e")
    assert block.line == 3
