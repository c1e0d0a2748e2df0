"""The shipped suites are not test modules: ask pytest to explain their assertions too."""

from __future__ import annotations

import pytest

for name in ("transport_suite", "control_suite", "control_process_suite", "control_calls"):
    pytest.register_assert_rewrite(f"nemo_dcr.testing.{name}")
