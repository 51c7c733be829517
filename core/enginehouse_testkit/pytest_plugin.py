"""pytest's entry point into the test kit: failures inside contract suites explain themselves like those in tests.

pytest imports this at the start of every run in an environment where Enginehouse is installed, so it imports
nothing of ours: what is imported here is imported before pytest can rewrite its assertions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

__all__: list[str] = []

_SUITES = sorted(path.stem for path in Path(__file__).parent.glob("*_contract.py"))

pytest.register_assert_rewrite(*(f"enginehouse_testkit.{name}" for name in ("contract", *_SUITES)))
