"""PROOFS.md and the code cite each other: lemmas, the tests that check them, the functions that rely on them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tlc_modules import definitions

from tests.house.modules import docstrings

LEMMA = re.compile(r"^### L(\d+) (\w+)\n(.*?)(?=^###? |\Z)", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`]+)`")
PROPERTY = "spec: "
CARRIED = re.compile(r"^\| L(\d+) (\w+) \| [^|]+ \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", re.MULTILINE)
SOLVERS = {"words": "model_tests/test_word_facts.py", "protocol": "model_tests/test_protocol_proof.py"}
FOOTER = re.compile(r"Proofs:(.*?)(?=Conditions:|Spec:|Paper:|\Z)", re.DOTALL)
# Lemmas that no function relies on, or that no test can check, with the reason.
UNRELIED: dict[str, str] = {}
UNCHECKED: dict[str, str] = {}


@dataclass(frozen=True)
class Lemma:
    """One lemma of PROOFS.md with the links it carries."""

    number: int
    slug: str
    assumes: tuple[str, ...]
    """Codes of section 2 under "Uses"."""
    checked_by: tuple[str, ...]
    """Tests, and `spec: Property`."""
    relied_on_by: tuple[str, ...]


def lemmas(text: str) -> list[Lemma]:
    """All lemmas in order of appearance."""

    def part(body: str, label: str) -> str:
        found = re.search(rf"^{label}:(.*?)(?=\n\n|\Z)", body, re.MULTILINE | re.DOTALL)
        return found[1] if found else ""

    return [
        Lemma(
            int(number),
            slug,
            tuple(re.findall(r"\b(?:SC|LC|A)\d+\b", part(body, "Uses"))),
            tuple(QUOTED.findall(part(body, "Checked by"))),
            tuple(QUOTED.findall(part(body, "Relied on by"))),
        )
        for number, slug, body in LEMMA.findall(text)
    ]


def carried(lemma: Lemma) -> tuple[str, str, str, str, str]:
    """The row of section 7 that follows from the lemma: number, slug, assumptions, solver, properties."""
    solvers = [name for name, path in SOLVERS.items() if any(link.startswith(path) for link in lemma.checked_by)]
    checked = [link.removeprefix(PROPERTY) for link in lemma.checked_by if link.startswith(PROPERTY)]
    columns = [", ".join(each) or "-" for each in (lemma.assumes, solvers, checked)]
    return str(lemma.number), lemma.slug, columns[0], columns[1], columns[2]


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


def names_property(link: str, properties) -> bool:
    """True iff `spec: Property` is an operator of spec/Properties.tla."""
    return link.startswith(PROPERTY) and link.removeprefix(PROPERTY) in properties


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


@pytest.fixture(scope="session")
def proofs(root: Path) -> str:
    return (root / "PROOFS.md").read_text(encoding="utf-8")


def test_lemmas_are_numbered_without_a_gap_and_slugs_are_unique(proofs):
    found = lemmas(proofs)
    assert [lemma.number for lemma in found] == list(range(len(found)))
    assert len({lemma.slug for lemma in found}) == len(found) > 15


def test_every_lemma_is_checked_by_tests_and_properties_that_exist(proofs, tests, package, root):
    found = lemmas(proofs)
    suites = [module for module in package if module.path.startswith("nemo_dcr/testing/")]
    properties = definitions((root / "spec/Properties.tla").read_text(encoding="utf-8"))
    tested = [lemma for lemma in found if any("::" in link for link in lemma.checked_by)]
    assert [lemma.slug for lemma in found if lemma not in tested and lemma.slug not in UNCHECKED] == []
    links = [link for lemma in found for link in lemma.checked_by if not names_property(link, properties)]
    assert [link for link in links if not names_test(link, [*tests, *suites])] == []


def test_the_summary_says_how_each_lemma_is_carried(proofs):
    assert CARRIED.findall(proofs) == [carried(lemma) for lemma in lemmas(proofs)]


def test_every_lemma_is_relied_on_by_code_that_exists(proofs, package):
    found = lemmas(proofs)
    assert [lemma.slug for lemma in found if not lemma.relied_on_by and lemma.slug not in UNRELIED] == []
    assert [link for lemma in found for link in lemma.relied_on_by if not names_code(link, package)] == []


def test_lemmas_cited_in_docstrings_exist(proofs, package):
    known = lemmas(proofs)
    bad = [(m.path, unknown) for m in package for doc in docstrings(m) for unknown in unknown_citations(doc, known)]
    assert bad == []


def test_link_checks_can_fail(parse_module):
    text = "### L0 first\n\nProof.\n\nUses: L1, SC3, A7.\n\nChecked by: `spec: Safe`, `tests/a.py::test_x`\n\n"
    (lemma,) = lemmas(text + "Relied on by: `nemo_dcr.a.f`\n\n## Next\n")
    assert carried(lemma) == ("0", "first", "SC3, A7", "-", "Safe")
    assert CARRIED.findall("| L0 first | x | SC3, A7 | - | Safe |") == [carried(lemma)]
    assert CARRIED.findall("| L0 first | x | SC3 | words | Safe |") != [carried(lemma)]
    assert [names_property(link, {"Safe"}) for link in ("spec: Safe", "spec: Sound", "Safe")] == [True, False, False]
    module = parse_module("nemo_dcr/a.py", "class C:\n    def m(self): ...\ndef f(): ...\n")
    assert names_code(lemma.relied_on_by[0], [module])
    assert names_code("nemo_dcr.a.C.m", [module])
    assert not names_code("nemo_dcr.a.C.n", [module])
    assert names_test("tests/a.py::test_x", [parse_module("tests/a.py", "def test_x(): ...")])
    assert not names_test("tests/a.py::test_y", [parse_module("tests/a.py", "def test_x(): ...")])
    assert unknown_citations("Proofs: L0 first, L0, first   Conditions: LC1", [lemma]) == []
    assert unknown_citations("Proofs: L1 first, second", [lemma]) == ["L1 first", "second"]
    assert lemmas("### L0 bare\n\nProof.\n")[0].checked_by == ()
