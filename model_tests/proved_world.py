"""The world of the proved model over the constants of a specification's configuration, and what went wrong in a step.

A receiver is a rank that is an instance of its own, an element is an item, a payload is an item at its owner, and words
are integers: bit by bit those of the specification, so XOR is real.

Paper: Appendix B   Spec: CONSTANTS and Init of DeltaRefit   Proofs: PROOFS.md section 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from model_tests.model_state import Config
from spec.proof import control, coordinator, owners, receiver_guards
from spec.proof.dsl import Concrete
from spec.proof.model import ACTIONS
from spec.proof.vocabulary import TABLE
from spec.proof.walk import World, first

Step = tuple[str, tuple[Any, ...]]
"""An action of the specification with its parameters."""
RAW = 1
"""Memory after a crash: bit 0, as in the specification."""


class NotDue(Exception):
    """The proved model does not allow an action here."""


class Rejected(Exception):
    """A step that the proved model may not take, or after which it is elsewhere."""

    def __init__(self, step: Step, why: str) -> None:
        super().__init__(f"{step[0]}{step[1]}: {why}")
        self.step, self.why = step, why


def bits(word: Iterable[int]) -> int:
    """A word of the specification as an integer."""
    return sum(1 << bit for bit in word)


def mode_name(mode: str) -> str:
    """`xor` names the operation in the proof."""
    return "by_xor" if mode == "xor" else mode


def unborn(config: Config) -> Concrete:
    """The first state of the proof, over the things of these constants: no process of a receiver has started."""
    payloads = [(config.owner_of[item], item) for item in config.items]
    same: dict[str, Callable[..., Any]] = {
        "sync": lambda attempt: config.gate_mode == "sync",
        "owner_of": lambda element: config.owner_of[element],
        "instance": lambda receiver: receiver,
        "leads": lambda receiver: True,
        "owns": lambda payload, owner: payload[0] == owner,
        "packed": lambda attempt, run, element: (config.owner_of[element], element),
        "word": lambda candidate, element: 0,
        "trash": lambda seed, element: RAW,
        "store": lambda receiver, element: RAW,
        "base": lambda element: 0,
        "run": lambda owner: 1,
        "run_used": lambda owner, run: run == 1,
    }
    things: dict[str, list[Any]] = {
        "Coordinator": list(config.coordinators),
        "Receiver": list(config.receivers),
        "Instance": list(config.receivers),
        "Owner": list(config.owners),
        "Element": list(config.items),
        "Payload": payloads,
        "Request": list(config.requests),
        "Run": [1],
        "Seed": [0],
        "Word": [],
        **{sort: [0] for sort in ("Attempt", "Incarnation", "Epoch", "Version", "Candidate")},
        **{sort: first(World()).things[sort] for sort in ("Mode", "Kind", "Bool")},
    }
    return Concrete(TABLE, things, {}, {**first(World()).defaults, **same})


@cache
def _guards() -> dict[str, Callable[..., Any]]:
    """Every named condition, without the look at mutants."""
    modules = (control, coordinator, owners, receiver_guards)
    found = [each for module in modules for each in vars(module).values() if hasattr(each, "__wrapped__")]
    return {each.__name__: each.__wrapped__ for each in found}


def false_guards(state: Concrete, name: str, arguments: tuple[Any, ...]) -> list[str]:
    """Named conditions without which the action might be taken; all that are false when more than one is missing."""
    found: list[str] = []

    def watched(guard: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def look(s: Concrete, *things: Any) -> Any:
            answer = function(s, *things)
            if answer is False and guard not in found:
                found.append(guard)
            return answer

        return look

    def holds(swaps: dict[str, Callable[..., Any]]) -> bool:
        with_swaps = Concrete(state.table, state.things, state.values, state.defaults, {**state.swaps, **swaps})
        return ACTIONS[name](with_swaps, *arguments)[0] is True

    holds({guard: watched(guard, state.swaps.get(guard, function)) for guard, function in _guards().items()})
    decisive = [guard for guard in found if holds({guard: lambda s, *things: True})]
    return decisive or found


def snake(name: str) -> str:
    """`EndpointPrepare` is `endpoint_prepare`."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")
