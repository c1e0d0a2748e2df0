"""The state graph of a small configuration as a figure.

TLC writes the graph with its actions. States that agree in the chosen variables become one node, which keeps a figure
readable when a state has thirty variables; an edge is an action, and steps that change no chosen variable are left out.
Not handled: layout, which is the work of graphviz.

Spec: the figures of README.md
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_NODE = re.compile(r'^(-?\d+) \[label="(.*?)"(,style = filled)?\];?$')
_EDGE = re.compile(r'^(-?\d+) -> (-?\d+) \[label="(\w*)"')


class GraphError(Exception):
    """No figure can be made. The message says what to do."""


def figure(dot: str, variables: Sequence[str]) -> str:
    """The graph of TLC in the language of dot, folded onto the variables; all of them when none is named.

    Raises: GraphError when a variable is not in the states.
    """
    nodes: dict[str, str] = {}
    first: set[str] = set()
    edges: dict[tuple[str, str, str], None] = {}
    lines = dot.splitlines()
    for line in lines:
        if found := _NODE.match(line.strip()):
            nodes[found[1]] = _label(found[2], variables)
            if found[3]:
                first.add(nodes[found[1]])
    for line in lines:
        if found := _EDGE.match(line.strip()):
            source, target = nodes[found[1]], nodes[found[2]]
            if source != target:
                edges[source, target, found[3]] = None
    names = {label: f"s{number}" for number, label in enumerate(dict.fromkeys(nodes.values()))}
    joined: dict[tuple[str, str], list[str]] = {}
    for source, target, action in edges:
        joined.setdefault((source, target), []).append(action)
    return "\n".join(
        [
            "digraph states {",
            '  graph [rankdir="TB", nodesep=0.3, ranksep=0.4];',
            '  node [shape="box", style="rounded,filled", fillcolor="white", fontname="Helvetica", fontsize=10];',
            '  edge [fontname="Helvetica", fontsize=9];',
            *(_node(name, label, label in first) for label, name in names.items()),
            *(_edge(names[source], names[target], actions) for (source, target), actions in joined.items()),
            "}",
            "",
        ]
    )


def draw(dot: str, target: Path) -> None:
    """Write the figure: as it is when the name ends with .dot, else drawn by graphviz in the format of the ending.

    Raises: GraphError when graphviz is missing or refuses.
    """
    if target.suffix == ".dot":
        target.write_text(dot, encoding="utf-8")
        return
    program = shutil.which("dot")
    if program is None:
        raise GraphError("graphviz draws the figure: apt-get install graphviz, or name a file that ends with .dot")
    command = [program, f"-T{target.suffix.removeprefix('.')}", "-o", str(target)]
    done = subprocess.run(command, input=dot, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise GraphError(f"dot refused: {done.stderr.strip()}")


def _node(name: str, label: str, first: bool) -> str:
    return f'  {name} [label="{label}", fillcolor="{"lightgrey" if first else "white"}"];'


def _edge(source: str, target: str, actions: Sequence[str]) -> str:
    label = "\\n".join(sorted(actions))
    return f'  {source} -> {target} [label="{label}"];'


def _label(text: str, variables: Sequence[str]) -> str:
    """The chosen conjuncts of a state; TLC writes each on a line of its own, longer values over several."""
    conjuncts = re.split(r"(?:^|\\n)/\\\\ ", text)
    values = dict(part.split(" = ", 1) for part in conjuncts if " = " in part)
    if missing := [name for name in variables if name not in values]:
        raise GraphError(f"no variable {missing[0]} in the states; there are {', '.join(values)}")
    chosen = variables or tuple(values)
    return "\\n".join(f"{name} = {_plain(values[name])}" for name in chosen)


def _plain(value: str) -> str:
    """A value on one line."""
    return re.sub(r"\s+", " ", value.replace("\\n", " "))
