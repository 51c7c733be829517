"""The soak test in short: twenty seconds show that it works, and find what leaks with every request."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from .soak import soak

pytestmark = [pytest.mark.slow, pytest.mark.llamacpp, pytest.mark.llguidance]


@pytest.mark.timeout(600)
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    result = soak(20.0, Console(quiet=True), folder=tmp_path)

    assert result.problems == [], result.figures
