"""Tokens drawn by the runner and read a step later: what clients see is what they see when core draws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.backend import Draw, ForwardOutput, LastSampled, Span
from enginehouse.contract.errors import EnginehouseError, GenerationFailed, StepAborted
from enginehouse.contract.types import Constraint, EngineRequest, EngineSettings, SamplingParams, StopParams, TextDelta
from enginehouse.engine.loop import EngineOutput, StepEngine
from enginehouse.engine.sampling.device_draws import can_draw
from enginehouse_testkit.fake_runner import FakeFaults, FakeOptions, FakeRunner
from enginehouse_testkit.fake_sampling import FakeDrawn

_numbers = itertools.count()


class _WatchedRunner(FakeRunner):
    """Notes which passes were launched while the tokens of the pass before them had not been read."""

    def __init__(self, options: FakeOptions) -> None:
        super().__init__(options)
        self.drawn: list[FakeDrawn] = []
        self.num_overlaps = self.num_late_inputs = 0

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        self.num_overlaps += bool(self.drawn) and not self.drawn[-1].was_read
        self.num_late_inputs += sum(isinstance(span.input, LastSampled) for span in spans)
        return super().forward(spans)

    def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> FakeDrawn:
        self.drawn.append(super().sample(output, draws))
        return self.drawn[-1]


def _engine(is_device: bool, runner: FakeRunner | None = None, **options: Any) -> StepEngine:
    slots = options.pop("slots", 4)
    runner = runner or FakeRunner(FakeOptions(device_sampling=is_device, slots=slots, **options))
    return StepEngine(runner, EngineSettings(slots=slots, prefill_chunk_tokens=16), {})


def _request(sampling: SamplingParams, max_tokens: int = 12, **fields: Any) -> EngineRequest:
    stopping = StopParams(max_tokens=max_tokens, **fields.pop("stopping", {}))
    return EngineRequest(request_id=f"d{next(_numbers)}", sampling=sampling, stopping=stopping, **fields)


def _prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(97, 123, length).tolist()


def _run(engine: StepEngine, requests: Sequence[tuple[EngineRequest, list[int]]]) -> list[list[object]]:
    """The events of each request, choice by choice: how choices take turns depends on what is read when."""
    events: dict[str, list[object]] = {}
    for request, prompt in requests:
        events[request.request_id] = []
        engine.check(request, len(prompt))
        engine.add(request, prompt)
    for request_id, event in _drain(engine):
        events[request_id].append(event)
    return [[_comparable(event) for event in sorted(some, key=_choice)] for some in events.values()]


def _drain(engine: StepEngine) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(5000):
        if not engine.has_work():
            return outputs
        outputs += engine.step()
    raise AssertionError("still busy")


def _choice(event: object) -> int:
    """Its choice; what ends the whole request comes last."""
    return getattr(event, "choice", 1000)


def _comparable(event: object) -> object:
    if isinstance(event, EnginehouseError):
        return type(event)
    if type(event).__name__ == "RequestFinished":
        return event.usage.completion_tokens, event.usage.prompt_tokens  # type: ignore[attr-defined]
    return event


_samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repeat_last_n=st.sampled_from([-1, 0, 3]),
    logit_bias=st.sampled_from([{}, {101: 4.0, 102: -100.0}]),
    num_logprobs=st.sampled_from([None, 0, 2]),
    seed=st.integers(0, 5),
)
_stoppings = st.fixed_dictionaries(
    {
        "stop": st.sampled_from([(), ("e", "th")]),
        "stop_regex": st.sampled_from([(), ("[aeiou]{2}",)]),
        "min_tokens": st.integers(0, 6),
        "ignore_eos": st.booleans(),
    }
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(_samplings, _stoppings, st.integers(1, 30), st.integers(1, 14), st.integers(1, 3)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([None, 110]),
)
def test_events_are_those_of_cores_draws(batch: list[tuple[Any, ...]], cache_tokens: int | None) -> None:
    """Any mix of requests, choices and lengths, with room for all or with preemptions."""
    results = []
    for is_device in (False, True):
        requests = [
            (_request(sampling, max_tokens, stopping=stopping, num_choices=choices), _prompt(seed, length))
            for seed, (sampling, stopping, length, max_tokens, choices) in enumerate(batch)
        ]
        engine = _engine(is_device, context=64, cache_tokens=cache_tokens)
        results.append(_run(engine, requests))
        assert engine.stats().num_running == 0
        engine.close()

    assert results[0] == results[1]


def test_the_next_pass_is_launched_before_the_last_is_read() -> None:
    runner = _WatchedRunner(FakeOptions(device_sampling=True))
    _run(_engine(True, runner), [(_request(SamplingParams(seed=1), 20, stopping={"ignore_eos": True}), _prompt(0, 5))])

    assert runner.num_overlaps == 19
    assert runner.num_late_inputs == 19
    assert runner.num_steps == 20


def test_the_last_pass_is_read_between_the_next_one_and_its_draws() -> None:
    """The device computes meanwhile; draws of a pass with early exit wait for its decisions."""
    order: list[str] = []

    class Ordered(FakeRunner):
        def forward(self, spans: Sequence[Span]) -> ForwardOutput:
            order.append("forward")
            return super().forward(spans)

        def sample(self, output: ForwardOutput, draws: Sequence[Draw]) -> FakeDrawn:
            order.append("sample")
            drawn = super().sample(output, draws)
            read = drawn.host
            drawn.host = lambda: (order.append("read"), read())[1]  # type: ignore[method-assign]
            return drawn

    runner = Ordered(FakeOptions(device_sampling=True))
    _run(_engine(True, runner), [(_request(SamplingParams(seed=1), 4, stopping={"ignore_eos": True}), _prompt(0, 5))])

    assert order == ["forward", "sample", *["forward", "read", "sample"] * 3, "read"]


@pytest.mark.parametrize(("penalty", "min_tokens"), [(1.2, 0), (1.0, 20)])
def test_what_looks_back_is_read_at_once(penalty: float, min_tokens: int) -> None:
    runner = _WatchedRunner(FakeOptions(device_sampling=True))
    request = _request(
        SamplingParams(seed=1, repetition_penalty=penalty),
        20,
        stopping={"ignore_eos": True, "min_tokens": min_tokens},
    )
    _run(_engine(True, runner), [(request, _prompt(0, 5))])

    assert runner.num_late_inputs == 0
    assert len(runner.drawn) == 20


def test_a_full_cache_waits_for_the_tokens_still_on_the_device() -> None:
    """The pass that does not fit is tried again when they are known; the text does not change."""
    requests = [
        (_request(SamplingParams(seed=seed), 40, stopping={"ignore_eos": True}), _prompt(seed, 30)) for seed in range(3)
    ]
    roomy = _run(_engine(True), requests)
    tight = _engine(True, cache_tokens=150, context=128)
    again = [(_request(r.sampling, 40, stopping={"ignore_eos": True}), prompt) for r, prompt in requests]

    assert _run(tight, again) == roomy
    assert tight.stats().num_preemptions > 0


def test_cancelled_with_a_token_on_the_device() -> None:
    """The token that nobody read is forgotten, and the prefix cache holds what is known."""
    engine = _engine(True)
    request = _request(SamplingParams(seed=3), 30, stopping={"ignore_eos": True})
    engine.add(request, _prompt(1, 9))
    for _ in range(5):
        engine.step()
    engine.cancel(request.request_id)
    stats = engine.stats()

    assert stats.num_running == 0
    assert stats.free_tokens + stats.cached_tokens == 4 * 4096
    assert stats.cached_tokens == 9 + 4
    assert _run(engine, [(_request(SamplingParams(seed=3), 3), _prompt(1, 9))])[0][-1] == (3, 9)


def test_a_failed_pass_fails_its_own_requests_only() -> None:
    engine = _engine(True, faults=FakeFaults(raise_at_step=5))
    requests = [(_request(SamplingParams(seed=s), 10, stopping={"ignore_eos": True}), _prompt(s, 6)) for s in range(2)]

    assert [events[-1] for events in _run(engine, requests)] == [(10, 6), (10, 6)]


def test_a_prompt_that_fails_in_passes_of_its_own_fails_at_once() -> None:
    """Not only when a stream beside it has ended, whose tokens on the device postpone the failure by a step."""
    runner = FakeRunner(FakeOptions(device_sampling=True, mixed_batch=False, faults=FakeFaults(raise_at_token=1)))
    engine = _engine(True, runner)
    stream, broken = (_request(SamplingParams(seed=1), 200, stopping={"ignore_eos": True}) for _ in range(2))
    engine.add(stream, _prompt(1, 6))
    for _ in range(4):
        engine.step()
    engine.add(broken, [1] * 6)
    outputs = [output for _ in range(12) for output in engine.step()]

    assert any(request_id == broken.request_id and isinstance(event, Exception) for request_id, event in outputs)
    assert engine.stats().num_running == 1


class _AbortedRunner(_WatchedRunner):
    """Is told to stop where nobody asked for it, as when the pass that was meant has just ended; it has computed."""

    def forward(self, spans: Sequence[Span]) -> ForwardOutput:
        output = super().forward(spans)
        if self.num_steps in (4, 7):
            raise StepAborted({span.sequence: self.length(span.sequence) for span in spans})
        return output


@pytest.mark.parametrize("num_requests", [1, 2])
@pytest.mark.parametrize("window", [None, 8])
def test_a_pass_that_is_aborted_behind_a_token_on_the_device_is_done_again(
    num_requests: int, window: int | None
) -> None:
    def requests() -> list[tuple[EngineRequest, list[int]]]:
        stopping = {"ignore_eos": True}
        return [(_request(SamplingParams(seed=s), 10, stopping=stopping), _prompt(s, 6)) for s in range(num_requests)]

    options = FakeOptions(device_sampling=True, slots=4, window=window)
    undisturbed = _run(StepEngine(_WatchedRunner(options), EngineSettings(slots=4), {}), requests())

    assert _run(StepEngine(_AbortedRunner(options), EngineSettings(slots=4), {}), requests()) == undisturbed


def test_what_an_aborted_pass_has_computed_is_not_taken_for_less_by_the_prefix_cache() -> None:
    """Its request is cancelled, as nearly always when a pass is aborted; the next one goes on from what is kept."""
    options = FakeOptions(device_sampling=True, slots=4, fork="none")
    engine = StepEngine(_AbortedRunner(options), EngineSettings(slots=4), {})
    request = _request(SamplingParams(temperature=0), 30, stopping={"ignore_eos": True})
    engine.add(request, _prompt(1, 9))
    written: list[int] = []
    for _ in range(4):
        written += [token for _, event in engine.step() if isinstance(event, TextDelta) for token in event.token_ids]
    engine.cancel(request.request_id)
    follow_up = [*_prompt(1, 9), *written, 97]
    asked = [(_request(SamplingParams(temperature=0), 3, stopping={"ignore_eos": True}), follow_up)]

    assert _run(engine, asked)[0][-1] == (3, len(follow_up))
    assert engine.stats().cached_tokens > 0


def test_a_broken_row_fails_its_request() -> None:
    engine = _engine(True, faults=FakeFaults(nan_at_step=3))
    requests = [(_request(SamplingParams(seed=s), 10, stopping={"ignore_eos": True}), _prompt(s, 6)) for s in range(2)]
    first, second = _run(engine, requests)

    assert first[-1] is GenerationFailed
    assert second[-1] == (10, 6)


def test_only_what_the_runner_claims_is_drawn_by_it() -> None:
    device, host = FakeRunner(FakeOptions(device_sampling=True)), FakeRunner()
    plain = _request(SamplingParams(temperature=0.3, top_k=4, seed=9))
    refused = [
        SamplingParams(logit_bias={5: 100.0}),
        SamplingParams(extensions={"xtc": {"xtc_probability": 0.5}}),
        SamplingParams(samplers=("top_k", "temperature")),
    ]

    assert can_draw(device, plain) and not can_draw(host, plain)
    assert not any(can_draw(device, _request(sampling)) for sampling in refused)
    assert can_draw(device, _request(SamplingParams(), constraint=Constraint(kind="json_object")))


def test_last_sampled_is_refused_where_nothing_was_drawn() -> None:
    runner = FakeRunner(FakeOptions(device_sampling=True))
    with pytest.raises(EnginehouseError):
        runner.forward([Span(runner.open_sequence(), 0, LastSampled())])
