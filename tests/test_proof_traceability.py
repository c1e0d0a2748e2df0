"""The unbounded proof and the specification name the same things: actions, guards and properties, in both directions.

Spec: DeltaRefit, Properties
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

from nemo_dcr.trace import Action
from spec.proof.invariants import PROPERTIES, STEP_PROPERTIES
from spec.proof.model import TRACED, UNTRACED
from tests import proof_counterparts as counterparts
from tests.specification import Specification, read, read_texts, snake

ROOT = Path(__file__).parents[1]
QUOTED = re.compile(r"`([A-Za-z_]\w*)`")


def guards(texts: Iterable[str]) -> list[str]:
    """Names of the functions under `@guard`."""
    nodes = [node for text in texts for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in nodes if "guard" in map(ast.unparse, node.decorator_list)]


def unexplained(needed: Collection[str], reasons: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Names without a reason, reasons without need, and quoted names that do not exist."""
    return sorted(
        [f"{name} has no counterpart and no reason" for name in needed if name not in reasons]
        + [f"{name} needs no reason" for name in reasons if name not in needed]
        + [
            f"{name} quotes {each}, which does not exist"
            for name, reason in reasons.items()
            for each in QUOTED.findall(reason)
            if each not in known
        ]
    )


def unmatched(names: Iterable[str], operators: Iterable[str]) -> list[str]:
    """Names that no operator has."""
    theirs = {snake(name) for name in operators}
    return [name for name in names if name not in theirs]


@pytest.fixture(scope="module")
def spec() -> Specification:
    return read(read_texts(ROOT / "spec"))


@pytest.fixture(scope="module")
def sources() -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted((ROOT / "spec/proof").glob("*.py"))]


def test_proof_trace_and_specification_have_the_same_actions(spec):
    assert set(TRACED) == {action.value for action in Action} == spec.actions


def test_steps_without_a_line_are_few_and_explained(spec):
    assert unexplained(UNTRACED, counterparts.UNTRACED, spec.names | set(UNTRACED)) == []


def test_every_guard_of_the_proof_is_an_operator_or_has_a_reason(spec, sources):
    found = guards(sources)
    assert len(found) == len(set(found)) > 80
    known = spec.names | set(found)
    assert unexplained(unmatched(found, spec.operators), counterparts.GUARDS, known) == []


def test_every_property_of_the_proof_is_one_of_the_specification_or_has_a_reason(spec):
    names = [claim.__name__ for claim in (*PROPERTIES, *STEP_PROPERTIES)]
    assert unexplained(unmatched(names, spec.properties), counterparts.PROPERTIES, spec.names) == []


def test_every_property_of_the_specification_is_proved_or_has_a_reason(spec, sources):
    names = {claim.__name__ for claim in (*PROPERTIES, *STEP_PROPERTIES)}
    missing = [name for name in spec.properties | spec.checked if snake(name) not in names]
    assert unexplained(missing, counterparts.UNPROVED, spec.names | set(guards(sources))) == []


def test_names_without_counterpart_are_found(spec):
    assert unmatched(["is_newer", "is_lucky"], spec.operators) == ["is_lucky"]
    assert guards(["@guard\ndef is_lucky(s): ...\ndef helper(s): ..."]) == ["is_lucky"]
    assert unexplained(["is_lucky"], {}, spec.names) == ["is_lucky has no counterpart and no reason"]
    assert unexplained([], {"is_newer": "`IsNewer`"}, spec.names) == ["is_newer needs no reason"]
    assert unexplained(["a"], {"a": "`IsLucky`"}, spec.names) == ["a quotes IsLucky, which does not exist"]
