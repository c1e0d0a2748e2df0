"""Every wait of `runtime/` and `cli/` has a limit, or docs/failover.md says what ends it; it tells the defaults too."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator

from nemo_dcr.config import RefitConfig
from tests.house.modules import ROOT

WAITING = {"wait", "join", "result", "communicate", "get", "acquire", "readline"}
"""Methods that wait without end when they are called without arguments."""
LIMITED = {"wait_for": "timeout", "run": "timeout", "urlopen": "timeout", "create_connection": "timeout"}
"""Functions that take something else first, and their limit by name."""
QUOTED = re.compile(r"`([^`]+)`")


def rows_under(heading: str) -> list[list[str]]:
    """Cells of the table below a heading of docs/failover.md, without its two head lines."""
    page = (ROOT / "docs/failover.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def endless(tree: ast.AST) -> Iterator[str]:
    """Functions, by name, in which a call waits without a limit."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.For) and ast.unparse(node.iter).endswith(".stdout"):
                yield function.name
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            keywords = {each.arg for each in node.keywords}
            limit = LIMITED.get(name)
            if name == "run" and ast.unparse(node.func) != "subprocess.run":
                limit = None
            if limit not in {None, *keywords} or (name in WAITING and not node.args and not keywords):
                yield function.name


def defaults(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """Constants `X_S` and defaults of arguments `x_s`, in seconds."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            if node.targets[0].id.endswith("_S"):
                yield node.targets[0].id, float(node.value.value)
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = [*zip(arguments, node.args.defaults, strict=True)]
            pairs += [(a, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d is not None]
            for argument, default in pairs:
                if argument.arg.endswith("_s") and isinstance(default, ast.Constant):
                    yield argument.arg, float(default.value)


def test_every_wait_has_a_limit_or_the_page_says_what_ends_it(package):
    found = {
        f"{module.path.removeprefix('nemo_dcr/')} {name}"
        for module in package
        if module.path.startswith(("nemo_dcr/runtime/", "nemo_dcr/cli/"))
        for name in endless(module.tree)
    }
    rows = rows_under("Waits without a limit of their own")
    assert sorted(QUOTED.findall(row[0])[0] for row in rows) == sorted(found)
    assert all(row[1] for row in rows)


def test_the_page_tells_every_limit_of_the_runtime_with_its_default(package):
    known = {f"refit.{f.name}": f.default for f in dataclasses.fields(RefitConfig) if f.name.endswith("_s")}
    for module in package:
        if module.path.startswith("nemo_dcr/runtime/"):
            stem = module.path.removeprefix("nemo_dcr/runtime/").removesuffix(".py")
            known |= {f"{stem}.{name}": value for name, value in defaults(module.tree)}
    told = {QUOTED.findall(row[0])[0]: float(row[1]) for row in rows_under("Limits")}
    assert told == known


def test_an_endless_wait_is_found(parse_module):
    text = "def f(a):\n    a.wait()\ndef g(a):\n    subprocess.run(['x'])\ndef h(a):\n    a.wait_for(lambda: a)\n"
    text += "def i(a):\n    for b in a.stdout:\n        pass\n"
    assert list(endless(parse_module("nemo_dcr/cli/a.py", text).tree)) == ["f", "g", "h", "i"]
    limited = (
        "def f(a):\n    a.wait(1)\n    subprocess.run(['x'], timeout=1)\n    ','.join(a)\n    a.run()\n    a.get('b')\n"
    )
    assert list(endless(parse_module("nemo_dcr/cli/a.py", limited).tree)) == []


def test_a_default_is_found_where_a_limit_has_one(parse_module):
    text = "CALL_S = 2.0\ndef f(x, limit_s=3.0, *, other_s: float = 4):\n    pass\n"
    assert dict(defaults(parse_module("nemo_dcr/runtime/a.py", text).tree)) == {"CALL_S": 2, "limit_s": 3, "other_s": 4}
