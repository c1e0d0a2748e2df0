"""vLLM hands a rank the settings as it was given them: its own class of them has the same fields and defaults."""

from __future__ import annotations

import ast
from dataclasses import MISSING, fields
from pathlib import Path

from nemo_dcr.adapters.vllm import settings
from nemo_dcr.adapters.vllm.settings import Settings
from nemo_dcr.runtime.rpc import LOOPBACK


def test_the_init_info_of_the_engine_has_the_fields_and_defaults_of_the_settings() -> None:
    # Read as text: the engine's module imports vLLM, and this holds without it.
    tree = ast.parse(Path(settings.__file__).with_name("engine.py").read_text(encoding="utf-8"))
    init = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Init")
    given = {}
    for line in init.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            known = MISSING if line.value is None else eval(ast.unparse(line.value), {"LOOPBACK": LOOPBACK})
            given[line.target.id] = (ast.unparse(line.annotation), known)
    assert given == {field.name: (field.type, field.default) for field in fields(Settings)}
