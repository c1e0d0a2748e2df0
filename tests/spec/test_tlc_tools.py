"""What is not installed is said in one line, and graphs are folded as a figure needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tlc_cfg import parse_cfg
from tlc_graph import GraphError, draw, figure
from tlc_java import NotInstalled, find_tools
from tlc_output import read_outcome

DOT = r"""strict digraph DiskGraph {
1 [label="/\\ x = 0\n/\\ y = [a |-> 1,\n  b |-> {}]",style = filled]
1 -> -2 [label="Up",color="black",fontcolor="black"];
-2 [label="/\\ x = 1\n/\\ y = \"q\""];
-2 -> 3 [label="Turn",color="black",fontcolor="black"];
3 [label="/\\ x = 1\n/\\ y = 2"];
3 -> 1 [label="Reset",color="black",fontcolor="black"];
3 -> 1 [label="Back",color="black",fontcolor="black"];
{rank = same; 1;}
}"""


def fake_java(folder: Path, said: str) -> dict[str, str]:
    """A search path on which java prints what it is told."""
    program = folder / "java"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    return {**os.environ, "PATH": str(folder)}


@pytest.mark.parametrize(
    ("java", "said"),
    [
        (None, "Java is missing: install Java 11 or newer"),
        ('openjdk version "1.8.0_392"', "Java 11 or newer is needed, `java -version` says openjdk version"),
        ("no such option", "Java 11 or newer is needed, `java -version` says no such option"),
    ],
)
def test_missing_or_old_java_is_one_line_and_exit_code_3(lab, java, said):
    outside = {**os.environ, "PATH": ""} if java is None else fake_java(lab.path, java)
    done = subprocess.run(lab.command("all"), env=outside, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith(f"spec/tlc.py: {said}")
    assert "apt-get install" in done.stderr


def test_missing_tlc_is_one_line_and_exit_code_3(lab):
    outside = fake_java(lab.path, 'openjdk version "17.0.1"')
    command = [sys.executable, "-S", *lab.command("mc")[1:]]
    done = subprocess.run(command, env=outside, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert done.stderr.startswith("spec/tlc.py: TLC is missing: run `make setup`")


def test_new_version_numbers_of_java_are_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", fake_java(tmp_path, 'java version "21" 2023-09-19')["PATH"])
    assert find_tools().java_version == 21
    monkeypatch.setenv("PATH", fake_java(tmp_path, 'java version "9.0.4"')["PATH"])
    with pytest.raises(NotInstalled, match="Java 11"):
        find_tools()


COVERED = """Model checking completed. No error has been found.
The coverage statistics at 2026-01-01 00:00:00
<Up line 8, col 1 to line 8, col 2 of module A>: 900:900
The coverage statistics at 2026-01-01 01:00:00
<Start line 6, col 1 to line 6, col 4 of module A>: 2:2
<SmallUp line 8, col 1 to line 8, col 2 of module B>: 3:6
  line 7, col 10 to line 7, col 18 of module A: 6
<Up line 8, col 1 to line 8, col 2 of module A>: 1:1
<Down line 9, col 1 to line 9, col 7 of module A (396 3 403 56)>: 0:4
<Bound line 16, col 1 to line 16, col 5 of module A>
1,500 states generated, 1,200 distinct states found, 0 states left on queue.
The depth of the complete state graph search is 12.
"""


def test_steps_are_counted_under_the_name_that_next_gives_the_action():
    cfg = parse_cfg("A.cfg", "CONSTANTS Up <- SmallUp INVARIANT Bound")
    outcome = read_outcome(0, COVERED, 1.5, cfg)
    assert outcome.actions == {"Start": 2, "Up": 7, "Down": 4}
    assert (outcome.result, outcome.generated, outcome.distinct, outcome.depth) == ("ok", 1500, 1200, 12)


@pytest.mark.parametrize(
    ("code", "old", "new"),
    [
        (0, "0 states left", "3 states left"),
        (0, "No error has been found", "Stopped"),
        (0, "1,500 states generated, 1,200", "0 states generated, 0"),
        (11, "", ""),
        (12, "", ""),
        (13, "", ""),
        (1, "", ""),
        (-9, "", ""),
    ],
)
def test_an_exit_code_that_the_text_does_not_confirm_is_no_verdict(code, old, new):
    outcome = read_outcome(code, COVERED.replace(old, new), 1.5, parse_cfg("A.cfg", "INVARIANT Bound"))
    assert outcome.result == "broken"
    assert outcome.error.startswith(f"exit code {code}: ")


def test_a_graph_folds_onto_the_variables_that_are_shown():
    folded = figure(DOT, ["x"]).splitlines()
    assert [line.strip() for line in folded if "label" in line] == [
        's0 [label="x = 0", fillcolor="lightgrey"];',
        's1 [label="x = 1", fillcolor="white"];',
        's0 -> s1 [label="Up"];',
        r's1 -> s0 [label="Back\nReset"];',
    ]


def test_a_graph_shows_all_variables_when_none_is_named():
    whole = figure(DOT, [])
    assert r'[label="x = 0\ny = [a |-> 1, b |-> {}]", fillcolor="lightgrey"]' in whole
    assert r'[label="x = 1\ny = \"q\""' in whole
    assert whole.count("->") - whole.count("|->") == 3


def test_a_graph_of_unknown_variables_is_refused():
    with pytest.raises(GraphError, match="no variable z in the states; there are x, y"):
        figure(DOT, ["z"])


def test_a_figure_without_graphviz_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GraphError, match="apt-get install graphviz"):
        draw("digraph {}", tmp_path / "a.svg")
    draw("digraph {}", tmp_path / "a.dot")
    assert (tmp_path / "a.dot").read_text(encoding="utf-8") == "digraph {}"
