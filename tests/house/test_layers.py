"""Imports point down, siblings do not meet, and heavy libraries stay in their layers (CONTRIBUTING, section Layers)."""

from __future__ import annotations

import ast
import sys

LEVEL = {
    **dict.fromkeys(("errors", "ids", "config", "config_file", "trace"), 0),
    **dict.fromkeys(("bits", "canonical", "kernels", "record", "control_rules"), 1),
    "codec": 2,
    **dict.fromkeys(("source", "receiver", "protocol", "transport", "control"), 3),
    **dict.fromkeys(("runtime", "adapters", "testing", "checkpoint", "planner"), 4),
    **dict.fromkeys(("cli", "report"), 5),
}
SIBLINGS_APART = {3: "components of level 3 meet only in runtime", 4: "adapters and helpers are handed to runtime"}
MAY_MEET = {("testing", "runtime"), ("adapters", "runtime"), ("adapters", "checkpoint")}
TORCH = ("nemo_dcr.bits.tensors", "nemo_dcr.source", "nemo_dcr.receiver", "nemo_dcr.adapters", "nemo_dcr.testing")
TORCH = (*TORCH, "nemo_dcr.runtime", "nemo_dcr.cli")
NUMPY = (*TORCH, "nemo_dcr.bits", "nemo_dcr.canonical", "nemo_dcr.kernels", "nemo_dcr.codec", "nemo_dcr.checkpoint")
FRAMEWORKS = ("vllm", "megatron", "ray", "transformers", "gguf", "accelerate")
PURE = {"ids", "errors", "trace", "config", "record", "control_rules", "protocol"}
PURE_STDLIB = {"__future__", "dataclasses", "enum", "hashlib", "collections", "typing", "itertools", "functools"}


def imports(module) -> list[tuple[int, str]]:
    """Line and dotted name of every import, wherever it stands; relative ones are refused by `layer_faults`."""
    found = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            # `from nemo_dcr import bits` imports the component, `from nemo_dcr.codec import records` the module.
            ours = base.split(".")[0] == "nemo_dcr"
            found += [(node.lineno, f"{base}.{alias.name}" if ours else base) for alias in node.names]
    return sorted(set(found))


def component(name: str) -> str:
    """`protocol` for nemo_dcr.protocol.attempt; empty for the package itself."""
    return ".".join(name.split(".")[1:2])


def under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def layer_faults(module) -> list[str]:
    """Imports of one module that break the layers."""
    here = component(module.name)
    if not here:
        return []
    if here not in LEVEL:
        return [f"{module.path}: {here!r} has no level; place it in LEVEL"]
    faults = []
    for line, name in imports(module):
        at = f"{module.path}:{line}: imports {name}"
        top, there = name.split(".")[0], component(name)
        if name.startswith("."):
            faults.append(f"{at}: write the absolute name")
        elif top == "nemo_dcr" and there not in LEVEL:
            faults += [f"{at}: not a component"] if there.strip("_") == there != "" else []
        elif top == "nemo_dcr" and LEVEL[there] > LEVEL[here]:
            faults.append(f"{at}: level {LEVEL[here]} may not import level {LEVEL[there]}")
        elif top == "nemo_dcr" and there != here and LEVEL[there] == LEVEL[here] in SIBLINGS_APART:
            if (here, there) not in MAY_MEET:
                faults.append(f"{at}: {SIBLINGS_APART[LEVEL[here]]}")
        elif top == "torch" and not under(module.name, TORCH):
            faults.append(f"{at}: torch stays in {', '.join(TORCH)}")
        elif top == "numpy" and not under(module.name, NUMPY):
            faults.append(f"{at}: numpy stays in the layers that hold weights")
        elif top in FRAMEWORKS and not under(module.name, ("nemo_dcr.adapters", "nemo_dcr.testing")):
            faults.append(f"{at}: only adapters and testing import a framework")
        if here == "protocol" and not (there in PURE if top == "nemo_dcr" else top in PURE_STDLIB):
            faults.append(f"{at}: protocol is pure")
    return faults


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of the import graph, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(graph.get(name, ())):
            if cycle := visit(other, [*path, name]):
                return cycle
        done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


def test_imports_point_down_and_heavy_libraries_stay_in_their_layers(package):
    assert [fault for module in package for fault in layer_faults(module)] == []


def test_import_graph_has_no_cycle(package):
    names = {module.name for module in package}
    graph = {
        module.name: {
            found for _, name in imports(module) for found in (name, name.rpartition(".")[0]) if found in names
        }
        - {module.name, "nemo_dcr"}
        for module in package
    }
    assert import_cycle(graph) == []


def test_every_level_has_a_component_in_the_package(package):
    present = {component(module.name) for module in package}
    assert sorted(set(LEVEL) - present) == []


def test_pure_standard_library_names_exist():
    assert sys.stdlib_module_names >= PURE_STDLIB - {"__future__"}


def test_layer_rule_can_fail(parse_module):
    bad = {
        "nemo_dcr/ids.py": "import nemo_dcr.codec.records",
        "nemo_dcr/codec/a.py": "from nemo_dcr.source import delta",
        "nemo_dcr/source/a.py": "def f():\n    from nemo_dcr.receiver import apply",
        "nemo_dcr/runtime/a.py": "from nemo_dcr import testing",
        "nemo_dcr/codec/b.py": "import torch.nn as nn",
        "nemo_dcr/transport/a.py": "import numpy as np",
        "nemo_dcr/protocol/a.py": "import time",
        "nemo_dcr/protocol/b.py": "from nemo_dcr.bits import width",
        "nemo_dcr/receiver/a.py": "from .hook import Placer",
        "nemo_dcr/receiver/b.py": "import vllm",
        "nemo_dcr/novelty.py": "import os",
    }
    assert [path for path, text in bad.items() if not layer_faults(parse_module(path, text))] == []
    assert import_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_layer_rule_lets_good_imports_pass(parse_module):
    good = "from nemo_dcr import bits\nfrom nemo_dcr.codec.records import Item\nimport torch\nimport numpy"
    assert layer_faults(parse_module("nemo_dcr/receiver/apply.py", good)) == []
    assert import_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
