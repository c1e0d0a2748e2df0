"""`nemo-dcr check-loader`: the table of a model that has a configuration and nothing else, and its exit codes."""

from __future__ import annotations

import json
import logging

import pytest
from typer.testing import CliRunner

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def run():
    from nemo_dcr.cli.main import app

    yield lambda *words: CliRunner().invoke(app, ["check-loader", *map(str, words)])
    logging.disable(logging.NOTSET)


def test_exact_model_gives_its_table_and_code_0(run, workshop):
    done = run(workshop.of("deepseek_v3")[0], "--tp", 2, "--ep", 4, "--json")
    found = json.loads(done.stdout)
    ways = {(row["kind"], row["path_class"], row["way"]) for row in found["rows"]}
    assert (done.exit_code, found["refused"], found["ranks"]) == (0, "", 4)
    assert ("model.layers.N.mlp.gate.e_score_correction_bias", "overwrite", "1 copy, cast from BF16 to F32") in ways
    assert ("model.layers.N.mlp.experts.N.up_proj.weight", "skipped", "not taken") in ways
    assert found["shares"]["skipped"] > 0.3
    assert abs(sum(found["shares"].values()) - 1) < 1e-9


def test_refused_tensor_is_named_with_its_condition_and_code_3(run, workshop):
    done = run(workshop.of("phi")[0])
    assert done.exit_code == 3
    assert "refused: tensor 'lm_head.bias'" in done.stdout.splitlines()[-1]
    assert "(LC9)" in done.stdout.splitlines()[-1]


def test_layout_that_vllm_does_not_have_is_a_usage_error(run, workshop):
    from nemo_dcr.errors import InvalidConfig

    done = run(workshop.of("phi")[0], "--tp", 4, "--ep", 2)
    assert isinstance(done.exception, InvalidConfig)


def test_directory_without_a_configuration_is_a_usage_error(run, tmp_path):
    from nemo_dcr.errors import InvalidConfig

    assert isinstance(run(tmp_path).exception, InvalidConfig)
