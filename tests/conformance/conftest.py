"""The shipped suites are not test modules: ask pytest to explain their assertions too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("nemo_dcr.testing.transport_suite", "nemo_dcr.testing.control_suite")
