"""vLLM's real loaders against their page: a sample that the commit chooses, and the page as a whole."""

from __future__ import annotations

import json
import random

import pytest

from tests.loaders.paths_table import PAGE, RECORD, commit, drift, layout_name, layouts_of, page_of
from tests.loaders.tiny_models import MODELS

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
SAMPLE = 24


def sample() -> list[tuple[str, int, int, int]]:
    """(model, instance ranks, expert ranks, rank): one of each kind of model first, then any, chosen by the commit."""
    rng = random.Random(int(commit(), 16))
    names = sorted(MODELS)
    first = [rng.choice([name for name in names if MODELS[name].kind == kind]) for kind in kinds()]
    chosen = first + rng.sample(sorted(set(names) - set(first)), SAMPLE - len(first))
    cases = []
    for name in chosen:
        tp, ep = rng.choice(layouts_of(name))
        cases.append((name, tp, ep, rng.randrange(max(tp, ep))))
    return cases


def kinds() -> list[str]:
    return sorted({model.kind for model in MODELS.values()})


@pytest.fixture(scope="module")
def record():
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("model", "tp", "ep", "rank"), sample(), ids=lambda value: str(value))
def test_sampled_rank_is_exact_as_the_page_says(model, tp, ep, rank, workshop, record):
    result = workshop.run(model, tp, ep, ranks=[rank])
    print(f"{model} {layout_name(tp, ep)} rank {rank}: {result.verdict}")
    assert not result.verdict.startswith("fault")
    assert drift(record, model, tp, ep, result) == []


def test_page_is_the_record_in_words(record):
    assert PAGE.read_text(encoding="utf-8") == page_of(record)


def test_record_has_every_model_and_layout_and_no_fault(record):
    assert set(record["models"]) == set(MODELS)
    for name, entry in record["models"].items():
        assert list(entry["layouts"]) == [layout_name(tp, ep) for tp, ep in layouts_of(name)]
        assert [verdict for verdict in entry["layouts"].values() if verdict.startswith("fault")] == []


def test_at_least_thirty_architectures_are_exact_on_all_eight_ranks(record):
    exact = [entry["architecture"] for entry in record["models"].values() if entry["layouts"]["TP8"] == "exact"]
    assert len(set(exact)) >= 30


def test_drift_check_can_fail(record):
    from tests.loaders.paths_table import LayoutResult

    name, entry = next(iter(record["models"].items()))
    kind = next(iter(entry["tensors"]))
    moved = LayoutResult("exact", {kind: {"overwrite": ["1 copy, computed"]}}, "", 1)
    assert drift(record, name, 1, 1, moved) != []
    assert drift(record, name, 1, 1, LayoutResult("refused: w (LC1)", {}, "", 1)) != []
    assert drift(record, "novelty", 1, 1, moved) != []
