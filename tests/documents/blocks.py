"""Code blocks of the pages, and what is said about running each of their commands.

A block is marked by comments right above its fence. A mark may name the command that it is about by its beginning.

    <!-- run: SCENE -->                  a test runs it in that scene (tests/documents/scenes.py)
    <!-- run-by: make TARGET; FILES -->  a test in FILES, under a target of CI, does the same or reads the block
    <!-- no-run "make x": REASON -->     nothing runs the command that begins like this

`make TARGET` needs no mark where CI has that step, and JSON and TOML are parsed. A block without a language, or of the
language `text`, is a picture or an output: a command in it is a fault.
Not handled: indented code, and commands inside sentences.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"(?P<marks>(?:^<!-- .*? -->\n+)*)^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARK = re.compile(r'^<!-- (?P<kind>run|run-by|no-run)(?: "(?P<command>[^"]+)")?: (?P<value>.+?) -->$', re.MULTILINE)
PROGRAMS = ("make", "nemo-dcr", "pip", "python", "python3", ".venv/bin/python", "vllm", "git", "apt-get", "mkdocs")
COMMENT = re.compile(r"(^|\s)#.*$")
STEP = re.compile(r"^step [\w-]+ (make [a-z-]+)", re.MULTILINE)
SHELL = frozenset({"sh", "bash"})
PARSED = frozenset({"json", "toml"})
PICTURES = frozenset({"", "text"})


@dataclass(frozen=True)
class Mark:
    """What a page says about a block, or about the one command of it that begins with `command`."""

    kind: str
    command: str
    value: str


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    """Relative to the repository root."""
    line: int
    language: str
    text: str
    marks: tuple[Mark, ...]

    @property
    def where(self) -> str:
        """Page and line of the block's opening."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> tuple[str, ...]:
        """What is run: each command of a shell block without its comment, or all of any other code."""
        if self.language in PICTURES:
            return ()
        if self.language not in SHELL:
            return (self.text,)
        joined = self.text.replace("\\\n", " ").splitlines()
        bare = (" ".join(COMMENT.sub("", line).split()) for line in joined)
        return tuple(command for command in bare if command)

    def mark(self, command: str) -> Mark | None:
        """The mark of a command: the one that names it most closely, else the one of its block."""
        fitting = [mark for mark in self.marks if command.startswith(mark.command)]
        return max(fitting, key=lambda mark: len(mark.command), default=None)


def blocks_of(page: str, text: str) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found = []
    for hit in FENCE.finditer(text):
        line = text.count("\n", 0, hit.start("language")) + 1
        marks = tuple(Mark(each["kind"], each["command"] or "", each["value"]) for each in MARK.finditer(hit["marks"]))
        found.append(Block(page, line, hit["language"], hit["text"], marks))
    return found


def ci_targets(script: str) -> frozenset[str]:
    """`make TARGET` for each step of CI that is one."""
    return frozenset(STEP.findall(script))


def unexplained(block: Block, ci: frozenset[str], root: Path = ROOT) -> list[str]:
    """Faults of one block: commands that nothing runs and no reason excuses, and marks that say nothing true."""
    faults = []
    if block.language in PICTURES:
        hidden = [line for line in block.text.splitlines() if line.split(" ")[0] in PROGRAMS]
        faults += [f"{block.where}: {line!r} is a command in a block without a language" for line in hidden]
    for command in block.commands:
        mark, target = block.mark(command), " ".join(command.split()[:2])
        if mark is None and block.language not in PARSED and target not in ci:
            faults.append(f"{block.where}: nothing runs {command.splitlines()[0]!r}")
        if mark is not None and mark.kind == "run-by":
            faults += [f"{block.where}: {fault}" for fault in _false_witness(block, command, mark, ci, root)]
    used = {block.mark(command) for command in block.commands}
    faults += [f"{block.where}: no command needs the mark {mark}" for mark in block.marks if mark not in used]
    return faults


def _false_witness(block: Block, command: str, mark: Mark, ci: frozenset[str], root: Path) -> list[str]:
    """Why the named files do not do what the command does: words of it that occur in none of them."""
    target, _, names = mark.value.partition("; ")
    if target not in ci:
        return [f"{target!r} is no step of CI"]
    files = [root / name for name in names.split(", ")]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not names:
        return [f"no such file: {missing}"]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    if Path(block.page).name in text:
        return []  # the test reads the page itself
    return [
        f"no file of {mark.value!r} has {word!r}" for word in sorted(words(block.language, command)) if word not in text
    ]


def words(language: str, command: str) -> set[str]:
    """What a test that does the same has to mention: names of calls and of keywords, or options and subcommands."""
    if language != "python":
        given = shlex.split(command)[1:]
        plain = [word for word in given if re.fullmatch(r"[a-z][a-z_]+", word)]
        return {word for word in given if word.startswith("--")} | set(plain[:1])
    calls = [node for node in ast.walk(ast.parse(command)) if isinstance(node, ast.Call)]
    found = {_called(call) for call in calls} | {each.arg for call in calls for each in call.keywords if each.arg}
    return found - {"print", "Path"}


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
