"""Every case of the matrix once, and 20 times under ``slow``."""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that take ``turn`` run so often."""
    if "turn" in metafunc.fixturenames:
        turns = [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(20)]
        metafunc.parametrize("turn", turns)
