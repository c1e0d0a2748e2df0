"""The picture of a refit has the rows of its timeline, and only what touches its window."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from nemo_dcr.errors import InvalidConfig, OperatorNeeded
from nemo_dcr.runtime.timeline import RefitTimeline, chrome_trace
from nemo_dcr.runtime.timings import Span, Timings
from nemo_dcr.testing.timeline_picture import Row, main, picture_of


def refit(name: str, t0: float) -> RefitTimeline:
    owner = Timings(
        "owner-0",
        {"construct_began": t0, "baseline_updated": t0 + 4},
        {},
        {},
        spans=(Span("construct", t0, t0 + 1), Span("publish", t0 + 1, t0 + 3), Span("construct", t0 + 2, t0 + 2.5)),
    )
    node = Timings("r1/0", {"apply_ended": t0 + 3.5}, {}, {}, spans=(Span("fetch", t0 + 1.5, t0 + 3.25),))
    return RefitTimeline(name, (owner,), (node,))


TRACE = json.loads(chrome_trace([refit("relay 1", 8.0), refit("store 2", 64.0)]))


def test_a_picture_has_one_row_for_each_node_and_stage_of_its_refit() -> None:
    picture = picture_of(TRACE, "store")
    assert (picture.name, picture.seconds) == ("store 2", 4.0)
    assert picture.rows == (
        Row("refits", "finalization", ((3.5, 0.5),)),
        Row("owner-0", "construct", ((0.0, 1.0), (2.0, 0.5))),
        Row("owner-0", "publish", ((1.0, 2.0),)),
        Row("r1/0", "fetch", ((1.5, 1.75),)),
    )
    assert picture_of(TRACE).name == "relay 1"


def test_a_refit_that_is_not_there_and_a_missing_package_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="'3%' in its name; the file has relay 1, store 2"):
        picture_of(TRACE, "3%")
    with pytest.raises(InvalidConfig, match=r"give TIMELINE\.json"):
        main(["one"])
    file = tmp_path / "timeline.json"
    file.write_text(json.dumps(TRACE))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OperatorNeeded, match=r"nemo-dcr\[plots\]"):
        main([str(file), str(tmp_path / "picture.png")])
