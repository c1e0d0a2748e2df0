"""What the threat model leans on exists: the tests that it names, and a package that never unpickles."""

from __future__ import annotations

import ast
import re

from tests.documents.blocks import ROOT

PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
TEST = re.compile(r"`(tests/[\w/]+\.py)`")
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
HELPERS = "nemo_dcr/testing/"
"""Test helpers hand arguments to processes that they fork themselves."""


def unpickled(path: str, text: str) -> list[str]:
    """Imports of modules that run code out of data, and loads of torch that are not told to refuse it."""
    faults = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        faults += [f"{path}:{node.lineno}: {name}" for name in names if name.split(".")[0] in UNPICKLING]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "torch.load",
            "yaml.load",
            "np.load",
            "numpy.load",
        ):
            faults.append(f"{path}:{node.lineno}: {ast.unparse(node.func)}")
    return faults


def test_every_test_that_the_page_names_exists_and_has_tests():
    named = TEST.findall(PAGE)
    assert len(named) >= 8
    without = [name for name in named if "\ndef test_" not in (ROOT / name).read_text(encoding="utf-8")]
    assert without == []


def test_no_file_or_message_of_the_package_is_a_pickle():
    files = [file for file in (ROOT / "nemo_dcr").rglob("*.py") if HELPERS not in file.as_posix()]
    assert [fault for file in files for fault in unpickled(file.name, file.read_text(encoding="utf-8"))] == []


def test_the_search_for_pickles_can_fail():
    for text in (
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load(f)",
        "import joblib.numpy_pickle",
    ):
        assert unpickled("a.py", text) != []
    assert unpickled("a.py", "import json\njson.load(f)") == []
