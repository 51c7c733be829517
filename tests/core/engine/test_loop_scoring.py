"""Prompt scoring in the engine when something gets in its way: preemption, interruption, neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from enginehouse.contract.backend import ForwardOutput, Span
from enginehouse.contract.errors import CacheFull, StepAborted
from enginehouse.contract.types import EngineRequest, EngineSettings, PromptLogprobs, SamplingParams, StopParams
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

PROMPT = [97 + place * place % 23 for place in range(90)]


def request_of(name: str, *, scores: bool, max_tokens: int = 4, priority: int = 0) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        num_prompt_logprobs=1 if scores else None,
        sampling=SamplingParams(temperature=0),
        stopping=StopParams(max_tokens=max_tokens, ignore_eos=True),
        priority=priority,
    )


def scores_of(events: list[object]) -> tuple[list[int], list[float], list[int]]:
    """Token ids, log-probabilities and ranks, in the order in which they were reported."""
    pieces = [event for event in events if isinstance(event, PromptLogprobs)]
    entries = [entry for piece in pieces for entry in piece.entries]
    ranks = [rank for piece in pieces for rank in piece.ranks]
    return [entry.token_id for entry in entries], [entry.logprob for entry in entries], ranks


def expected() -> tuple[list[int], list[float], list[int]]:
    """From one plain forward pass."""
    runner = FakeRunner()
    rows = runner.forward([Span(runner.open_sequence(), 0, np.array(PROMPT, np.int32), "all")]).host()
    logprobs = rows.astype(np.float64) - np.log(np.exp(rows.astype(np.float64)).sum(axis=1, keepdims=True))
    order = np.argsort(-rows, axis=1, kind="stable")
    ranks = [1 + order[place].tolist().index(token_id) for place, token_id in enumerate(PROMPT[1:])]
    return PROMPT[1:], [float(logprobs[place, t]) for place, t in enumerate(PROMPT[1:])], ranks


class Refusing(FakeRunner):
    """Has no memory for one pass when told so."""

    is_full = False

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        if self.is_full:
            self.is_full = False
            raise CacheFull(1, 0)
        return super().forward(spans)


class Aborted(FakeRunner):
    """Its third pass is computed and then aborted."""

    num_lost_rows = 0

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        output = super().forward(spans)
        if self.num_steps == 3:
            self.num_lost_rows = sum(span.num_tokens for span in spans)
            raise StepAborted({span.sequence: self.length(span.sequence) for span in spans})
        return output


def drive(engine: StepEngine, limit: int = 500) -> dict[str, list[object]]:
    events: dict[str, list[object]] = {}
    for _ in range(limit):
        if not engine.has_work():
            return events
        for request_id, event in engine.step():
            events.setdefault(request_id, []).append(event)
    raise AssertionError("still busy")


def check(events: list[object]) -> None:
    token_ids, logprobs, ranks = scores_of(events)
    wanted_ids, wanted_logprobs, wanted_ranks = expected()

    assert token_ids == wanted_ids
    assert logprobs == pytest.approx(wanted_logprobs, abs=1e-5)
    assert ranks == wanted_ranks


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_ranks_count_better_tokens(chunk: int) -> None:
    engine = StepEngine(FakeRunner(), EngineSettings(max_prefill_tokens=chunk), {})
    engine.add(request_of("a", scores=True), PROMPT)

    check(drive(engine)["a"])


def test_nothing_is_reported_twice_after_a_preemption() -> None:
    """The scored prompt loses its place while it is half done, and is computed again."""
    runner = Refusing(FakeOptions(context=160, slots=2, cache_tokens=210))
    engine = StepEngine(runner, EngineSettings(slots=2, max_prefill_tokens=8, prefill_chunk_tokens=4), {})
    engine.add(request_of("first", scores=False, max_tokens=90), PROMPT[:40])
    engine.add(request_of("scored", scores=True), PROMPT)
    events: dict[str, list[object]] = {}
    for _ in range(12):
        for request_id, event in engine.step():
            events.setdefault(request_id, []).append(event)
    assert 0 < len(scores_of(events["scored"])[0]) < len(PROMPT) - 1
    runner.is_full = True
    for request_id, more in drive(engine).items():
        events.setdefault(request_id, []).extend(more)

    check(events["scored"])
    assert engine.stats().num_preemptions == 1


def test_rows_that_an_interruption_lost_are_computed_again() -> None:
    """The runner grew, but nobody received its logits."""
    runner = Aborted()
    engine = StepEngine(runner, EngineSettings(max_prefill_tokens=16), {})
    engine.add(request_of("a", scores=True), PROMPT)
    events = drive(engine)["a"]

    check(events)
    assert runner.num_lost_rows == 16
