"""Tests of Megatron: collected only where they are asked for (`-m megatron`), because they import it."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave test modules of this folder out of every run whose marker expression does not want them."""
    wanted = str(config.option.markexpr)
    if collection_path.name.startswith("test_") and ("megatron" not in wanted or "not megatron" in wanted):
        return True
    return None
