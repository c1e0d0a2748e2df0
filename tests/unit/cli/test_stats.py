"""`nemo-dcr stats`: rates by kind of tensor and version, from what owners wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli.main import app
from nemo_dcr.errors import OperatorNeeded
from nemo_dcr.ids import CandidateId, Incarnation, OwnerId, Version
from nemo_dcr.runtime.change_log import DIRECTORY, ChangeLog, Holding, read_changes
from nemo_dcr.runtime.change_rates import kind_of, run_rates
from nemo_dcr.source.delta import Counts

ELEMENTS = {"model.layers.0.q.weight": 100, "model.layers.1.q.weight": 100, "norm2.weight": 10}


def log(run: Path, owner: int, incarnation: int = 1) -> ChangeLog:
    return ChangeLog(run / DIRECTORY, Holding(OwnerId(owner), Incarnation(incarnation), 210, ELEMENTS))


def row(file: ChangeLog, version: int, changed: dict[str, int], *, compared: bool = True) -> None:
    counts = Counts(210, compared, sum(changed.values()), changed_by_tensor=changed)
    file.append(Version(version), CandidateId(f"c{version}"), counts)


def test_a_kind_is_a_name_without_its_numbers() -> None:
    assert kind_of("model.layers.12.mlp.experts.3.up_proj.weight") == "model.layers.*.mlp.experts.*.up_proj.weight"
    assert kind_of("0.norm2.weight.1") == "*.norm2.weight.*"


def test_rates_unite_owners_and_say_which_are_missing(tmp_path: Path) -> None:
    first, second, later = log(tmp_path, 0), log(tmp_path, 1), log(tmp_path, 1, 2)
    row(first, 1, {"model.layers.0.q.weight": 3, "norm2.weight": 1})
    row(second, 1, {"model.layers.1.q.weight": 5})
    row(first, 2, {})
    row(later, 2, {"norm2.weight": 9}, compared=False)
    row(first, 3, {"norm2.weight": 2})
    row(later, 3, {})
    for file in (first, second, later):
        file.close()
    rates = run_rates(read_changes(tmp_path / DIRECTORY))
    assert rates.elements == {"model.layers.*.q.weight": 400, "norm2.weight": 20}
    shown = [(each.version, each.kinds, each.missing) for each in rates.versions]
    assert shown == [
        (1, {"model.layers.*.q.weight": 8, "norm2.weight": 1}, ()),
        (2, {"model.layers.*.q.weight": 0, "norm2.weight": 0}, (1,)),
        (3, {"model.layers.*.q.weight": 0, "norm2.weight": 2}, ()),
    ]
    result = CliRunner().invoke(app, ["stats", str(tmp_path), "--json"])
    versions = json.loads(result.stdout)["versions"]
    assert [each["rate"] for each in versions] == [9 / 420, None, 2 / 420]
    assert versions[0]["kinds"]["norm2.weight"] == {"changed": 1, "rate": 1 / 20}
    lines = CliRunner().invoke(app, ["stats", str(tmp_path), "--last", "2"]).stdout.splitlines()
    assert [line.split() for line in lines if "norm2" in line] == [["norm2.weight", "20", "unknown", "10.000%"]]
    assert [line.split()[-3:] for line in lines if "source" in line] == [["420", "unknown", "0.476%"]]


def test_a_torn_last_line_is_dropped_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    file = log(tmp_path, 0)
    row(file, 1, {})
    file.close()
    row(file, 2, {})  # a log that ended says nothing any more
    path = next((tmp_path / DIRECTORY).iterdir())
    path.write_bytes(path.read_bytes() + b'{"version":')
    assert list(read_changes(tmp_path / DIRECTORY)[0].versions) == [1]
    path.write_bytes(b"no JSON\n")
    with pytest.raises(OperatorNeeded, match="is damaged"):
        read_changes(tmp_path / DIRECTORY)


def test_a_full_disk_ends_the_figures_and_not_the_owner(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / DIRECTORY).mkdir()
    (tmp_path / DIRECTORY / "owner-0-1.ndjson").symlink_to("/dev/full")
    file = log(tmp_path, 0)
    row(file, 1, {})
    assert [each.message.count("no further changes are written") for each in caplog.records] == [1]


def test_a_directory_without_figures_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["stats", str(tmp_path)])
    assert result.exit_code != 0
    assert "holds no figures" in str(result.exception)
