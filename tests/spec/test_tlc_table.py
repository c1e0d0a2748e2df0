"""The table of runs is read strictly, and its faults are found without a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import tlc
from tlc_audit import audit_row, audit_table, write_generated
from tlc_cfg import CfgError, parse_cfg
from tlc_modules import actions_of_next, definitions, read_folder
from tlc_rows import TableError, read_table, write_table


def faults(lab) -> list[str]:
    table, folder = read_table(lab.path / "models.json"), read_folder(lab.path)
    return [fault for row in table.rows for fault in audit_row(row, folder, table)] + audit_table(table, folder)


def test_a_table_that_agrees_with_its_files_has_no_fault(lab, capsys):
    assert faults(lab) == []
    assert tlc.main(["--spec", str(lab.path), "check"]) == 0
    assert "4 rows agree" in capsys.readouterr().out


def test_writing_the_table_keeps_every_value(lab):
    path = lab.path / "models.json"
    lab.change_row("Counter", flags=["-lncheck final"], set="deep", heap="3g", workers=1)
    table = read_table(path)
    write_table(path, table)
    assert read_table(path) == table
    assert max(map(len, path.read_text(encoding="utf-8").splitlines())) < 130


@pytest.mark.parametrize(
    ("row", "values", "said"),
    [
        ("Counter", {"colour": "red"}, "unknown key 'colour'"),
        ("Counter", {"why": None}, "key 'why' is missing"),
        ("Counter", {"kind": "proof"}, "must be one of mc, mutant, sanity"),
        ("Counter", {"set": "night"}, "must be one of ci, deep"),
        ("Counter", {"distinct": 0}, "must be null or a number above 0"),
        ("Counter", {"distinct": True}, "must be null or a number above 0"),
        ("Counter", {"seconds": "60"}, "must be a number above 0"),
        ("Counter", {"coverage": 1}, "must be true or false"),
        ("Counter", {"flags": ["-continue"]}, "must be a list whose entries start with"),
        ("Counter", {"flags": [""]}, "must be a list whose entries start with"),
        ("Counter", {"flags": "-deadlock"}, "must be a list whose entries start with"),
        ("Counter", {"why": " "}, "must be text"),
        ("Counter", {"override": {"CanUp": "MutNoLimit"}}, "there is none"),
        ("Counter", {"constants": {"Limit": "1"}}, "there is none"),
        ("Counter", {"violates": "Bound"}, "null otherwise"),
        ("Counter", {"expect": "invariant", "violates": "Bound"}, "set distinct to null"),
        ("Counter", {"flags": ["-simulate num=3"]}, "set distinct to null"),
        ("Counter", {"workers": 2}, "set depth to null"),
        ("Counter", {"expect": "deadlock", "distinct": None, "flags": ["-deadlock"]}, "switches the search"),
        ("Counter", {"expect": "deadlock", "distinct": None}, "coverage counts on rows that expect ok"),
        ("NoLimit", {"expect": "ok", "violates": None}, "a mutant row must be violated"),
        ("NoLimit", {"violates": None}, "violates names what must fall"),
        ("NoLimit", {"base": None}, "needs a base"),
        ("NoLimit", {"override": {}}, "exactly one operator"),
        ("NoLimit", {"override": {"CanUp": "MutNoLimit", "Up": "MutUp"}}, "exactly one operator"),
        ("NoLimit", {"override": {"CanUp": 1}}, "must map names to cfg text"),
        ("NoLimit", {"name": "Counter"}, "name 'Counter' stands in two rows"),
        ("NoLimit", {"cfg": "Counter.cfg"}, "cfg 'Counter.cfg' stands in two rows"),
        ("Top", {"override": {"CanUp": "MutNoLimit"}}, "other rows none"),
        ("Top", {"expect": "ok", "violates": None}, "a sanity row must be violated"),
    ],
)
def test_a_row_that_cannot_be_is_refused(lab, capsys, row, values, said):
    lab.change_row(row, **values)
    with pytest.raises(TableError, match=r"models\.json") as refused:
        read_table(lab.path / "models.json")
    assert said in str(refused.value)
    assert tlc.main(["--spec", str(lab.path), "all"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "is not JSON"),
        ("[]", "must be an object"),
        ('{"rows": {}}', "must be an object"),
        ('{"rows": [], "colour": 1}', "unknown key 'colour'"),
        ('{"rows": [3]}', "a row is an object"),
        ('{"rows": [], "rows": []}', "'rows' stands twice"),
        ('{"rows": [], "no_mutant": {"Bound": ""}}', "maps a name to the reason"),
    ],
)
def test_a_table_that_cannot_be_is_refused(tmp_path, text, said):
    (tmp_path / "models.json").write_text(text, encoding="utf-8")
    with pytest.raises(TableError, match=said):
        read_table(tmp_path / "models.json")


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(TableError, match="is missing"):
        read_table(tmp_path / "models.json")


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("Mutants_NoLimit.cfg", "CanUp <- MutNoLimit", "CanUp <- CanUp", "does not replace CanUp by MutNoLimit"),
        ("Mutants_NoLimit.cfg", "CanUp <- MutNoLimit", "", "does not replace CanUp by MutNoLimit"),
        ("Mutants_NoLimit.cfg", "INVARIANT Bound", "INVARIANT Flag", "has no line INVARIANT Bound"),
        ("Mutants_NoLimit.cfg", "Limit = 2", "Limit = 1", "is not what models.json says"),
        ("Mutants_ResetAnywhere.cfg", "FromAbove", "FromAbove\nPROPERTY Other", "would not say which one fell"),
        ("Sanity_Top.cfg", "TopUnreachable", "Flag", "has no line INVARIANT TopUnreachable"),
        ("Counter.cfg", "INVARIANTS Bound Flag\nPROPERTY FromAbove\n", "", "checks nothing"),
        ("Counter.cfg", "Bound", "", "does not check Bound, so nothing shows"),
        ("Counter.cfg", "Flag", "", "no_mutant lists Flag, which no row checks"),
        ("Counter.cfg", "Flag", "Flag Other", "Other is checked and no row makes it fall"),
        ("Counter.cfg", "Limit = 2", "Limit", "must be followed by = or <-"),
        ("Mutants.tla", "MutNoLimit == x < Limit + 1", "MutNoLimit == CanUp", "MutNoLimit says the same as CanUp"),
        ("Mutants.tla", "MutNoLimit == x < Limit + 1", "MutNoLimit ==\n  x < Limit", "says the same as CanUp"),
        ("Mutants.tla", "(k) == x >= k", "(k) == CanReset(k)", "MutResetAnywhere says the same as CanReset"),
        ("Mutants.tla", "(k) == x >= k", "(k) == x > k", "MutResetAnywhere says the same as CanReset"),
        ("Mutants.tla", "MutNoLimit ==", "MutOther ==", "MutNoLimit is not defined in Mutants.tla"),
        ("Mutants.tla", "EXTENDS Counter", "EXTENDS Counter\nMutIdle == TRUE", "MutIdle is defined in Mutants.tla"),
        ("Counter.tla", "CanUp == x < Limit", "LetUp == x < Limit", "CanUp is not defined in any module"),
        ("models.json", "Mutants_NoLimit.cfg", "Other.cfg", "Mutants_NoLimit.cfg has no row"),
        ("models.json", "Mutants_NoLimit.cfg", "Other.cfg", "Other.cfg is missing"),
        ("models.json", '"coverage": true', '"coverage": false', "no row has coverage"),
        ("models.json", "{\"Flag\":", "{\"Bound\":", "no_mutant lists Bound, which a row makes fall"),
    ],
)  # fmt: skip
def test_files_that_disagree_with_the_table_are_red(lab, capsys, name, old, new, said):
    lab.edit(name, old, new)
    found = faults(lab)
    assert [fault for fault in found if said in fault] != [], found
    assert tlc.main(["--spec", str(lab.path), "check"]) == 1
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "values", "said"),
    [
        ("NoLimit", {"override": {"CanUp": "CanUp"}}, "a mutant's name starts with Mut"),
        ("NoLimit", {"override": {"CanUp": "CanReset"}}, "a mutant's name starts with Mut"),
        ("NoLimit", {"base": "Nowhere.cfg"}, "Nowhere.cfg is missing"),
        ("NoLimit", {"base": "Sanity_Top.cfg"}, "no row without a base runs it and expects ok"),
        ("NoLimit", {"constants": {"Limits": "1"}}, "has no constant Limits to replace"),
        ("NoLimit", {"module": "Nowhere"}, "module Nowhere.tla is missing"),
    ],
)
def test_rows_that_point_at_nothing_are_red(lab, row, values, said):
    lab.change_row(row, **values)
    assert [fault for fault in faults(lab) if said in fault] != []


def test_written_configurations_repair_what_was_edited_by_hand(lab):
    table, folder = read_table(lab.path / "models.json"), read_folder(lab.path)
    assert write_generated(table, folder) == []
    lab.edit("Mutants_NoLimit.cfg", "MutNoLimit", "CanUp")
    assert write_generated(table, folder) == ["Mutants_NoLimit.cfg"]
    assert faults(lab) == []


def test_a_generated_configuration_is_its_base_with_one_check_and_one_guard(lab):
    lab.change_row("NoLimit", constants={"Limit": "{a, {b}}", "Extra": "<- Other"})
    lab.edit("Counter.cfg", "CONSTANTS", "CONSTRAINT Flag  (* a\ncomment *)\nCONSTANTS m = m n = n Extra = 3")
    write_generated(read_table(lab.path / "models.json"), read_folder(lab.path))
    assert (lab.path / "Mutants_NoLimit.cfg").read_text(encoding="utf-8") == (
        "\\* NoLimit.\n\\* Generated from Counter.cfg and models.json by: python spec/tlc.py write\n"
        "SPECIFICATION Spec\nCONSTRAINT Flag\nCONSTANTS\n  m = m  n = n\n  Extra <- Other\n  Limit = {a, {b}}\n"
        "  CanUp <- MutNoLimit\nINVARIANT Bound\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Spec", "before any keyword"),
        ("CONSTANTS x 3", "must be followed by"),
        ("CONSTANTS x =", "has no value"),
        ("CONSTANTS x = {1, {2}", "not closed"),
        ("CONSTANTS x = 1 x = 2", "assigned twice"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(text, said):
    with pytest.raises(CfgError, match=said):
        parse_cfg("A.cfg", text)


def test_definitions_end_where_the_next_one_starts():
    guard = "Guard(a, b) ==   \\* why\n  /\\ a\n  /\\ b\n\n"
    found = definitions(f"---- MODULE A ----\nVARIABLES x\n{guard}LOCAL Next == x\n----\n(* Old == 1\n*)\n====")
    assert {name: (one.parameters, one.body) for name, one in found.items()} == {
        "Guard": ("(a,b)", "/\\ a /\\ b"),
        "Next": ("", "x"),
    }


def test_the_actions_of_next_are_read_through_modules_and_quantifiers(tmp_path):
    (tmp_path / "Low.tla").write_text(
        "---- MODULE Low ----\nEXTENDS Naturals,\n  Sequences\nKinds == {1}\nUp(a, b) == a\nDown == x\nSafe == 1\n"
        "Next ==\n  \\/ \\E a \\in Kinds, b \\in 1..2 : Up(a, b)   \\* not Safe\n  \\/ Down\n\nSpec == Next\n====\n"
    )
    (tmp_path / "High.tla").write_text("---- MODULE High ----\nEXTENDS Low, TLC\nNext2 == Safe\n====\n")
    (tmp_path / "Free.tla").write_text("---- MODULE Free ----\nNone == 1\n====\n")
    folder = read_folder(tmp_path)
    assert folder.extends == {"Low": ("Naturals", "Sequences"), "High": ("Low", "TLC"), "Free": ()}
    assert actions_of_next(folder, "High") == actions_of_next(folder, "Low") == {"Up", "Down"}
    assert actions_of_next(folder, "Free") == frozenset()


def test_the_table_of_this_project_agrees_with_its_files(tmp_path):
    spec = Path(tlc.__file__).parent
    table, folder = read_table(spec / "models.json"), read_folder(spec)
    assert [fault for row in table.rows for fault in audit_row(row, folder, table)] + audit_table(table, folder) == []
    write_table(tmp_path / "models.json", table)
    assert (tmp_path / "models.json").read_text() == (spec / "models.json").read_text(), "run: python spec/tlc.py write"
