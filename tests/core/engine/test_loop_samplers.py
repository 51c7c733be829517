"""Sampler plugins in the engine: one that misbehaves costs its own request only, whenever it does."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import frozen

from enginehouse.contract.errors import GenerationFailed
from enginehouse.contract.sampler import Candidates
from enginehouse.contract.types import (
    EngineRequest,
    EngineSettings,
    ReasoningParams,
    RequestFinished,
    SamplingParams,
    StopParams,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeRunner

from .harness import WatchedClose

PROMPT = [ord(char) for char in "some prompt of the usual kind"]


@frozen
class Fields:
    """When the step fails: at its first draw, or when a token is accepted."""

    fails: str = ""


class Step:
    """Keeps everything, and fails as it is told."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def __call__(self, candidates: Candidates) -> np.ndarray:
        if self.fails == "draw":
            raise RuntimeError("no draw")
        return np.ones(len(candidates.token_ids), np.bool_)

    def accept(self, token_id: int, probability: float | None) -> None:
        if self.fails == "accept":
            raise RuntimeError("no token")


class Plugin:
    """The sampler."""

    name = "moody"
    api_version = 1
    request_fields = Fields
    order = 50

    def create(self, fields: Fields) -> Step:
        return Step(fields.fails)


def request_of(name: str, fails: str, *, reasoning: ReasoningParams | None = None) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        sampling=SamplingParams(seed=1, extensions={"moody": {"fails": fails}}),
        stopping=StopParams(max_tokens=6, ignore_eos=True),
        reasoning=reasoning,
    )


def drive(engine: StepEngine) -> dict[str, list[object]]:
    events: dict[str, list[object]] = {}
    while engine.has_work():
        for request_id, event in engine.step():
            events.setdefault(request_id, []).append(event)
    return events


@pytest.mark.parametrize("fails", ["draw", "accept"])
def test_failure_is_its_own_requests_and_names_the_plugin(fails: str) -> None:
    runner = WatchedClose()
    engine = StepEngine(runner, EngineSettings(), {"moody": Plugin()})
    for name, how in (("good", ""), ("bad", fails), ("other", "")):
        engine.add(request_of(name, how), PROMPT)
    events = drive(engine)

    assert [type(events[name][-1]) for name in ("good", "other")] == [RequestFinished, RequestFinished]
    (error,) = events["bad"]
    assert isinstance(error, GenerationFailed)
    assert "the sampler 'moody'" in error.message.lower()
    assert engine.stats().num_running == 0
    engine.close()
    assert runner.num_left == 0


def test_failure_while_a_request_enters_leaves_nothing_behind() -> None:
    """Reasoning without a budget is closed before the first draw, so a step hears of tokens at once."""
    engine = StepEngine(FakeRunner(), EngineSettings(), {"moody": Plugin()})
    reasoning = ReasoningParams(is_open=True, budget=0)
    with pytest.raises(GenerationFailed, match="moody"):
        engine.add(request_of("bad", "accept", reasoning=reasoning), PROMPT)

    assert not engine.has_work()
    assert engine.stats().num_waiting == 0
    engine.add(request_of("good", "", reasoning=reasoning), PROMPT)
    assert isinstance(drive(engine)["good"][-1], RequestFinished)
