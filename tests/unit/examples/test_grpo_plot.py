"""The picture is drawn from the table of curves alone."""

from __future__ import annotations

import pytest

from examples.grpo.plot import PANELS, draw, read_curves
from nemo_dcr.errors import OperatorNeeded

HEAD = "method,step,mean_reward,kl_per_token,change_rate,refit_s,killed"
ROWS = ("dense,1,0.5,1e-4,0.01,5.0,", "dense,2,0.6,2e-4,0.02,6.0,left", "relay,1,0.5,1e-4,0.01,0.5,")


def test_rows_are_read_by_method_in_order(tmp_path):
    table = tmp_path / "curves.csv"
    table.write_text("\n".join((HEAD, *ROWS)) + "\n")
    found = read_curves(table)
    assert list(found) == ["dense", "relay"]
    assert [row["step"] for row in found["dense"]] == ["1", "2"]
    assert set(PANELS) < set(found["relay"][0])


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OperatorNeeded, match=r"nemo-dcr\[plots\]"):
        draw({}, tmp_path / "curves.png")
