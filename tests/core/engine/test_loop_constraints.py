"""StepEngine with constraints, reasoning markers, minimum lengths, stop ids and prompt scoring, on the fake runner."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from enginehouse.contract.backend import Span
from enginehouse.contract.errors import InvalidRequest, PluginFailed, UnsupportedParameter
from enginehouse.contract.types import (
    ChoiceFinished,
    Constraint,
    EngineRequest,
    EngineSettings,
    PromptLogprobs,
    ReasoningParams,
    RequestFinished,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.engine.loop import StepEngine
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

from .harness import LiteralDecoder, LiteralMatcher

_ids = itertools.count()
PROMPT = [ord(c) for c in "some prompt of the usual kind"]


def run(engine: StepEngine, *requests: EngineRequest, prompt: list[int] | None = None) -> dict[str, list]:
    events: dict[str, list] = {}
    for request in requests:
        events[request.request_id] = []
        engine.check(request, len(prompt or PROMPT))
        engine.add(request, prompt or PROMPT)
    for _ in range(3000):
        if not engine.has_work():
            return events
        for request_id, event in engine.step():
            events[request_id].append(event)
    raise AssertionError("still busy")


def make(temperature: float = 0, num_choices: int = 1, num_logprobs: int | None = None, **fields) -> EngineRequest:
    stopping = {key: fields.pop(key) for key in list(fields) if key in StopParams.__struct_fields__}
    return EngineRequest(
        request_id=f"r{next(_ids)}",
        num_choices=num_choices,
        sampling=SamplingParams(temperature=temperature, seed=1, num_logprobs=num_logprobs),
        stopping=StopParams(**{"max_tokens": 40, **stopping}),
        **fields,
    )


def engine(decoder: LiteralDecoder | None = None) -> StepEngine:
    return StepEngine(FakeRunner(), EngineSettings(), {}, [decoder] if decoder else [])


def text_of(events: list, choice: int = 0) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta) and event.choice == choice)


def finish_of(events: list, choice: int = 0) -> ChoiceFinished:
    return next(event for event in events if isinstance(event, ChoiceFinished) and event.choice == choice)


@pytest.mark.parametrize("forces", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.3])
@pytest.mark.parametrize("num_logprobs", [None, 2])
def test_a_constraint_holds_for_every_choice(forces: bool, temperature: float, num_logprobs: int | None) -> None:
    wanted = "a the mountaineering 日本語 stop"
    request = make(
        temperature, 3, num_logprobs, max_tokens=100, constraint=Constraint(kind="regex", text=wanted, param="regex")
    )
    events = run(engine(LiteralDecoder(forces)), request)[request.request_id]

    for choice in range(3):
        assert text_of(events, choice) == wanted
        assert finish_of(events, choice).finish_reason == "stop"
    summary = events[-1]
    assert isinstance(summary, RequestFinished)
    assert (summary.usage.forced_tokens > 0) == (forces and num_logprobs is None)
    if num_logprobs:
        entries = [e for event in events if isinstance(event, TextDelta) for e in event.logprobs or ()]
        assert sum(len(event.token_ids) for event in events if isinstance(event, TextDelta)) == len(entries)


@pytest.mark.parametrize("device_sampling", [False, True])
def test_tokens_tell_whether_they_were_forced(device_sampling: bool) -> None:
    """Those at whose place a single token of the vocabulary goes on with the text."""
    runner, left = FakeRunner(FakeOptions(device_sampling=device_sampling)), b"the mountaineering stop"
    request = make(num_logprobs=0, token_details=True, constraint=Constraint(kind="regex", text=left.decode()))
    events = run(StepEngine(runner, EngineSettings(), {}, [LiteralDecoder()]), request)[request.request_id]
    entries = [e for event in events if isinstance(event, TextDelta) for e in event.logprobs or ()]
    expected = []
    for entry in entries:
        expected.append(sum(bool(piece) and left.startswith(piece) for piece in runner.tokenizer.token_bytes) == 1)
        left = left.removeprefix(entry.token)

    assert [entry.details is not None and entry.details.forced for entry in entries] == expected
    assert set(expected) == {False, True}


def test_a_neighbour_is_not_constrained() -> None:
    free = make()
    expected = text_of(run(engine(), free)[free.request_id])
    constrained = make(constraint=Constraint(kind="regex", text="the stop"))
    again = make()
    events = run(engine(LiteralDecoder()), constrained, again)

    assert text_of(events[again.request_id]) == expected
    assert text_of(events[constrained.request_id]) == "the stop"


def test_a_constraint_that_cannot_be_enforced_is_refused() -> None:
    with pytest.raises(UnsupportedParameter, match="enginehouse\\[llguidance\\]") as nobody:
        engine().check(make(constraint=Constraint(kind="lark", text="x", param="grammar")), 5)
    assert nobody.value.param == "grammar"
    with pytest.raises(InvalidRequest, match="not supported"):
        engine(LiteralDecoder()).check(make(constraint=Constraint(kind="regex", text="(x", param="regex")), 5)


def test_a_decoder_is_bound_once() -> None:
    decoder = LiteralDecoder()
    run(engine(decoder), *(make(constraint=Constraint(kind="regex", text=text)) for text in ("a", "b")))

    assert decoder.num_bound == 1


def test_a_decoder_that_raises_fails_its_request_only() -> None:
    class Broken(LiteralMatcher):
        def fill_bitmask(self, bitmask) -> None:
            raise RuntimeError("no mask today")

    decoder = LiteralDecoder()
    bind = decoder.bind

    def bind_broken(tokenizer):
        compiler = bind(tokenizer)
        compiler.compile = lambda constraint: type(
            "G", (), {"start": lambda self: Broken(b"x", tokenizer.token_bytes, False, ())}
        )()
        return compiler

    decoder.bind = bind_broken
    bad, good = make(constraint=Constraint(kind="regex", text="x")), make()
    events = run(engine(decoder), bad, good)

    assert isinstance(events[bad.request_id][-1], PluginFailed)
    assert "structured decoder 'literal'" in events[bad.request_id][-1].message
    assert isinstance(events[good.request_id][-1], RequestFinished)


@pytest.mark.parametrize("num_logprobs", [None, 2])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_a_budget_closes_open_reasoning_by_force(budget: int, num_logprobs: int | None) -> None:
    reasoning = ReasoningParams(is_open=True, budget=budget)
    request = make(ignore_eos=True, reasoning=reasoning, num_logprobs=num_logprobs)
    events = run(engine(), request)[request.request_id]
    thought, _, answer = text_of(events).partition("</think>")

    assert "</think>" in text_of(events) and answer
    assert finish_of(events).usage.reasoning_tokens == budget
    assert (thought == "") == (budget == 0)
    if num_logprobs:
        deltas = [event for event in events if isinstance(event, TextDelta)]
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


def test_stop_strings_do_not_end_reasoning() -> None:
    """Not by its end either: a client that never sees the marker would get no answer."""
    reasoning = ReasoningParams(is_open=True, budget=5)
    plain = make(ignore_eos=True, reasoning=reasoning)
    thought, _, answer = text_of(run(engine(), plain)[plain.request_id]).partition("</think>")
    stop = (thought[0], "</think>", answer.strip()[3])
    request = make(ignore_eos=True, reasoning=reasoning, stop=stop)
    events = run(engine(), request)[request.request_id]

    assert text_of(events).startswith(f"{thought}</think>")
    assert finish_of(events).finish_reason == "stop"


def test_a_constraint_begins_after_reasoning() -> None:
    request = make(
        reasoning=ReasoningParams(is_open=True, budget=6), constraint=Constraint(kind="regex", text="the answer")
    )
    events = run(engine(LiteralDecoder()), request)[request.request_id]

    assert text_of(events).partition("</think>")[2] == "the answer"
    assert finish_of(events).usage.reasoning_tokens == 6


def test_an_answer_that_does_not_open_reasoning_is_not_reasoning() -> None:
    request = make(ignore_eos=True, reasoning=ReasoningParams(budget=3))
    events = run(engine(), request)[request.request_id]

    assert finish_of(events).usage.reasoning_tokens == 0
    assert "</think>" not in text_of(events)


def test_min_tokens_holds_end_tokens_back_and_stop_token_ids_end() -> None:
    free = run(engine(), request := make(ignore_eos=True))[request.request_id]
    token_ids = [token_id for event in free if isinstance(event, TextDelta) for token_id in event.token_ids]
    stop_id = token_ids[4]
    stopping = run(engine(), request := make(ignore_eos=False, stop_token_ids=(stop_id,)))[request.request_id]
    late = run(engine(), request := make(stop_token_ids=(stop_id,), min_tokens=12))[request.request_id]

    assert finish_of(stopping).stop_reason == stop_id
    assert finish_of(stopping).usage.completion_tokens == token_ids.index(stop_id) + 1
    assert finish_of(late).usage.completion_tokens > 12
    with pytest.raises(InvalidRequest, match="999999") as error:
        engine().check(make(stop_token_ids=(999999,)), 5)
    assert error.value.param == "stop_token_ids"


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_prompt_logprobs_are_those_of_a_plain_forward_pass(chunk: int, max_tokens: int) -> None:
    runner = FakeRunner()
    handle = runner.open_sequence()
    rows = runner.forward([Span(handle, 0, np.array(PROMPT, np.int32), "all")]).host().astype(np.float64)
    expected = [rows[i, t] - np.log(np.exp(rows[i]).sum()) for i, t in enumerate(PROMPT[1:])]
    machine = StepEngine(FakeRunner(), EngineSettings(max_prefill_tokens=chunk), {})
    run(machine, make())  # a warm prefix cache must not hide tokens
    request = make(num_choices=2, max_tokens=max_tokens, num_prompt_logprobs=2)
    events = run(machine, request)[request.request_id]
    entries = [entry for event in events if isinstance(event, PromptLogprobs) for entry in event.entries]

    assert [entry.token_id for entry in entries] == PROMPT[1:]
    assert np.allclose([entry.logprob for entry in entries], expected, atol=1e-5)
    assert all(len(entry.top) == 2 for entry in entries)
    assert finish_of(events, 1).usage.completion_tokens == max_tokens


@pytest.mark.parametrize("cache_tokens", [200, 201])
def test_a_sequence_that_comes_into_its_step_late_keeps_to_its_grammar(cache_tokens: int) -> None:
    """The cache is full when a prompt is due; its sequence makes way, and another one decodes in its place."""
    options = FakeOptions(mixed_batch=False, cache_tokens=cache_tokens, slots=2)
    runner = FakeRunner(options)
    settings = EngineSettings(slots=2, prefill_chunk_tokens=1)
    one = StepEngine(runner, settings, {}, [LiteralDecoder()])
    wanted = "quick brown foxes and lazy dogs " * 4
    constrained = make(max_tokens=300, constraint=Constraint(kind="regex", text=wanted))
    long = make(max_tokens=3)
    events: dict[str, list] = {constrained.request_id: [], long.request_id: []}
    one.add(constrained, PROMPT)
    for _ in range(3):
        for request_id, event in one.step():
            events[request_id].append(event)
    one.add(long, [97 + n % 26 for n in range(100)])
    while one.has_work():
        for request_id, event in one.step():
            events[request_id].append(event)

    assert one.stats().num_preemptions == 1
    assert text_of(events[constrained.request_id]) == wanted
    assert isinstance(events[long.request_id][-1], RequestFinished)


@pytest.mark.parametrize("forces", [False, True])
def test_a_prompt_that_is_only_computed_takes_no_forced_token(forces: bool) -> None:
    reasoning = ReasoningParams(is_open=True, budget=0)
    requests = [
        make(max_tokens=0, constraint=Constraint(kind="regex", text="the stop")),
        make(max_tokens=0, reasoning=reasoning),
        make(max_tokens=0, reasoning=reasoning, num_choices=2, constraint=Constraint(kind="regex", text="the stop")),
    ]
    events = run(engine(LiteralDecoder(forces)), *requests)

    for request in requests:
        assert finish_of(events[request.request_id]).finish_reason == "length"
        assert text_of(events[request.request_id]) == ""


@pytest.mark.parametrize("is_forced", [False, True])
def test_the_prompt_counts_as_prefill_though_tokens_are_forced_before_it(is_forced: bool) -> None:
    seconds = [0.0]

    class OneSecondPasses(FakeRunner):
        def forward(self, spans):  # type: ignore[no-untyped-def]
            seconds[0] += 1.0
            return super().forward(spans)

    slow = StepEngine(OneSecondPasses(), EngineSettings(), {}, clock=lambda: seconds[0])
    reasoning = ReasoningParams(is_open=True, budget=0) if is_forced else None
    request = make(max_tokens=20, ignore_eos=True, reasoning=reasoning)
    usage = run(slow, request)[request.request_id][-1].usage

    assert (usage.forced_tokens > 0) == is_forced
    assert (usage.queue_s, usage.prefill_s) == (0.0, 1.0)
    assert usage.decode_s == 19.0 - usage.forced_tokens
