"""An engine goes on where another one was: cut after every single step, the answer is what it would have been."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from string import ascii_lowercase
from typing import Any

import msgspec
import numpy as np
import pytest

from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.types import (
    CacheMiss,
    ChoiceFinished,
    Constraint,
    EngineRequest,
    EngineSettings,
    Event,
    HeldTokens,
    PromptLogprobs,
    ReasoningParams,
    RequestFinished,
    Resume,
    ResumedChoice,
    SamplingParams,
    StopParams,
    TextDelta,
)
from enginehouse.contract.usage import Usage
from enginehouse.engine.loop import StepEngine
from enginehouse.plugins import PluginRegistry
from enginehouse.recovery.generation import Transcript
from enginehouse.settings.config import PluginsSettings
from enginehouse.workers.messages import StepOutputs, Submit, decode_from_worker, decode_to_worker, encode
from enginehouse_testkit.fake_runner import FakeOptions, FakeRunner

_ids = itertools.count()
_REGISTRY = PluginRegistry.load(PluginsSettings())

GREEDY = SamplingParams(temperature=0)
WARM = SamplingParams(temperature=1.2, seed=7)

# Every letter may be the beginning of one, so each is held back until the next one comes.
STOPS = tuple(f"{letter}~" for letter in ascii_lowercase)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(97, 123, length).tolist()


def make_request(sampling: SamplingParams = GREEDY, **fields: Any) -> EngineRequest:
    stopping = {name: fields.pop(name) for name in list(fields) if name in StopParams.__struct_fields__}
    return EngineRequest(
        request_id=f"r{next(_ids)}",
        sampling=sampling,
        stopping=StopParams(**{"max_tokens": 24, "ignore_eos": True, **stopping}),
        **fields,
    )


def make_engine(options: FakeOptions | None = None, decoders: bool = False) -> StepEngine:
    found = _REGISTRY.structured_decoders.values() if decoders else ()
    settings = EngineSettings(prefix_cache=False, prefill_chunk_tokens=16, max_prefill_tokens=16)
    return StepEngine(FakeRunner(options), settings, _REGISTRY.samplers, found)


def steps(engine: StepEngine) -> Iterator[list[Event]]:
    """The events of each step, as they come over the link."""
    while engine.has_work():
        message = decode_from_worker(encode(StepOutputs(engine.step())))
        assert isinstance(message, StepOutputs)
        events = []
        for _, output in message.outputs:
            assert not isinstance(output, EnginehouseError), output
            events.append(output)
        if events:
            yield events


def merged(events: list[Event]) -> Mapping[str, Any]:
    """What a client makes of events: pieces joined, times left out."""
    text: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    logprobs: dict[int, list[tuple[int, float]]] = {}
    scores: list[tuple[int, float]] = []
    finished: dict[int, ChoiceFinished] = {}
    summary: RequestFinished | None = None
    for event in events:
        assert summary is None, "an event after the last one"
        match event:
            case TextDelta():
                assert event.choice not in finished
                text[event.choice] = text.get(event.choice, "") + event.text
                token_ids.setdefault(event.choice, []).extend(event.token_ids)
                entries = [(entry.token_id, round(entry.logprob, 4)) for entry in event.logprobs or ()]
                logprobs.setdefault(event.choice, []).extend(entries)
            case ChoiceFinished():
                finished[event.choice] = event
            case PromptLogprobs():
                scores += [(entry.token_id, round(entry.logprob, 4)) for entry in event.entries]
            case RequestFinished():
                usage = msgspec.structs.replace(event.usage, queue_s=0.0, prefill_s=0.0, decode_s=0.0)
                summary = RequestFinished(usage, event.cache_miss)
    assert summary is not None, "no last event"
    return {
        "text": text,
        "token_ids": token_ids,
        "logprobs": logprobs,
        "scores": scores,
        "finished": finished,
        "summary": summary,
    }


def undisturbed(request: EngineRequest, prompt: list[int], **engine: Any) -> tuple[Mapping[str, Any], int]:
    one = make_engine(**engine)
    one.check(request, len(prompt))
    one.add(request, prompt)
    batches = list(steps(one))
    return merged([event for batch in batches for event in batch]), len(batches)


def cut(request: EngineRequest, prompt: list[int], places: list[int], **engine: Any) -> Mapping[str, Any]:
    """The answer when engines are lost after so many batches of events each."""
    transcript = Transcript(request, clock=iter(np.arange(0, 1e6)).__next__)
    events: list[Event] = []
    for place in [*places, 10**9]:
        one = make_engine(**engine)
        resume = transcript.begin_stay()
        message = decode_to_worker(encode(Submit(request, resume)))
        assert isinstance(message, Submit)
        one.add(message.request, prompt, message.resume)
        transcript.accepted()
        transcript.started(Usage())
        for batch in itertools.islice(steps(one), place):
            events += map(transcript.record, batch)
        if transcript.is_finished:
            break
    return merged(events)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "characters cut in two": (
        {
            "sampling": SamplingParams(
                temperature=1.0, seed=4, num_logprobs=0, logit_bias=dict.fromkeys(range(128, 256), 80.0)
            ),
            "stop": ("\ufffd\ufffd\ufffda",),
            "max_tokens": 21,
        },
        {},
    ),
    "greedy": ({}, {}),
    "seeded draws": ({"sampling": WARM}, {}),
    "a prompt longer than a chunk": ({"sampling": WARM, "max_tokens": 5}, {}),
    "three choices": ({"sampling": WARM, "num_choices": 3}, {}),
    "choices that end at different times": (
        {"sampling": WARM, "num_choices": 4, "ignore_eos": False, "max_tokens": 60},
        {},
    ),
    "stop strings": ({"sampling": WARM, "stop": ("e t", "th", "ing o", "qx")}, {}),
    "stop strings that never come": ({"sampling": WARM, "stop": STOPS}, {}),
    "expressions that end the text": (
        {"sampling": WARM, "stop_regex": ("[aeiou] ?[qxz]+", "th."), "max_tokens": 60},
        {},
    ),
    "an expression that never matches": ({"sampling": WARM, "stop_regex": ("[a-z]{1,9}~",), "num_choices": 2}, {}),
    "token ids of a stop string": ({"sampling": WARM, "stop": ("e t", "th", "ing o"), "return_token_ids": True}, {}),
    "penalties of the last tokens": (
        {"sampling": SamplingParams(temperature=0.9, seed=3, repetition_penalty=1.5, repeat_last_n=6)},
        {},
    ),
    "penalties and a bias": (
        {
            "sampling": SamplingParams(
                temperature=0.9,
                seed=3,
                repetition_penalty=1.3,
                presence_penalty=0.5,
                frequency_penalty=0.4,
                logit_bias={101: 3.0, 32: -100.0},
            )
        },
        {},
    ),
    "log-probabilities": ({"sampling": SamplingParams(temperature=1.0, seed=5, num_logprobs=3)}, {}),
    "log-probabilities and stop strings": (
        {"sampling": SamplingParams(temperature=1.0, seed=5, num_logprobs=2), "stop": STOPS},
        {},
    ),
    "scored prompt": ({"sampling": WARM, "num_prompt_logprobs": 1}, {}),
    "scored prompt of several choices": ({"sampling": WARM, "num_prompt_logprobs": 0, "num_choices": 2}, {}),
    "only a score": ({"num_prompt_logprobs": 1, "max_tokens": 0}, {}),
    "reasoning with a budget": ({"sampling": WARM, "reasoning": ReasoningParams(is_open=True, budget=12)}, {}),
    "reasoning with a budget and log-probabilities": (
        {
            "sampling": SamplingParams(temperature=1.0, seed=5, num_logprobs=0),
            "reasoning": ReasoningParams(is_open=True, budget=9),
        },
        {},
    ),
    "a minimum length": ({"sampling": WARM, "min_tokens": 20, "ignore_eos": False}, {}),
    "mirostat": (
        {"sampling": SamplingParams(temperature=1.5, seed=2, extensions={"mirostat": {"mirostat": 2}})},
        {},
    ),
    "adaptive-p": (
        {"sampling": SamplingParams(temperature=1.5, seed=2, extensions={"adaptive_p": {"adaptive_target": 0.2}})},
        {},
    ),
    "mirostat with choices and stop strings": (
        {
            "sampling": SamplingParams(temperature=1.5, seed=2, extensions={"mirostat": {"mirostat": 2}}),
            "num_choices": 2,
            "stop": STOPS,
        },
        {},
    ),
    "DRY and XTC": (
        {
            "sampling": SamplingParams(
                temperature=1.0,
                seed=4,
                extensions={
                    "dry": {"dry_multiplier": 0.9, "dry_allowed_length": 1},
                    "xtc": {"xtc_probability": 0.7, "xtc_threshold": 0.05},
                },
            )
        },
        {},
    ),
    "draws on a device": ({"sampling": WARM, "num_choices": 2}, {"options": FakeOptions(device_sampling=True)}),
    "penalties on a device": (
        {"sampling": SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.2, num_logprobs=1)},
        {"options": FakeOptions(device_sampling=True)},
    ),
    "a sliding window": ({"sampling": WARM}, {"options": FakeOptions(window=24)}),
    "no forks": ({"sampling": WARM, "num_choices": 3}, {"options": FakeOptions(fork="none")}),
}

SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"], "additionalProperties": false}'
)
UNIQUE = '{"type": "array", "uniqueItems": true, "items": {"enum": ["red", "green", "blue", 1, 10]}, "minItems": 1}'
CONSTRAINED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a schema": ({"sampling": WARM, "constraint": Constraint(kind="json_schema", text=SCHEMA), "max_tokens": 48}, {}),
    "a schema with log-probabilities and choices": (
        {
            "sampling": SamplingParams(temperature=1.0, seed=9, num_logprobs=1),
            "constraint": Constraint(kind="json_schema", text=SCHEMA),
            "num_choices": 2,
            "max_tokens": 48,
        },
        {},
    ),
    "a schema whose wrong values are taken back": (
        {
            "sampling": SamplingParams(temperature=1.2, seed=3, repetition_penalty=1.1),
            "constraint": Constraint(kind="json_schema", text=UNIQUE),
            "num_choices": 2,
            "max_tokens": 48,
        },
        {},
    ),
    "a schema behind reasoning": (
        {
            "sampling": WARM,
            "constraint": Constraint(kind="json_schema", text=SCHEMA),
            "reasoning": ReasoningParams(is_open=True, budget=6),
            "max_tokens": 48,
        },
        {},
    ),
}


def check(fields: dict[str, Any], engine: dict[str, Any]) -> None:
    request, prompt = make_request(**fields), prompt_of(45)
    expected, num_batches = undisturbed(request, prompt, **engine)
    for place in range(0, num_batches, 2):
        assert cut(request, prompt, [place], **engine) == expected, f"cut after {place} of {num_batches} batches"
    assert cut(request, prompt, [2, 0, 3, 1, 5], **engine) == expected, "cut again and again"


@pytest.mark.parametrize(("fields", "engine"), CASES.values(), ids=CASES.keys())
def test_answer_cut_anywhere_is_the_undisturbed_one(fields, engine):
    check(fields, engine)


@pytest.mark.llguidance
@pytest.mark.parametrize(("fields", "engine"), CONSTRAINED.values(), ids=CONSTRAINED.keys())
def test_constrained_answer_cut_anywhere_is_the_undisturbed_one(fields, engine):
    check(fields, {**engine, "decoders": True})


def test_stopped_thinking_stays_stopped():
    """Somebody closed the reasoning, and the worker died before a token of the closing marker had been told."""
    request = make_request(WARM, reasoning=ReasoningParams(is_open=True, budget=None), max_tokens=60)
    engine = make_engine()
    engine.add(request, prompt_of(10), Resume((ResumedChoice(0, (97, 98, 99)),), is_thinking_stopped=True))
    events = [event for batch in steps(engine) for event in batch]

    assert merged(events)["text"][0].startswith("</think>")
    (finished,) = [event for event in events if isinstance(event, ChoiceFinished)]
    assert finished.usage.reasoning_tokens == 3


@pytest.mark.parametrize("num_logprobs", [None, 1])
def test_stopped_thinking_counts_the_same_in_the_next_worker(num_logprobs):
    """The marker was written by force; it is no reasoning, and what was forced counts as forced."""
    sampling = SamplingParams(temperature=1.2, seed=7, num_logprobs=num_logprobs)
    request, prompt = make_request(sampling, reasoning=ReasoningParams(is_open=True)), prompt_of(10)
    found = []
    for place in (None, *range(7, 20, 2)):
        transcript = Transcript(request, clock=iter(np.arange(0, 1e6)).__next__)
        transcript.begin_stay()
        transcript.started(Usage())
        engine, events = make_engine(), []
        engine.add(request, prompt)
        for number, batch in enumerate(steps(engine)):
            events += map(transcript.record, batch)
            if number == 5:
                assert engine.stop_thinking(request.request_id) == 1
                transcript.thinking_stopped()
            if number == place:
                break
        if place is not None and not transcript.is_finished:
            engine = make_engine()
            engine.add(request, prompt, transcript.begin_stay())
            events += [transcript.record(event) for batch in steps(engine) for event in batch]
        found.append(merged(events))

    assert all(one == found[0] for one in found)


def test_events_tell_what_is_held_back():
    """A reader that knows all events of a choice knows all its tokens up to the last one."""
    held = [
        event.held
        for batch in steps(_added(make_request(WARM, stop=STOPS)))
        for event in batch
        if isinstance(event, TextDelta) and event.held is not None
    ]

    assert held
    assert all(isinstance(tokens, HeldTokens) and tokens.token_ids for tokens in held)


def test_plain_events_tell_nothing_more():
    """What nobody needs costs nothing on the link."""
    events = [event for batch in steps(_added(make_request())) for event in batch if isinstance(event, TextDelta)]

    assert all(event.held is None and not event.probabilities for event in events if event.text)


def _added(request: EngineRequest) -> StepEngine:
    engine = make_engine()
    engine.add(request, prompt_of(20))
    return engine


def test_tokens_tell_whether_another_worker_made_them() -> None:
    sampling, stopping = SamplingParams(temperature=0, num_logprobs=0), StopParams(max_tokens=12, ignore_eos=True)
    request = EngineRequest(request_id="r", sampling=sampling, stopping=stopping, token_details=True)
    transcript = Transcript(request, clock=iter(np.arange(0, 1e6)).__next__)
    resumed: list[bool] = []
    num_told: list[int] = []
    for num_batches in (4, 100):
        one = make_engine()
        one.add(request, prompt_of(20), transcript.begin_stay())
        for batch in itertools.islice(steps(one), num_batches):
            for event in map(transcript.record, batch):
                entries = event.logprobs if isinstance(event, TextDelta) else None
                resumed += [entry.details.resumed for entry in entries or () if entry.details is not None]
        num_told.append(len(resumed))

    assert 0 < num_told[0] < num_told[1] == 12
    assert resumed == [False] * num_told[0] + [True] * (12 - num_told[0])


def work(drafted: int, accepted: int, left_early: int = 0, skipped: int = 0) -> Usage:
    return Usage(
        drafted_tokens=drafted,
        accepted_draft_tokens=accepted,
        drafts={"lookup": (drafted, accepted)},
        early_exit_tokens=left_early,
        skipped_layers=skipped,
    )


def test_figures_are_those_of_all_workers_together():
    """Work is added up; what the prefix cache had is what it had the first time."""
    transcript = Transcript(make_request(), clock=iter(np.arange(0, 1e6)).__next__)
    miss = CacheMiss(3, b"a", b"b")
    transcript.begin_stay()
    transcript.accepted()
    transcript.started(Usage(cached_tokens=5, loaded_prompt_tokens=2), miss)
    transcript.record(TextDelta(0, "a", (97,), work=work(8, 5, 1, 4)))
    transcript.record(TextDelta(0, "b", (98,), work=work(9, 6, 1, 4)))
    transcript.begin_stay()
    transcript.begin_stay()
    transcript.started(Usage(cached_tokens=40, loaded_prompt_tokens=40))
    transcript.record(TextDelta(0, "c", (99,), work=work(3, 1)))
    transcript.record(ChoiceFinished(0, "stop", Usage(completion_tokens=3)))
    told = Usage(prompt_tokens=45, cached_tokens=40, loaded_prompt_tokens=40, completion_tokens=1)
    summary = transcript.record(RequestFinished(told + work(4, 1)))

    assert isinstance(summary, RequestFinished)
    assert summary.usage.prompt_tokens == 45
    assert (summary.usage.cached_tokens, summary.usage.loaded_prompt_tokens, summary.cache_miss) == (5, 2, miss)
    assert (summary.usage.drafted_tokens, summary.usage.accepted_draft_tokens) == (13, 7)
    assert summary.usage.drafts == {"lookup": (13, 7)}
    assert (summary.usage.early_exit_tokens, summary.usage.skipped_layers) == (1, 4)
    assert summary.usage.completion_tokens == 3


def test_tokens_forced_before_the_start_end_neither_queue_nor_prefill():
    times = iter([1.0, 3.0, 6.0, 10.0])
    transcript = Transcript(make_request(), clock=times.__next__)
    transcript.begin_stay()
    transcript.accepted()
    transcript.record(TextDelta(0, "{", (123,)))
    transcript.begin_stay()
    transcript.started(Usage())
    transcript.record(TextDelta(0, "a", (97,)))
    summary = transcript.record(RequestFinished(Usage()))

    assert isinstance(summary, RequestFinished)
    assert (summary.usage.queue_s, summary.usage.prefill_s, summary.usage.decode_s) == (2.0, 3.0, 4.0)
