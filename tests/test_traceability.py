"""Paper, specification, proofs, code and tests name the same things: every link is followed, in both directions.

Each check is a function from texts to faults. The tests apply it to the checkout, where it has to find nothing, and to
a doctored text, where it has to find the break.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from model_tests.mutants import MUTANTS
from nemo_dcr.testing.loader_conformance import LOADER_CONFORMANCE
from nemo_dcr.testing.source_conformance import SOURCE_CONFORMANCE
from tests import counterparts
from tests.house.modules import ROOT, Module, docstrings, fields, functions, parse, read_tree
from tests.specification import Specification, read, read_texts, snake
from tests.unit.protocol.invariants import FINALLY, INVARIANTS

QUOTED = re.compile(r"`([^`]+)`")
CODE = re.compile(r"\b((?:SC|LC)\d+)\b")
TABLE_CODE = re.compile(r"^\| ((?:SC|LC|D)\d+) \|", re.MULTILINE)
DECISION = re.compile(r"(?<![\w.])D([1-9]\d?)(?![\w.]*\d|\w)")
FOOTER = re.compile(r"\bSpec:(.*?)(?=\b(?:Paper|Proofs|Conditions|Decisions):|\Z)", re.DOTALL)
CHECKED_PROPERTY = re.compile(r"`spec: (\w+)`")
PREDICATE = re.compile(r"^(?:bool|TypeGuard\[.*\]|Reason \| None)$")
MACHINES = ("nemo_dcr.control_rules", "nemo_dcr.protocol.")
# Actions that no code emits yet, with the reason.
UNEMITTED: dict[str, str] = {}


# ------------------------------------------------------------------------------------------------------------- readers


def actions(package: Iterable[Module]) -> dict[str, str]:
    """Member name to spelling, read from the Action enum."""
    tree = next(module.tree for module in package if module.name == "nemo_dcr.trace")
    enum = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Action")
    assigned = [node for node in enum.body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: ast.literal_eval(node.value) for node in assigned}


def first_column(page: str, section: str) -> list[str]:
    """What the rows of a section's table begin with, without quotes."""
    found = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return re.findall(r"^\| `(\w+)` \|", found[1], re.MULTILINE) if found else []


def spec_citations(module: Module) -> list[str]:
    """What the docstrings of a module cite after `Spec:`, separated by commas."""
    footers = [footer for doc in docstrings(module) for footer in FOOTER.findall(doc)]
    return [" ".join(part.split()) for footer in footers for part in footer.split(",") if part.strip()]


def machines(package: Iterable[Module]) -> list[Module]:
    """Modules that take part in protocol steps."""
    return [module for module in package if module.name.startswith(MACHINES)]


def predicates(package: Iterable[Module]) -> frozenset[str]:
    """Public functions of the machines that answer yes or no, or say why not."""
    nodes = [node for module in machines(package) for node in module.tree.body if isinstance(node, ast.FunctionDef)]
    public = [node for node in nodes if node.returns is not None and not node.name.startswith("_")]
    return frozenset(node.name for node in public if PREDICATE.match(ast.unparse(node.returns)))


# -------------------------------------------------------------------------------------------------------------- checks


def unequal_actions(spec: Specification, package: Iterable[Module], page: str) -> list[str]:
    """Next, the enum and both tables of docs/trace.md list the same actions; members are their snake case."""
    enum = actions(package)
    lists = {
        "Next": sorted(spec.actions),
        "Actions": sorted(first_column(page, "Actions")),
        "Steps": sorted(first_column(page, "Steps")),
    }
    faults = [
        f"{name}: {sorted(set(found) ^ set(enum.values()))}"
        for name, found in lists.items()
        if found != sorted(enum.values())
    ]
    return faults + [f"{member} is not {value}" for member, value in enum.items() if member.lower() != snake(value)]


def uncited_actions(spec: Specification, package: Iterable[Module]) -> list[str]:
    """Actions that no docstring footer names."""
    cited = {name for module in package for name in spec_citations(module)}
    return sorted(spec.actions - cited)


def dangling_citations(spec: Specification, package: Iterable[Module]) -> list[str]:
    """Footers that name nothing in spec/."""
    cited = [(module.path, name) for module in package for name in spec_citations(module)]
    return [f"{path}: {name}" for path, name in cited if name not in spec.names]


def broken_reasons(reasons: Mapping[str, str], needed: Collection[str], known: Iterable[str]) -> list[str]:
    """Exemptions must be needed, and the names that they quote must exist on the other side."""
    ends = {".".join(name.split(".")[place:]) for name in known for place in range(name.count(".") + 1)}
    quoted = [(key, name) for key, reason in reasons.items() for name in QUOTED.findall(reason)]
    return sorted(
        [f"{key} has no counterpart and no reason" for key in needed if key not in reasons]
        + [f"{key} needs no reason" for key in reasons if key not in needed]
        + [f"{key} quotes {name}, which does not exist" for key, name in quoted if name not in ends]
    )


def unmatched_guards(spec: Specification, package: Iterable[Module], reasons: Mapping[str, str]) -> list[str]:
    """Guards of the specification that no function of the machines is named after."""
    package = list(package)
    named = {name.split(".")[-1] for module in machines(package) for name in functions(module)}
    needed = [guard for guard in spec.guards if snake(guard) not in named]
    return broken_reasons(reasons, needed, [name for m in package for name in (*functions(m), *fields(m))])


def unmatched_predicates(spec: Specification, package: Iterable[Module], reasons: Mapping[str, str]) -> list[str]:
    """Predicates of the machines that no operator of the specification is named after."""
    operators = {snake(name) for name in spec.operators}
    needed = [name for name in predicates(package) if name not in operators]
    return broken_reasons(reasons, needed, spec.names)


def unmatched_properties(spec: Specification, tested: Collection[str], reasons: Mapping[str, str]) -> list[str]:
    """Checked properties that are not looked at in the simulated cluster, and the other way round."""
    needed = [name for name in spec.checked if snake(name) not in tested]
    unknown = sorted(set(tested) - {snake(name) for name in spec.checked & spec.properties})
    return broken_reasons(reasons, needed, spec.names) + [f"{name} is no property that is checked" for name in unknown]


def unproved_properties(spec: Specification, proofs: str) -> list[str]:
    """Checked properties that PROOFS.md does not name, and properties that it names and nothing checks."""
    bounds = {name for name in spec.checked if name not in spec.properties}
    return sorted((spec.checked - bounds) ^ set(CHECKED_PROPERTY.findall(proofs)))


def unlisted_models(spec: Specification, proofs: str) -> list[str]:
    """Runs of the model checker that section 7 of PROOFS.md does not list, or that it invents."""
    listed = re.findall(r"^\| `(MC\w+)` \|", proofs, re.MULTILINE)
    return sorted({*spec.models} ^ {*listed})


def unmatched_mutants(
    spec: Specification, twins: Mapping[str, str], only_here: Mapping[str, str], only_there: Collection[str]
) -> list[str]:
    """Mutants of the code and of the specification with one name make one property fall."""
    theirs = {snake(name): {snake(each) for each in falls} for name, falls in spec.mutants.items()}
    both = [(name, falls) for name, falls in twins.items() if name in theirs]
    unequal = [f"{name}: {falls} here, not there" for name, falls in both if falls not in theirs[name]]
    alone = {name for name in spec.mutants if snake(name) not in twins}
    without = [f"{name} has no twin" for name in sorted(alone - set(only_there))]
    stale = [f"{name} needs no exemption" for name in sorted(set(only_there) - alone)]
    return unequal + without + stale + broken_reasons(only_here, [n for n in twins if n not in theirs], spec.names)


# ------------------------------------------------------------------------------------------------------- the checkout


@pytest.fixture(scope="module")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="module")
def package() -> tuple[Module, ...]:
    return read_tree("nemo_dcr")


@pytest.fixture(scope="module")
def tests() -> tuple[Module, ...]:
    return read_tree("tests", "model_tests")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return read_texts(ROOT / "spec")


@pytest.fixture(scope="module")
def spec(texts) -> Specification:
    return read(texts)


@pytest.fixture(scope="module")
def proofs(root) -> str:
    return (root / "PROOFS.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(root) -> str:
    return (root / "docs/trace.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tested() -> frozenset[str]:
    return frozenset({*INVARIANTS, *FINALLY})


@pytest.fixture(scope="module")
def twins() -> dict[str, str]:
    """Two runs of the specification may share a mutant and look at another property: those are named refit_."""
    return {mutant.name: mutant.falls for mutant in MUTANTS if not mutant.name.startswith("refit_")}


def test_next_the_enum_and_the_trace_page_list_the_same_actions(spec, package, page):
    assert unequal_actions(spec, package, page) == []


def test_every_action_is_cited_by_a_footer_and_every_cited_name_is_in_the_specification(spec, package):
    assert (uncited_actions(spec, package), dangling_citations(spec, package)) == ([], [])


def test_every_guard_has_a_predicate_or_a_reason(spec, package):
    assert unmatched_guards(spec, package, counterparts.GUARDS) == []


def test_every_predicate_has_an_operator_or_a_reason(spec, package):
    assert unmatched_predicates(spec, package, counterparts.PREDICATES) == []


def test_every_checked_property_is_tested_on_the_machines(spec, tested):
    assert unmatched_properties(spec, tested, counterparts.UNTESTED_PROPERTIES) == []


def test_every_checked_property_and_every_model_stands_in_the_proofs(spec, proofs):
    assert (unproved_properties(spec, proofs), unlisted_models(spec, proofs)) == ([], [])


def test_mutants_of_code_and_specification_share_names_and_properties(spec, twins):
    assert unmatched_mutants(spec, twins, counterparts.PYTHON_MUTANTS, counterparts.MUTANTS_WITHOUT_TWIN) == []


def test_every_condition_has_a_pair_of_loaders_or_trainers(proofs):
    listed = [code for code in TABLE_CODE.findall(proofs) if code[:2] in ("SC", "LC")]
    assert listed == [row.code for row in (*SOURCE_CONFORMANCE, *LOADER_CONFORMANCE)]
    assert len(listed) == 19


def test_conditions_named_in_code_stand_in_the_tables(proofs, package, tests):
    listed = set(TABLE_CODE.findall(proofs))
    used = {(module.path, code) for module in (*package, *tests) for code in CODE.findall(module.text)}
    assert sorted((path, code) for path, code in used if code not in listed and "tests/house" not in path) == []


def test_each_loader_condition_has_one_class_that_is_checked_when_the_table_says(proofs, package):
    tree = next(module.tree for module in package if module.name == "nemo_dcr.receiver.conditions")
    rows = {}
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        fields = {node.targets[0].id: node.value for node in owner.body if isinstance(node, ast.Assign)}
        if "code" in fields:
            when = ast.unparse(fields["when"]).replace("When.", "").replace(" | ", " and ").replace("_", " ").lower()
            rows[ast.literal_eval(fields["code"])] = when
    table = dict(re.findall(r"^\| (LC\d+) \|.*\| ([^|]+) \|$", proofs, re.MULTILINE))
    assert (rows, len(rows)) == (table, 12)


def test_decisions_named_in_code_are_written_down(package, root):
    page = (root / "docs/decisions/0002-protocol-decisions.md").read_text(encoding="utf-8")
    listed = set(TABLE_CODE.findall(page))
    used = {(module.path, f"D{number}") for module in package for number in DECISION.findall(module.text)}
    assert sorted((path, code) for path, code in used if code not in listed) == []


def test_every_action_is_documented_and_emitted(package, root):
    page = (root / "docs/trace.md").read_text(encoding="utf-8")
    text = "\n".join(module.text for module in package if module.name != "nemo_dcr.trace")
    every = actions(package)
    assert [name for name in every.values() if f"`{name}`" not in page] == []
    silent = [member for member in every if not re.search(rf"\bAction\.{member}\b", text)]
    assert sorted(silent) == sorted(UNEMITTED)


def test_every_exit_code_is_documented(package, root):
    tree = next(module.tree for module in package if module.name == "nemo_dcr.cli.main")
    (codes,) = (n.value for n in tree.body if isinstance(n, ast.Assign) and "EXIT_" in ast.unparse(n.targets[0]))
    page = (root / "docs/exit-codes.md").read_text(encoding="utf-8")
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert listed == {0, 130, *ast.literal_eval(codes)}


def test_glossary_names_modules_that_exist(root):
    rows = (root / "docs/glossary.md").read_text(encoding="utf-8")
    named = [name for name in QUOTED.findall(rows) if name.startswith("nemo_dcr")]
    files = [name for name in named if not (root / name).exists()]
    assert (files, len(named) > 20) == ([], True)


def test_code_patterns_find_what_they_name():
    assert DECISION.findall("see (D28), D3; not Appendix D.1, Figure D.3 or BD4") == ["28", "3"]
    assert CODE.findall("LC5, (SC1); not XLC3") == ["LC5", "SC1"]
    assert TABLE_CODE.findall("| LC1 | every write |\n| D2 | x |\ntext | SC1 |") == ["LC1", "D2"]


# --------------------------------------------------------------------------------------------------- checks that fail


def doctored(texts: Mapping[str, str], file: str, old: str, new: str) -> Specification:
    """The specification with one passage replaced."""
    assert texts[file].count(old) == 1
    return read({**texts, file: texts[file].replace(old, new)})


def without(spec: Specification, name: str) -> Specification:
    return replace(spec, operators=spec.operators - {name})


def test_a_missing_or_invented_action_is_found(texts, spec, package, page):
    dropped = doctored(
        texts, "DeltaRefit.tla", "StartApply(r) \\/ Flush(r) \\/ FailReceiver(r)", "StartApply(r) \\/ FailReceiver(r)"
    )
    assert unequal_actions(dropped, package, page) == ["Next: ['Flush']"]
    added = doctored(
        texts,
        "DeltaRefit.tla",
        "\\/ \\E t \\in AttemptIds : Commit(t)\n",
        "\\/ \\E t \\in AttemptIds : Commit(t) \\/ CanCommit(t)\n",
    )
    assert unequal_actions(added, package, page) == ["Next: ['CanCommit']"]
    assert uncited_actions(replace(spec, actions=spec.actions | {"Teleport"}), package) == ["Teleport"]
    row = "| `Flush` | `Flushed`"
    assert unequal_actions(spec, package, page.replace(row, "| `Flash` | `Flushed`")) == ["Steps: ['Flash', 'Flush']"]
    enum = parse("nemo_dcr/trace.py", "class Action:\n    FLUSHED = 'Flush'\n")
    assert "FLUSHED is not Flush" in unequal_actions(spec, [enum], page)


def test_a_footer_that_names_nothing_is_found(spec):
    text = '"""X.\n\nPaper: Section 6.3   Spec: Flush, rcv,\nseen of a receiver   Proofs: dedup_once\n"""\n'
    module = parse("nemo_dcr/a.py", text)
    assert spec_citations(module) == ["Flush", "rcv", "seen of a receiver"]
    assert dangling_citations(spec, [module]) == ["nemo_dcr/a.py: seen of a receiver"]


def test_a_guard_or_predicate_without_its_counterpart_is_found(texts, spec, package):
    added = doctored(texts, "DeltaRefit.tla", "IsDrained(r) == ", "IsRested(r) == TRUE\nIsDrained(r) == ")
    assert unmatched_guards(added, package, counterparts.GUARDS) == ["IsRested has no counterpart and no reason"]
    assert unmatched_predicates(without(spec, "NotDuplicate"), package, counterparts.PREDICATES) == [
        "not_duplicate has no counterpart and no reason"
    ]
    fresh = parse(
        "nemo_dcr/protocol/a.py", "def is_rested(state: State) -> bool: ...\ndef name(state: State) -> str: ...\n"
    )
    assert predicates([fresh]) == {"is_rested"}
    assert broken_reasons({"A": "`x.gone`", "B": "`m.f`", "C": ""}, ["A", "B", "D"], ["pkg.m.f"]) == [
        "A quotes x.gone, which does not exist",
        "C needs no reason",
        "D has no counterpart and no reason",
    ]


def test_a_property_without_its_counterpart_is_found(texts, spec, proofs, tested):
    more = doctored(texts, "MCDeltaRefit.cfg", "INVARIANTS CommitExact", "INVARIANTS Neat CommitExact")
    reasons = counterparts.UNTESTED_PROPERTIES
    assert unmatched_properties(more, tested, reasons) == ["Neat has no counterpart and no reason"]
    defined = replace(more, properties=spec.properties | {"Neat"})
    assert unproved_properties(defined, proofs) == ["Neat"]
    assert unproved_properties(spec, proofs.replace("`spec: GateFresh`", "")) == ["GateFresh"]
    assert unproved_properties(spec, proofs + "`spec: Unchecked`") == ["Unchecked"]
    fewer = replace(spec, checked=spec.checked - {"GateFresh"})
    assert unmatched_properties(fewer, tested, reasons) == ["gate_fresh is no property that is checked"]
    assert unmatched_properties(spec, tested - {"gate_fresh"}, reasons) == [
        "GateFresh has no counterpart and no reason"
    ]
    assert unlisted_models(replace(spec, models=("MCNew", *spec.models)), proofs) == ["MCNew"]


def test_a_mutant_without_its_twin_is_found(texts, spec):
    pair = replace(spec, mutants={"NoDedup": frozenset({"CommitExact", "RefitSteps"})})
    here = {"a_late_call": "no rule of the specification; `MayFlush` is near"}
    assert unmatched_mutants(pair, {"no_dedup": "commit_exact"}, {}, ()) == []
    assert unmatched_mutants(pair, {"no_dedup": "refit_steps", "a_late_call": "gate_safe"}, here, ()) == []
    assert unmatched_mutants(pair, {"no_deduplication": "commit_exact"}, {}, ()) == [
        "NoDedup has no twin",
        "no_deduplication has no counterpart and no reason",
    ]
    assert unmatched_mutants(pair, {"no_dedup": "gate_safe"}, {}, ()) == ["no_dedup: gate_safe here, not there"]
    assert unmatched_mutants(pair, {"no_dedup": "commit_exact"}, {}, ("NoDedup",)) == ["NoDedup needs no exemption"]
    assert spec.mutants["AckBeforeFlush"] >= {"CommitExact"}
    renamed = doctored(texts, "models.json", '"NotDuplicate": "MutNoDedup"', '"NotDuplicate": "MutTwice"')
    assert renamed.mutants.keys() ^ spec.mutants.keys() == {"NoDedup", "Twice"}


def test_names_change_case_word_by_word():
    assert [snake(name) for name in ("NotDuplicate", "NoCAS", "UpdNoMatch", "rcv")] == [
        "not_duplicate",
        "no_cas",
        "upd_no_match",
        "rcv",
    ]
