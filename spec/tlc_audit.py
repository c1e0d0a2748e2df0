"""Faults of the table that need no run: files, names, mutants and checks that do not belong together.

A check that cannot fail is a fault. So every configuration of the folder has its row, a generated one says exactly what
its row says, a mutant replaces a guard of the specification by another operator, and everything that is checked is
violated by some mutant or sanity row, or is listed with a reason.
Not handled: whether a name in a configuration exists; TLC refuses it.

Spec: models.json, Mutants.tla
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from tlc_cfg import Cfg, CfgError, generated_cfg, read_cfg
from tlc_modules import Folder
from tlc_rows import Row, Table

MUTANTS = "Mutants"


def audit_row(row: Row, folder: Folder, table: Table) -> list[str]:
    """Faults of one row beside its files."""
    faults = [] if row.module in folder.modules else [f"module {row.module}.tla is missing"]
    try:
        cfg = read_cfg(folder.path / row.cfg)
        if row.base is not None:
            faults += _audit_generated(row, folder, table)
    except CfgError as error:
        return [*faults, str(error)]
    if row.expect == "ok" and not cfg.invariants + cfg.properties:
        faults.append(f"{row.cfg} checks nothing: it has no INVARIANT and no PROPERTY")
    if row.expect == "invariant" and row.violates not in cfg.invariants:
        faults.append(f"{row.cfg} has no line INVARIANT {row.violates}, which must fall")
    if row.expect == "property" and row.violates not in cfg.properties:
        faults.append(f"{row.cfg} has no line PROPERTY {row.violates}, which must fall")
    if row.expect == "property" and len(cfg.properties) > 1:
        faults.append(f"{row.cfg} has several properties, and TLC would not say which one fell; keep one")
    if row.kind == "mutant":
        faults += _audit_mutant(row, cfg, folder)
    return faults


def audit_table(table: Table, folder: Folder) -> list[str]:
    """Faults of the table as a whole: what no row names, and what no row can make fall."""
    rows = table.rows
    faults = [] if any(row.coverage for row in rows) else ["no row has coverage, so an action may never be taken"]
    faults += [f"{name} has no row in models.json" for name in folder.cfgs if name not in {row.cfg for row in rows}]
    used = {value for row in rows for value in row.override.values()}
    idle = [name for name in folder.modules.get(MUTANTS, {}) if name.startswith("Mut") and name not in used]
    faults += [f"{name} is defined in {MUTANTS}.tla and no row uses it" for name in idle]
    held = dict.fromkeys(check for cfg in _held_cfgs(rows, folder) for check in cfg.invariants + cfg.properties)
    fallen = {row.violates for row in rows if row.violates is not None}
    faults += [
        f"{name} is checked and no row makes it fall: write a mutant, or give the reason under no_mutant"
        for name in held
        if name not in fallen and name not in table.no_mutant
    ]
    faults += [f"no_mutant lists {name}, which no row checks" for name in table.no_mutant if name not in held]
    faults += [f"no_mutant lists {name}, which a row makes fall" for name in table.no_mutant if name in fallen]
    return faults


def write_generated(table: Table, folder: Folder) -> list[str]:
    """Write every generated configuration that is missing or differs; returns their names.

    Raises: CfgError when a base is missing or lacks a bound.
    """
    written = []
    for row in table.rows:
        if row.base is None:
            continue
        text, path = generated_cfg(row, read_cfg(folder.path / row.base)), folder.path / row.cfg
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            written.append(row.cfg)
    return written


def _held_cfgs(rows: Iterable[Row], folder: Folder) -> list[Cfg]:
    """Configurations that must hold; one that cannot be read is a fault of its row."""
    found = []
    for row in rows:
        if row.expect == "ok":
            with suppress(CfgError):
                found.append(read_cfg(folder.path / row.cfg))
    return found


def _audit_generated(row: Row, folder: Folder, table: Table) -> list[str]:
    """Faults between a generated configuration and its base."""
    faults = []
    base = read_cfg(folder.path / str(row.base))
    if (folder.path / row.cfg).read_text(encoding="utf-8") != generated_cfg(row, base):
        faults.append(f"{row.cfg} is not what models.json says; if the table is right: python spec/tlc.py write")
    holds = [other for other in table.rows if other.cfg == row.base and other.expect == "ok" and other.base is None]
    if not holds:
        faults.append(f"{row.base} is a base, but no row without a base runs it and expects ok")
    elif row.kind == "mutant" and row.violates is not None and row.violates not in base.invariants + base.properties:
        faults.append(f"{row.base} does not check {row.violates}, so nothing shows that it holds without the mutant")
    return faults


def _audit_mutant(row: Row, cfg: Cfg, folder: Folder) -> list[str]:
    """A mutant replaces a guard of the specification, and by something else."""
    ((guard, mutant),) = row.override.items()
    faults = []
    if cfg.constants.get(guard) != f"<- {mutant}":
        faults.append(f"{row.cfg} does not replace {guard} by {mutant}")
    if not mutant.startswith("Mut") or mutant == guard:
        faults.append(f"{guard} is replaced by {mutant}; a mutant's name starts with Mut")
    weak = folder.modules.get(MUTANTS, {}).get(mutant)
    if weak is None:
        faults.append(f"{mutant} is not defined in {MUTANTS}.tla")
    elsewhere = [found for name, found in folder.modules.items() if name != MUTANTS]
    strong = next((found[guard] for found in elsewhere if guard in found), None)
    if strong is None:
        faults.append(f"{guard} is not defined in any module beside {MUTANTS}.tla")
    if weak is not None and strong is not None:
        same = weak.parameters == strong.parameters and weak.body == strong.body
        if same or weak.body in (guard, f"{guard}{weak.parameters}", f"({guard}{weak.parameters})"):
            faults.append(f"{mutant} says the same as {guard}")
    return faults
