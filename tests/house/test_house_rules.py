"""Rules for code that a linter of the shelf does not know: bits, pickles, environment, asserts, sleeps, size."""

from __future__ import annotations

import ast
import re

import pytest

CEILING = 400
TOLERANT = {"allclose", "isclose", "assert_close", "assert_allclose", "assert_almost_equal", "approx"}
# Activations, losses and ratios may be compared with a tolerance, weights never.
TOLERANCE_ALLOWED = {"tests/paper/test_table_2.py": "ratios of payload sizes"}
PICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
PICKLING_CALLS = re.compile(r"^(send_pyobj|recv_pyobj|(all_)?gather_object|(broadcast|scatter|send|recv)_object_list)$")
SLEEP_ALLOWED = {"tests/unit/runtime/test_rpc.py": "a peer that is slow on purpose; nothing waits for it"}
ENVIRONMENT_ALLOWED = {"nemo_dcr/cli/processes.py": "hands its own environment on to the processes it starts"}


def dotted(node: ast.expr) -> str:
    """`torch.save` for the expression torch.save; empty for anything but names and attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}" if dotted(node.value) else node.attr
    return ""


def at(module, node: ast.AST, text: str) -> str:
    return f"{module.path}:{node.lineno}: {text}"


def calls(module) -> list[tuple[ast.Call, str]]:
    return [(node, dotted(node.func)) for node in ast.walk(module.tree) if isinstance(node, ast.Call)]


def tolerant_comparisons(module) -> list[str]:
    """Weights are equal when their stored bits are equal; float equality misses -0.0 and NaN payloads."""
    if module.path in TOLERANCE_ALLOWED:
        return []
    named = [(node, name) for node, name in calls(module) if name.split(".")[-1] in TOLERANT or name == "torch.equal"]
    return [at(module, node, f"{name} compares values; compare words (nemo_dcr.bits)") for node, name in named]


def executable_data(module) -> list[str]:
    """Data from elsewhere never becomes code: no pickle, torch.save, torch.load, eval or exec."""
    faults = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            faults += [at(module, node, f"imports {name}") for name in names if name.split(".")[0] in PICKLERS]
    for node, name in calls(module):
        if name in {"torch.save", "torch.load", "eval", "exec"} or PICKLING_CALLS.match(name.split(".")[-1]):
            faults.append(at(module, node, f"calls {name}"))
        faults += [at(module, node, "allow_pickle") for word in node.keywords if word.arg == "allow_pickle"]
    return faults


def ambient_state(module) -> list[str]:
    """Configuration is an argument: no environment variables, no `global`."""
    faults = [at(module, node, "global") for node in ast.walk(module.tree) if isinstance(node, ast.Global)]
    if module.path not in ENVIRONMENT_ALLOWED:
        nodes = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute | ast.Name)]
        reads = [node for node in nodes if dotted(node) in {"os.environ", "os.getenv", "environ", "getenv"}]
        faults += [at(module, node, "reads the environment") for node in reads]
    return faults


def bare_asserts(module) -> list[str]:
    """An assert states a fact that a lemma proves, and names it on its line: `assert x  # L9`. Suites may assert."""
    if module.path.startswith("nemo_dcr/testing/"):
        return []
    lines = module.text.splitlines()
    asserts = [node for node in ast.walk(module.tree) if isinstance(node, ast.Assert)]
    uncited = [node for node in asserts if not re.search(r"#.*\bL\d+\b", lines[node.lineno - 1])]
    return [at(module, node, "assert cites no lemma; raise a typed error") for node in uncited]


def ordering_sleeps(module) -> list[str]:
    """Tests wait for a fact, never for a while: a sleep stands in a loop that looks for the fact."""
    if module.path in SLEEP_ALLOWED:
        return []
    loops = [node for node in ast.walk(module.tree) if isinstance(node, ast.While)]
    looking = [node for loop in loops if not isinstance(loop.test, ast.Constant) for node in ast.walk(loop)]
    sleeps = [(node, name) for node, name in calls(module) if name.split(".")[-1] == "sleep" and node not in looking]
    return [at(module, node, name) for node, name in sleeps]


def oversize(module) -> list[str]:
    """One module, one idea."""
    lines = module.text.count("\n")
    return [f"{module.path}: {lines} lines, more than {CEILING}"] if lines > CEILING else []


PACKAGE_RULES = {
    rule.__name__: rule for rule in (tolerant_comparisons, executable_data, ambient_state, bare_asserts, oversize)
}
TEST_RULES = {rule.__name__: rule for rule in (tolerant_comparisons, ordering_sleeps)}
BAD = [
    ("tolerant_comparisons", "nemo_dcr/a.py", "torch.testing.assert_close(a, b)"),
    ("tolerant_comparisons", "nemo_dcr/a.py", "torch.equal(a, b)"),
    ("tolerant_comparisons", "nemo_dcr/a.py", "a.isclose(b)"),
    ("executable_data", "nemo_dcr/a.py", "from pickle import loads"),
    ("executable_data", "nemo_dcr/a.py", "torch.load(path)"),
    ("executable_data", "nemo_dcr/a.py", "socket.send_pyobj(x)"),
    ("executable_data", "nemo_dcr/a.py", "dist.all_gather_object(out, x)"),
    ("executable_data", "nemo_dcr/a.py", "eval(text)"),
    ("executable_data", "nemo_dcr/a.py", "np.load(path, allow_pickle=True)"),
    ("ambient_state", "nemo_dcr/a.py", "x = os.environ['X']"),
    ("ambient_state", "nemo_dcr/a.py", "def f():\n    global x"),
    ("bare_asserts", "nemo_dcr/protocol/a.py", "assert x > 0"),
    ("oversize", "nemo_dcr/a.py", "x = 1\n" * (CEILING + 1)),
    ("ordering_sleeps", "tests/a.py", "time.sleep(1)"),
    ("ordering_sleeps", "tests/a.py", "while True:\n    time.sleep(1)"),
]


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_package_keeps_the_house_rule(rule, package):
    assert [fault for module in package for fault in PACKAGE_RULES[rule](module)] == []


@pytest.mark.parametrize("rule", TEST_RULES)
def test_tests_keep_the_house_rule(rule, tests):
    assert [fault for module in tests for fault in TEST_RULES[rule](module)] == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_house_rule_can_fail(rule, path, text, parse_module):
    assert {**PACKAGE_RULES, **TEST_RULES}[rule](parse_module(path, text)) != []


@pytest.mark.parametrize("rule", [*PACKAGE_RULES, "ordering_sleeps"])
def test_house_rule_lets_plain_code_pass(rule, parse_module):
    text = "def f(a, b):\n    assert a  # L9\n    return a == b, model.eval()\n"
    assert {**PACKAGE_RULES, **TEST_RULES}[rule](parse_module("nemo_dcr/codec/a.py", text)) == []


def test_every_rule_has_a_failing_example():
    assert {rule for rule, _, _ in BAD} == {*PACKAGE_RULES, *TEST_RULES}


def test_exemptions_name_files_that_exist(root):
    exempt = {**TOLERANCE_ALLOWED, **SLEEP_ALLOWED, **ENVIRONMENT_ALLOWED}
    assert [path for path in exempt if not (root / path).is_file()] == []
    assert all(exempt.values())
