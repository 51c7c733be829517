"""Fixtures of the tests of the API."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


@pytest.fixture
def within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the clock by which rates are counted stand still: at the turn of a minute they count anew."""
    clock = SimpleNamespace(time=lambda: 1_700_000_040.0)
    for module in ("limits.aio.storage.memory", "enginehouse.api.http.admission.gate"):
        monkeypatch.setattr(f"{module}.time", clock)
