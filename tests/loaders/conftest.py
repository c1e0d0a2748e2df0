"""Tests of vLLM's own loaders: collected only where they are asked for (`-m vllm`), because they import vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave test modules of this folder out of every run whose marker expression does not want them."""
    wanted = str(config.option.markexpr)
    if collection_path.name.startswith("test_") and ("vllm" not in wanted or "not vllm" in wanted):
        return True
    return None


@pytest.fixture(scope="session")
def workshop():
    """Builds tiny models."""
    from tests.loaders.paths_table import Workshop

    return Workshop()
