"""pytest's entry point into the test kit: enables assertion introspection in the contract suites.

pytest imports this at the start of every run in an environment where Enginehouse is installed, so it imports no other
module of ours: a module imported here is loaded before pytest can rewrite its assertions.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]

_SUITES = sorted(path.stem for path in Path(__file__).parent.glob("*_contract.py"))

pytest.register_assert_rewrite(*(f"enginehouse_testkit.{name}" for name in ("contract", *_SUITES)))


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker of the suites' time limit, which has an effect if pytest-timeout is installed."""
    config.addinivalue_line("markers", "timeout(seconds): time limit of a test, enforced by pytest-timeout")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the suites that a class combines in the order of its bases, which pytest would reverse.

    ``RunnerContract`` thus comes before ``EngineContract``, whose messages are less specific.
    """
    items[:] = [
        item
        for cls, group in itertools.groupby(items, key=lambda item: getattr(item, "cls", None))
        for item in sorted(group, key=lambda item: _place(cls, getattr(item, "originalname", item.name)))
    ]


def _place(cls: Any, test: str) -> int:
    """Return the index of the first base of a class of suites that has this test; 0 for other classes."""
    bases = cls.__bases__ if cls is not None else ()
    if not any(base.__module__.startswith("enginehouse_testkit.") for base in bases):
        return 0
    return next((place for place, base in enumerate(bases) if hasattr(base, test)), len(bases))
