"""The curves as a picture: reward, divergence, change rate and refit seconds of every method, with the kills marked.

Drawn from the table alone, so a picture can be made again without the run. Methods whose synchronous runs are the same
lie on one line; they are drawn with different widths, the widest first, so that each stays visible.

    python -m examples.grpo.plot CURVES.csv PICTURE.png      (needs the extra `docs`)

Paper: Figure 9 (mean reward and KL), Figure E.1 (kills), Figure 2 (change rate)
"""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections import defaultdict
from pathlib import Path

from nemo_dcr.errors import OperatorNeeded

PANELS = {
    "mean_reward": "mean reward",
    "kl_per_token": "estimated KL per token",
    "change_rate": "changed BF16 elements",
    "refit_s": "refit, seconds",
}
_LOGARITHMIC = ("kl_per_token", "refit_s")

Rows = dict[str, list[dict[str, str]]]


def read_curves(path: Path) -> Rows:
    """Rows of the table by method, in its order."""
    found: Rows = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found[row["method"]].append(row)
    return dict(found)


def draw(curves: Rows, picture: Path) -> None:
    """One panel for each quantity. Raises: OperatorNeeded without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OperatorNeeded("a picture needs matplotlib", "pip install 'nemo-dcr[plots]'")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for panel, (column, label) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for position, (method, rows) in enumerate(curves.items()):
            steps, values = [int(row["step"]) for row in rows], [float(row[column]) for row in rows]
            panel.plot(steps, values, label=method, linewidth=1.2 + 2.2 * (len(curves) - 1 - position))
        for step in sorted({int(row["step"]) for rows in curves.values() for row in rows if row["killed"]}):
            panel.axvline(step, color="0.6", linewidth=0.8, linestyle=":")
        if column in _LOGARITHMIC:
            panel.set_yscale("log")
        panel.set_xlabel("step (dotted: a server is killed in its refit)")
        panel.set_ylabel(label)
        panel.legend()
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(read_curves(Path(sys.argv[1])), Path(sys.argv[2]))
