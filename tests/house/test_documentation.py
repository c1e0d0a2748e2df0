"""Rules for text: docstrings say what raises, modules carry their footer, links resolve, nothing names a machine."""

from __future__ import annotations

import ast
import re

NOUN_LEVELS = ("bits", "canonical", "kernels", "record", "control_rules", "codec")
NOUN_LEVELS = (*NOUN_LEVELS, "source", "receiver", "protocol", "transport", "control")
FOOTER = re.compile(r"^(Paper|Spec): ", re.MULTILINE)
NOT_A_NOUN = {"nemo_dcr.kernels": "a folder of loops; the modules in it carry the footer"}
TEXT_SUFFIXES = {"", ".md", ".py", ".toml", ".txt", ".yaml", ".yml", ".cfg", ".json", ".sh", ".tla"}
# Built from pieces, so that this file does not hold what it forbids.
FORBIDDEN = re.compile(
    "|".join(
        (
            *(rf"(?<![\w.~-])/{name}/" for name in ("work", "root", "farm", "home", "Users", "opt")),
            *(rf"{host}\.{domain}" for host, domain in (("pypi", "org"), ("pythonhosted", "org"), ("npmjs", "org"))),
            *(rf"{host}\.{domain}" for host, domain in (("debian", "org"), ("download.pytorch", "org"))),
        )
    )
)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)(?:#[^)]*)?\)")


def own_raises(function: ast.AST) -> set[str]:
    """Names of the exceptions that a function raises itself; nested functions and bare re-raises do not count."""
    found: set[str] = set()
    stack = list(ast.iter_child_nodes(function))
    while stack:
        node = stack.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and node.exc is not None:
            called = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "?"))
        stack += ast.iter_child_nodes(node)
    return found - {"InternalError"}


def is_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A command of the command line: its docstring is what `--help` shows; see docs/exit-codes.md."""
    return any(ast.unparse(decorator).endswith(".command()") for decorator in function.decorator_list)


def public_functions(owner: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of a module and methods of its public classes; nested and private ones do not count."""
    found = []
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found.append(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += public_functions(node)
    return found


def silent_raises(module) -> list[str]:
    """Public functions whose docstring neither says that they raise nor points at the interface that says it."""
    faults = []
    for node in public_functions(module.tree):
        raised = {name for name in own_raises(node) if name[:1].isupper()}
        told = re.search(r"\b[Rr]aises?\b|\braising\b|\b[Ss]ee `\w+\.\w+`", ast.get_docstring(node) or "")
        if raised and not told and not is_command(node):
            faults.append(f"{module.path}:{node.lineno}: {node.name} raises {', '.join(sorted(raised))}")
    return faults


def missing_footer(module) -> list[str]:
    """Modules of levels 1 to 3 that name neither the paper nor the specification."""
    component = ".".join(module.name.split(".")[1:2])
    if component not in NOUN_LEVELS or module.name in NOT_A_NOUN:
        return []
    return [] if FOOTER.search(ast.get_docstring(module.tree) or "") else [f"{module.path}: no `Paper:` or `Spec:`"]


def machine_names(path: str, text: str) -> list[str]:
    """Lines that hold an absolute path of one machine or the host of a registry."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{path}:{number}: {hit[0]}" for number, line in lines if (hit := FORBIDDEN.search(line))]


def test_public_functions_that_raise_say_so(package):
    assert [fault for module in package for fault in silent_raises(module)] == []


def test_modules_of_the_inner_layers_name_their_source(package):
    assert [fault for module in package for fault in missing_footer(module)] == []
    assert NOT_A_NOUN.keys() <= {module.name for module in package}


def test_nothing_in_the_checkout_names_a_machine_or_a_registry(checkout, root):
    faults = []
    for file in checkout:
        if file.suffix in TEXT_SUFFIXES and file.name != "LICENSE":
            path = file.relative_to(root).as_posix()
            faults += machine_names(path, file.read_text(encoding="utf-8", errors="replace"))
    assert faults == []


def test_links_between_pages_resolve(checkout, root):
    broken = []
    for page in (file for file in checkout if file.suffix == ".md"):
        targets = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
        broken += [f"{page.relative_to(root)}: {link}" for link in targets if not (page.parent / link).exists()]
    assert broken == []


def test_text_rules_can_fail(parse_module):
    silent = parse_module("nemo_dcr/a.py", 'def f():\n    """Do it."""\n    raise ValueError("no")\n')
    assert silent_raises(silent) != []
    method = parse_module("nemo_dcr/a.py", 'class A:\n    def f(self):\n        """Do."""\n        raise ValueError\n')
    assert silent_raises(method) != []
    assert missing_footer(parse_module("nemo_dcr/codec/a.py", '"""Codes things."""')) != []
    assert machine_names("a.md", "see " + "/".join(("", "work", "main"))) != []
    assert machine_names("a.md", ".".join(("https://pypi", "org")) + "/simple") != []
    assert LINK.findall("[page](docs/x.md#here)") == ["docs/x.md"]


def test_text_rules_let_good_text_pass(parse_module):
    told = 'def f():\n    """Do it.\n\n    Raises: ValueError.\n    """\n    raise ValueError("no")\n'
    assert silent_raises(parse_module("nemo_dcr/a.py", told)) == []
    assert missing_footer(parse_module("nemo_dcr/codec/a.py", '"""Codes.\n\nPaper: Appendix D\n"""')) == []
    assert machine_names("a.md", "run it in framework/roots/ or under /tmp/x") == []
