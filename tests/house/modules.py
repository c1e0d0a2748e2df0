"""Python files of the checkout as text and syntax tree: what house rules and traceability look at."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One parsed Python file."""

    path: str
    """Relative to the repository root, with forward slashes."""
    name: str
    """Dotted name; a package carries its own name, without `__init__`."""
    text: str
    tree: ast.Module


def parse(path: str, text: str) -> Module:
    """Parse source text under a path that need not exist, so that a rule can be tried on a bad example."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] == "__init__":
        parts.pop()
    return Module(path, ".".join(parts), text, ast.parse(text))


def read_tree(*folders: str) -> tuple[Module, ...]:
    """All Python files under the folders, sorted by path."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return tuple(parse(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files)


def docstrings(module: Module) -> list[str]:
    """Of the module, its classes and its functions; empty where there is none."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(module.tree) if isinstance(node, owners)]


def functions(module: Module) -> list[str]:
    """Functions, methods and classes, each with the dotted path that leads to it."""
    return [name for name, node in _members(module.tree, module.name) if not isinstance(node, ast.AnnAssign)]


def fields(module: Module) -> list[str]:
    """Annotated fields of classes, each with the dotted path that leads to it."""
    return [name for name, node in _members(module.tree, module.name) if isinstance(node, ast.AnnAssign)]


def _members(node: ast.AST, path: str) -> list[tuple[str, ast.AST]]:
    found: list[tuple[str, ast.AST]] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{path}.{child.name}"
            found += [(name, child), *_members(child, name)]
        elif isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            found.append((f"{path}.{child.target.id}", child))
    return found
