"""Nothing of the method ``extractive`` is tested without its library."""

from __future__ import annotations

import pytest

from enginehouse_compress.relevance import is_bm25_installed


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compress") and not is_bm25_installed():
        pytest.skip("needs the extra compress")
