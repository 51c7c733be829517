"""Backends that take for ever to look at a model: that one fails, or is loaded without their estimate."""

from __future__ import annotations

import threading
from pathlib import Path

import attrs
import pytest

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource
from enginehouse.serving import memory, opening

from .tiny import TinyBackend, TinyOptions, open_tiny, settings_of, states, tiny

pytestmark = pytest.mark.timeout(30)


@attrs.define(eq=False)
class _Hanging(TinyBackend):
    """Hangs over sources and sizes of that name until it is let go."""

    hangs_over: str = ""
    may_go_on: threading.Event = attrs.field(factory=threading.Event)

    def match(self, source: ModelSource) -> Match:
        if source.text == self.hangs_over:
            self.may_go_on.wait(60)
        return super().match(source)

    def estimate(self, source: ModelSource, options: TinyOptions) -> MemoryEstimate:
        if source.path is not None:
            self.may_go_on.wait(60)
        return super().estimate(source, options)


async def test_planning_that_hangs_fails_its_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "PLAN_TIMEOUT_S", 3.0)
    backend = _Hanging(hangs_over="slow")
    models = {"slow": tiny(load="eager"), "m": tiny(load="eager")}

    async with open_tiny(settings_of(models), backend) as manager:
        assert states(manager) == {"slow": "failed", "m": "ready"}
        assert "could not be read within 3 s" in str(manager.statuses()[0].error)
        backend.may_go_on.set()


async def test_an_estimate_that_hangs_is_the_size_of_the_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "ESTIMATE_TIMEOUT_S", 0.2)
    path = tmp_path / "model"
    path.write_bytes(b"x" * 1234)
    backend = _Hanging()

    async with open_tiny(settings_of({"m": tiny(source=str(path), load="eager")}), backend) as manager:
        assert states(manager) == {"m": "ready"}
        assert manager.room.held_bytes("cpu") == 1234
        assert "could not estimate the memory of m within 0.2 s" in caplog.text
        backend.may_go_on.set()
