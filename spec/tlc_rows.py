"""The table of TLC runs, models.json: what each configuration must show.

One row is one run of TLC. `mc` rows check the specification, `mutant` rows weaken one guard and name the property that
must fall, `sanity` rows deny that something is reachable and must be violated. A row with `base` has a generated
configuration: the base, with bounds replaced (`constants`), one operator replaced (`override`, mutants only) and
`violates` as its only check.
Not handled: whether the files agree with the table (tlc_audit), and running it (tlc_java).

Spec: every configuration of this folder
"""

from __future__ import annotations

import json
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

KINDS = ("mc", "mutant", "sanity")
EXPECTED = ("ok", "invariant", "property", "deadlock")
SETS = ("ci", "deep")
FLAGS = ("-deadlock", "-lncheck", "-simulate", "-depth", "-seed", "-fp", "-difftrace", "-checkpoint")
SOURCE, BASE = ("name", "module", "cfg", "kind", "suite"), ("base", "override", "constants")
TABLE = "models.json"


class TableError(Exception):
    """models.json cannot be read as a table of runs. The message names the row and the repair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run of TLC and what it must show. Field names are the keys of models.json, `set` apart."""

    name: str
    """Unique; what `--only`, `run` and the table call it."""
    module: str
    """Root module, without .tla."""
    cfg: str
    """File name of the configuration."""
    kind: str
    """One of KINDS; "control" for a mutant's bounds without the mutant, which no table holds."""
    suite: str = "ci"
    """Key `set`: ci runs on every commit, deep with --deep only."""
    base: str | None = None
    """Configuration file that this one is generated from."""
    override: dict[str, str] = field(default_factory=dict)
    """The one guard of a mutant and its replacement out of Mutants.tla."""
    constants: dict[str, str] = field(default_factory=dict)
    """Bounds that replace those of the base, as cfg text: {"MaxAttempts": "2"}."""
    expect: str
    """One of EXPECTED."""
    violates: str | None = None
    """The invariant or property that must fall."""
    distinct: int | None = None
    """Distinct states, exact; null until --update records it, and for runs that stop at a violation."""
    depth: int | None = None
    """Depth of the graph, or length of the violating trace; null is not compared. Exact with one worker only."""
    seconds: int
    """Time budget on two cores; a run over it is stopped and red."""
    workers: int = 1
    heap: str = "2g"
    """Limit of the Java heap."""
    flags: tuple[str, ...] = ()
    """More options for TLC, such as "-deadlock" or "-lncheck final"."""
    coverage: bool = False
    """Whether the actions taken here count for "every action of Next is taken"; slows TLC a little."""
    why: str
    """One sentence."""

    @property
    def simulates(self) -> bool:
        """Whether TLC walks at random here, so that there are no distinct states to count."""
        return any(flag.startswith("-simulate") for flag in self.flags)


@dataclass(frozen=True, slots=True)
class Table:
    """All of models.json."""

    rows: tuple[Row, ...]
    no_mutant: dict[str, str]
    """Checked invariants and properties that no row is meant to violate, each with the reason."""


def read_table(path: Path) -> Table:
    """Read and check models.json.

    Raises: TableError for a missing file, a wrong key or a value that cannot be.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except FileNotFoundError:
        raise TableError(f"{path} is missing; it lists the runs of TLC") from None
    except ValueError as error:
        raise TableError(f"{path.name} is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise TableError(f'{path.name} must be an object with "rows", a list of runs, and "no_mutant"')
    if unknown := sorted(data.keys() - {"rows", "no_mutant"}):
        raise TableError(f"{path.name}: unknown key {unknown[0]!r}; known are rows and no_mutant")
    no_mutant = data.get("no_mutant", {})
    if not _is_text_map(no_mutant) or not all(no_mutant.values()):
        raise TableError(f'{path.name}: "no_mutant" maps a name to the reason why nothing is meant to violate it')
    rows = tuple(_row(entry, number) for number, entry in enumerate(data["rows"], 1))
    for label, values in (("name", [row.name for row in rows]), ("cfg", [row.cfg for row in rows])):
        if twice := sorted({value for value in values if values.count(value) > 1}):
            raise TableError(f"{path.name}: {label} {twice[0]!r} stands in two rows")
    return Table(rows, no_mutant)


def write_table(path: Path, table: Table) -> None:
    """Write models.json in its one format, defaults left out."""
    head = [f"  {_text(name)}: {_text(reason)}" for name, reason in table.no_mutant.items()]
    no_mutant = "{\n" + ",\n".join(head) + "\n }" if head else "{}"
    body = ",\n".join(_row_text(row) for row in table.rows)
    path.write_text(f'{{"no_mutant": {no_mutant},\n "rows": [\n{body}\n]}}\n', encoding="utf-8")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"key {twice[0]!r} stands twice in one object")
    return dict(pairs)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _is_natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _row(entry: Any, number: int) -> Row:
    """One row, each value checked for its type and for what it can mean beside the others."""
    where = f"{TABLE}, row {number}"
    if not isinstance(entry, dict):
        raise TableError(f"{where}: a row is an object")
    where = f"{TABLE}, row {number} ({entry.get('name', 'no name')})"
    known = {("set" if key.name == "suite" else key.name): key for key in fields(Row)}
    if unknown := sorted(entry.keys() - known.keys()):
        raise TableError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    needed = [name for name, key in known.items() if key.default is MISSING and key.default_factory is MISSING]
    if lacking := [name for name in needed if name not in entry]:
        raise TableError(f"{where}: key {lacking[0]!r} is missing")
    for name, value in entry.items():
        if fault := _fault_of_value(name, value):
            raise TableError(f"{where}: {name} {fault}, not {value!r}")
    values = {("suite" if name == "set" else name): value for name, value in entry.items()}
    row = Row(**{**values, "flags": tuple(values.get("flags", ()))})
    if fault := _fault_of_row(row):
        raise TableError(f"{where}: {fault}")
    return row


def _fault_of_value(name: str, value: Any) -> str | None:
    """What is wrong with one value taken alone."""
    choices = {"kind": KINDS, "expect": EXPECTED, "set": SETS}
    if name in choices:
        return None if value in choices[name] else f"must be one of {', '.join(choices[name])}"
    if name in ("distinct", "depth"):
        return None if value is None or _is_natural(value) else "must be null or a number above 0"
    if name in ("seconds", "workers"):
        return None if _is_natural(value) else "must be a number above 0"
    if name in ("violates", "base"):
        return None if value is None or (isinstance(value, str) and value) else "must be null or a name"
    if name in ("override", "constants"):
        return None if _is_text_map(value) else "must map names to cfg text"
    if name == "coverage":
        return None if isinstance(value, bool) else "must be true or false"
    if name == "flags":
        texts = isinstance(value, list) and all(isinstance(flag, str) for flag in value)
        good = texts and all(flag.split(maxsplit=1)[:1] in [[known] for known in FLAGS] for flag in value)
        return None if good else f"must be a list whose entries start with {', '.join(FLAGS)}"
    return None if isinstance(value, str) and value.strip() else "must be text"


def _fault_of_row(row: Row) -> str | None:
    """What is wrong with the values of a row taken together."""
    named = row.expect in ("invariant", "property")
    if named != (row.violates is not None):
        return "violates names what must fall: needed for expect invariant or property, null otherwise"
    if row.kind != "mc" and row.expect == "ok":
        return f"a {row.kind} row must be violated; expect says ok"
    if row.kind != "mc" and row.base is None:
        return f"a {row.kind} row needs a base, the configuration that it is generated from"
    if row.base is None and (row.override or row.constants):
        return "override and constants change a base, and there is none"
    if row.kind == "mc" and row.base is not None and row.expect != "ok":
        return "an mc row with a base is the base with other bounds; it must expect ok"
    if (row.kind == "mutant") != (len(row.override) == 1):
        return "a mutant row overrides exactly one operator, other rows none"
    if row.distinct is not None and (row.expect != "ok" or row.simulates):
        return "only a full search that ends without a violation has an exact count; set distinct to null"
    if row.depth is not None and row.workers > 1:
        return "with several workers the depth is not exact; set depth to null"
    if row.expect == "deadlock" and "-deadlock" in row.flags:
        return "the flag -deadlock switches the search for deadlocks off"
    if row.coverage and row.expect != "ok":
        return "coverage counts on rows that expect ok"
    return None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _row_text(row: Row) -> str:
    """One row on a few lines: which run, what it is generated from, what it must show, why."""
    texts = {}
    for key in fields(Row):
        value = getattr(row, key.name)
        default = key.default_factory() if key.default_factory is not MISSING else key.default
        counted = key.name == "distinct" and row.expect == "ok" and not row.simulates
        if value != default or counted:
            texts[key.name] = f"{_text('set' if key.name == 'suite' else key.name)}: {_text(value)}"
    lines = [[texts.pop(name) for name in group if name in texts] for group in (SOURCE, BASE)]
    why = texts.pop("why")
    return "  {" + ",\n   ".join(", ".join(line) for line in (*lines, list(texts.values()), [why]) if line) + "}"
