"""PROOFS.md and the code cite each other: lemmas, the tests that check them, the functions that rely on them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

LEMMA = re.compile(r"^### L(\d+) (\w+)\n(.*?)(?=^###? |\Z)", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`]+)`")
FOOTER = re.compile(r"Proofs:(.*?)(?=Conditions:|Spec:|Paper:|\Z)", re.DOTALL)
# Lemmas that no function relies on, or that no test can check, with the reason.
UNRELIED: dict[str, str] = {}
UNCHECKED: dict[str, str] = {}


@dataclass(frozen=True)
class Lemma:
    """One lemma of PROOFS.md with the links it carries."""

    number: int
    slug: str
    checked_by: tuple[str, ...]
    relied_on_by: tuple[str, ...]


def lemmas(text: str) -> list[Lemma]:
    """All lemmas in order of appearance."""

    def links(body: str, label: str) -> tuple[str, ...]:
        line = re.search(rf"^{label}:(.*?)(?=\n\n|\Z)", body, re.MULTILINE | re.DOTALL)
        return tuple(QUOTED.findall(line[1])) if line else ()

    found = LEMMA.findall(text)
    return [Lemma(int(n), slug, links(body, "Checked by"), links(body, "Relied on by")) for n, slug, body in found]


def defined(tree: ast.AST, path: list[str]) -> bool:
    """True iff the dotted path names a function or class under `tree`."""
    if not path:
        return True
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return any(
        isinstance(node, kinds) and node.name == path[0] and defined(node, path[1:])
        for node in ast.iter_child_nodes(tree)
    )


def names_code(link: str, package) -> bool:
    """True iff `nemo_dcr.module.Class.method` exists."""
    for module in package:
        if link.startswith(module.name + "."):
            rest = link.removeprefix(module.name + ".").split(".")
            if defined(module.tree, rest):
                return True
    return False


def names_test(link: str, modules) -> bool:
    """True iff `tests/file.py::test_name` (or `::TestClass::test_name`) exists."""
    path, _, name = link.partition("::")
    return bool(name) and any(module.path == path and defined(module.tree, name.split("::")) for module in modules)


def cited_lemmas(text: str) -> list[str]:
    """What `Proofs:` in a docstring cites, word by word: `L4`, `xor_reconstructs` or `L4 xor_reconstructs`."""
    return [" ".join(part.split()) for part in FOOTER.findall(text) for part in part.split(",") if part.strip(" .\n")]


def unknown_citations(text: str, known: list[Lemma]) -> list[str]:
    """Citations that name no lemma, or whose number and slug do not belong together."""
    valid = {name for lemma in known for name in (f"L{lemma.number}", lemma.slug, f"L{lemma.number} {lemma.slug}")}
    valid |= {"Proposition 1", "Corollary 1", "Corollary 2"}
    return [cited for cited in cited_lemmas(text) if cited not in valid]


def docstrings(module) -> list[str]:
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(module.tree) if isinstance(node, owners)]


@pytest.fixture(scope="session")
def proofs(root: Path) -> str:
    return (root / "PROOFS.md").read_text(encoding="utf-8")


def test_lemmas_are_numbered_without_a_gap_and_slugs_are_unique(proofs):
    found = lemmas(proofs)
    assert [lemma.number for lemma in found] == list(range(len(found)))
    assert len({lemma.slug for lemma in found}) == len(found) > 15


def test_every_lemma_is_checked_by_tests_that_exist(proofs, tests, package):
    found = lemmas(proofs)
    suites = [module for module in package if module.path.startswith("nemo_dcr/testing/")]
    assert [lemma.slug for lemma in found if not lemma.checked_by and lemma.slug not in UNCHECKED] == []
    assert [link for lemma in found for link in lemma.checked_by if not names_test(link, [*tests, *suites])] == []


def test_every_lemma_is_relied_on_by_code_that_exists(proofs, package):
    found = lemmas(proofs)
    assert [lemma.slug for lemma in found if not lemma.relied_on_by and lemma.slug not in UNRELIED] == []
    assert [link for lemma in found for link in lemma.relied_on_by if not names_code(link, package)] == []


def test_lemmas_cited_in_docstrings_exist(proofs, package):
    known = lemmas(proofs)
    bad = [(m.path, unknown) for m in package for doc in docstrings(m) for unknown in unknown_citations(doc, known)]
    assert bad == []


def test_link_checks_can_fail(parse_module):
    text = "### L0 first\n\nProof.\n\nChecked by: `tests/a.py::test_x`\n\nRelied on by: `nemo_dcr.a.f`\n\n## Next\n"
    (lemma,) = lemmas(text)
    module = parse_module("nemo_dcr/a.py", "class C:\n    def m(self): ...\ndef f(): ...\n")
    assert names_code(lemma.relied_on_by[0], [module])
    assert names_code("nemo_dcr.a.C.m", [module])
    assert not names_code("nemo_dcr.a.C.n", [module])
    assert names_test("tests/a.py::test_x", [parse_module("tests/a.py", "def test_x(): ...")])
    assert not names_test("tests/a.py::test_y", [parse_module("tests/a.py", "def test_x(): ...")])
    assert unknown_citations("Proofs: L0 first, L0, first   Conditions: LC1", [lemma]) == []
    assert unknown_citations("Proofs: L1 first, second", [lemma]) == ["L1 first", "second"]
    assert lemmas("### L0 bare\n\nProof.\n")[0].checked_by == ()
