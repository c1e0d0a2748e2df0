"""The page docs/loader-paths.md: made from a run over every tiny model and layout, and compared with samples of it.

The run is kept as docs/loader-paths.json; the page is that file in words. `python -m tests.loaders.paths_table` makes
both anew (`make loaders-all`); with names of models it runs only these. Each model has the commit that it ran with.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.loaders.tiny_models import MODELS

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "docs/loader-paths.json"
PAGE = ROOT / "docs/loader-paths.md"
LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1))
EXPERT_LAYOUTS = ((1, 2), (2, 2), (1, 4), (2, 4), (4, 4))
"""(ranks of an instance, ranks that share out the experts)"""


def layouts_of(model: str) -> tuple[tuple[int, int], ...]:
    """Layouts that apply to the model."""
    return (*LAYOUTS, *EXPERT_LAYOUTS) if MODELS[model].is_moe else LAYOUTS


def layout_name(tp: int, ep: int) -> str:
    """TP2, or TP2 EP4."""
    return f"TP{tp} EP{ep}" if ep > 1 else f"TP{tp}"


INTRODUCTION = (
    "",
    "Tiny configurations, the real classes and loaders of vLLM, one rank at a time. On a rank that is called exact, a",
    "dense reload, one tensor in each call, a delta of XOR and overwrites, and a retry of overwrites over a random",
    "mixture ended in the same bits of all storage. Every written storage had changed; NaN payloads and -0.0 were",
    "among the values. `make loaders` repeats a sample and compares it with this page.",
    "",
    "XOR: both encodings are exact. Overwrite: a cast or a computation is on the way, so that names travel as values.",
    "Skipped: a rank does not take the tensor, such as an expert of another rank. EP counts the ranks that share out",
    "the experts, and an instance has TP ranks. Numbers in names are N. Weights that are changed after loading are",
    "another matter: they are looked for when an engine starts.",
    "",
)


@dataclass(frozen=True)
class LayoutResult:
    """All ranks of one model in one layout, or those that were asked for."""

    verdict: str
    """`exact`, `refused: ...` or `not built: ...`; anything else is a fault."""
    rows: dict[str, dict[str, list[str]]]
    """Ways by class, by kind."""
    served_by: str
    """vLLM's class."""
    ranks: int


class Workshop:
    """Builds tiny models in a directory of its own."""

    def __init__(self) -> None:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        logging.disable(logging.WARNING)
        self._directory = tempfile.TemporaryDirectory(prefix="nemo-dcr-loaders-")
        self._tables: dict[str, Any] = {}

    def of(self, model: str) -> tuple[Path, Any, Any, Any]:
        """Directory, tensor table, and two versions of the model."""
        from nemo_dcr.adapters.vllm.checkpoint_table import table_of_config
        from tests.loaders.exactness import two_versions

        if model not in self._tables:
            tensors = table_of_config(MODELS[model].config())
            directory = MODELS[model].write(Path(self._directory.name) / model)
            self._tables[model] = (directory, tensors, *two_versions(tensors, seed=len(tensors)))
        return self._tables[model]

    def build(self, model: str, place: Any, **options: Any) -> Any:
        """A rank of the model, empty."""
        from nemo_dcr.adapters.vllm.forged import ForgedModel

        return ForgedModel(self.of(model)[0], place, **options)

    def run(self, model: str, tp: int, ep: int, *, ranks: Iterable[int] | None = None) -> LayoutResult:
        """Play every rank of a layout, or some of them."""
        from nemo_dcr.adapters.vllm.forged import Place
        from nemo_dcr.errors import UnsupportedLoaderPath
        from nemo_dcr.receiver.paths import unite_tables
        from nemo_dcr.receiver.summary import rows_of
        from tests.loaders.exactness import Rank, unchanged

        _, tensors, old, new = self.of(model)
        places = Place.of(tp, ep)
        chosen = sorted(range(len(places)) if ranks is None else ranks)
        results, served_by = {}, ""
        for rank in chosen:
            try:
                engine = self.build(model, places[rank])
            except Exception as problem:
                return LayoutResult(f"not built: {_first_line(problem)}", {}, "", 0)
            served_by = type(engine.module).__name__
            try:
                results[rank] = Rank(engine, tensors, old, new).play(np.random.default_rng(rank))
            except Exception as problem:
                return LayoutResult(f"fault: {_first_line(problem)}", {}, served_by, len(results))
        tables = {str(rank): result.table for rank, result in results.items()}
        rows: dict[str, dict[str, list[str]]] = {}
        for row in rows_of(table.paths for table in tables.values()):
            rows.setdefault(row.kind, {}).setdefault(str(row.path_class), []).append(row.way)
        faults = [fault for result in results.values() for fault in result.faults]
        verdict = "exact"
        if faults:
            verdict = f"fault: {faults[0]}"
        elif any(table.reasons for table in tables.values()):
            name, (code, _) = sorted(next(table.reasons for table in tables.values() if table.reasons).items())[0]
            verdict = f"refused: {name} ({code})"
        elif ranks is None:
            same = unchanged(results)
            verdict = f"fault: no rank saw {same[0]} change" if same else verdict
            try:
                unite_tables({rank: table.classes for rank, table in tables.items()})
            except UnsupportedLoaderPath as refusal:
                verdict = f"refused: {refusal.tensor} ({refusal.condition})"
        return LayoutResult(verdict, rows, served_by, len(chosen))


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    told = next((line for line in lines if "error for" not in line), lines[0] if lines else "")
    return f"{type(problem).__name__}: {told.split(' [type=')[0][:160]}"


def record_all(names: Iterable[str]) -> dict[str, Any]:
    """Run everything and describe it."""
    import vllm

    workshop, models = Workshop(), {}
    for name in names:
        kinds: dict[str, dict[str, list[str]]] = {}
        layouts, served_by, ranks, begin = {}, "", 0, time.monotonic()
        for tp, ep in layouts_of(name):
            result = workshop.run(name, tp, ep)
            layouts[layout_name(tp, ep)] = result.verdict
            served_by, ranks = result.served_by or served_by, ranks + result.ranks
            for kind, ways in result.rows.items():
                for path_class, told in ways.items():
                    entry = kinds.setdefault(kind, {}).setdefault(path_class, [])
                    entry += [way for way in told if way not in entry]
        print(f"{name}: {ranks} ranks in {time.monotonic() - begin:.0f} s, {layouts}", flush=True)
        models[name] = {
            "commit": commit(),
            "architecture": MODELS[name].architecture,
            "served_by": served_by,
            "kind": MODELS[name].kind,
            "ranks": ranks,
            "layouts": layouts,
            "tensors": {kind: {key: sorted(ways) for key, ways in kinds[kind].items()} for kind in sorted(kinds)},
        }
    return {"vllm": vllm.__version__, "models": models}


def commit() -> str:
    """The commit that is checked out."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def drift(record: dict[str, Any], model: str, tp: int, ep: int, result: LayoutResult) -> list[str]:
    """What a run of some ranks shows that the record does not say."""
    known = record["models"].get(model)
    if known is None:
        return [f"{model} is not in the table"]
    told = known["layouts"].get(layout_name(tp, ep), "nothing")
    faults = []
    if result.verdict != told and not (told.startswith("refused") and result.verdict == "exact"):
        faults.append(f"{model} {layout_name(tp, ep)}: the table says {told!r}, the run {result.verdict!r}")
    for kind, ways in result.rows.items():
        for path_class, found in ways.items():
            listed = known["tensors"].get(kind, {}).get(path_class, [])
            faults += [
                f"{model} {kind}: {path_class}, {way!r} is not in the table" for way in found if way not in listed
            ]
    return faults


def page_of(record: dict[str, Any]) -> str:
    """The page in Markdown."""
    models = record["models"]
    ranks = sum(entry["ranks"] for entry in models.values())
    lines = [
        "# What vLLM's loaders do with each tensor",
        "",
        f"Made by `make loaders-all` with vLLM {record['vllm']}: {len(models)} architectures, {ranks} ranks. "
        f"Commits: {_commits(models)}.",
        *INTRODUCTION,
        "| Model | Architecture | Served by | Kind | Exact on | Not exact on |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in models.items():
        exact = [layout for layout, verdict in entry["layouts"].items() if verdict == "exact"]
        others: dict[str, list[str]] = {}
        for layout, verdict in entry["layouts"].items():
            if verdict != "exact":
                others.setdefault(verdict, []).append(layout)
        told = "; ".join(f"{', '.join(places)}: {_cell(verdict)}" for verdict, places in others.items())
        served = "the same" if entry["served_by"] == entry["architecture"] else entry["served_by"]
        lines.append(f"| {name} | {entry['architecture']} | {served} | {entry['kind']} | {', '.join(exact)} | {told} |")
    for name, entry in models.items():
        lines += ["", f"## {name}", "", "| Class | How | Tensors |", "|---|---|---|"]
        groups: dict[tuple[str, str], list[str]] = {}
        for kind, ways in entry["tensors"].items():
            for path_class, told_ways in ways.items():
                for way in told_ways:
                    groups.setdefault((path_class, way), []).append(kind)
        for (path_class, way), kinds in sorted(groups.items()):
            lines.append(f"| {path_class} | {_cell(way)} | {', '.join(f'`{kind}`' for kind in kinds)} |")
    return "\n".join(lines) + "\n"


def _commits(models: dict[str, Any]) -> str:
    """The commits that the models ran with; the one of most models needs no names."""
    by_commit: dict[str, list[str]] = {}
    for name, entry in models.items():
        by_commit.setdefault(entry["commit"][:12], []).append(name)
    most, *others = sorted(by_commit, key=lambda found: -len(by_commit[found]))
    return ", ".join([f"`{most}`", *(f"`{found}` for {', '.join(by_commit[found])}" for found in others)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(names: list[str]) -> int:
    """Write record and page, of all models or the named ones; 1 when something was not exact and not refused."""
    record = record_all(names or MODELS)
    if names:
        known = json.loads(RECORD.read_text(encoding="utf-8"))["models"] | record["models"]
        record["models"] = {name: known[name] for name in MODELS}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page_of(record), encoding="utf-8")
    faults = [
        f"{name} {layout}: {verdict}"
        for name, entry in record["models"].items()
        for layout, verdict in entry["layouts"].items()
        if verdict.startswith("fault")
    ]
    print("\n".join(faults) or f"{sum(entry['ranks'] for entry in record['models'].values())} ranks, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
