"""pytest's entry point into the test kit: enables assertion introspection in the contract suites.

pytest imports this at the start of every run in an environment where Enginehouse is installed, so it imports no other
module of ours: a module imported here is loaded before pytest can rewrite its assertions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["pytest_configure"]

_SUITES = sorted(path.stem for path in Path(__file__).parent.glob("*_contract.py"))

pytest.register_assert_rewrite(*(f"enginehouse_testkit.{name}" for name in ("contract", *_SUITES)))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of the suites' time limit, which has an effect if pytest-timeout is installed."""
    config.addinivalue_line("markers", "timeout(seconds): time limit of a test, enforced by pytest-timeout")
