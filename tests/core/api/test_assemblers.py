"""OpenAI's formats: whatever the engine's events are, the chunks of a stream add up to the whole response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from enginehouse.api.generation.assembly import Assembly
from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.frames import encode_chunk
from enginehouse.api.openai.chat import ChatAssembler, ChatOptions
from enginehouse.api.openai.completions import CompletionAssembler
from enginehouse.contract.types import CallDelta, ChoiceFinished, Event, ReasoningDelta, TextDelta, TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse.settings.profiles import PROFILES, Profile

NUM_CHOICES = 2
USAGE = Usage(prompt_tokens=7, completion_tokens=5)
TEXT = st.text(min_size=1, max_size=4)
END = st.sampled_from(["stop", "length", "content_filter"])


@st.composite
def outputs(draw: st.DrawFn, *, is_chat: bool) -> list[Event]:
    """The events of two choices, in turns; tokens have log-probabilities in all of them or in none."""
    has_logprobs = draw(st.booleans())
    num_calls = [0] * NUM_CHOICES
    events: list[Event] = []
    kinds = ["text", "tokens", *(["reasoning", "call"] if is_chat else [])]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=10)):
        choice = draw(st.integers(0, NUM_CHOICES - 1))
        if kind == "reasoning":
            events.append(ReasoningDelta(choice, draw(TEXT)))
        elif kind == "call":
            call = num_calls[choice]
            num_calls[choice] += 1
            events.append(CallDelta(choice, call, draw(st.text(max_size=3)), "look"))
            events += [CallDelta(choice, call, part) for part in draw(st.lists(st.text(max_size=3), max_size=2))]
        else:
            text = draw(TEXT) if kind == "text" else ""
            token_ids = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
            entries = tuple(TokenLogprob(token_id, b"\xc3", -0.5) for token_id in token_ids)
            events.append(TextDelta(choice, text, token_ids, entries if has_logprobs else None))
    return [*events, *(ChoiceFinished(choice, draw(END)) for choice in range(NUM_CHOICES))]


def assembled(*, is_streamed: bool, has_ids: bool = False) -> Assembly:
    """An assembly of one request whose model has no parser."""
    generation = SimpleNamespace(prompt_token_ids=(1, 2))
    running: Any = SimpleNamespace(
        generation=generation,
        parsing=SimpleNamespace(open=lambda: None, are_foreign=False),
        model=SimpleNamespace(name="m", info=SimpleNamespace(special_tokens={"eos": 9})),
        fingerprint="fp",
        request=SimpleNamespace(profile="openai", model="m", includes_stop=False, return_token_ids=has_ids),
        parameters=SimpleNamespace(stopping=SimpleNamespace(max_tokens=3)),
    )
    return Assembly("answer-1", [running], NUM_CHOICES, AccessRecord(method="POST", path="/", began=0.0), is_streamed)


def streamed(assembly: Assembly, assembler: Any, events: Sequence[Event]) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    chunks = [*assembler.opening()]
    for event in events:
        for piece in assembly.pieces(0, [event]):
            chunks += assembler.push(piece)
    chunks += assembler.close(USAGE, None)
    return [msgspec.json.decode(encode_chunk(chunk)) for chunk in chunks]


def whole(assembly: Assembly, assembler: Any, events: Sequence[Event]) -> dict[str, Any]:
    """The response that is not streamed."""

    async def batches() -> AsyncIterator[tuple[int, Sequence[Event]]]:
        yield 0, events

    asyncio.run(assembly.fold(batches(), assembler))
    response: dict[str, Any] = assembler.whole(USAGE, None)
    return response


def added(choice: dict[str, Any], parts: Iterable[dict[str, Any]]) -> None:
    """Add what a client knows of a choice: its texts, its calls, its log-probabilities and its end."""
    for part in parts:
        said = part.get("delta") or part.get("message") or {}
        for name in ("content", "reasoning_content", "reasoning"):
            choice[name] = choice.get(name, "") + (said.get(name) or "")
        choice["text"] = choice.get("text", "") + part.get("text", "")
        calls = choice.setdefault("calls", [])
        for index, call in enumerate(said.get("tool_calls") or ()):
            if call.get("id") is not None:
                assert call.get("index", index) == len(calls)
                calls.append({"name": call["function"]["name"], "arguments": ""})
            calls[call.get("index", index)]["arguments"] += call["function"]["arguments"]
        choice.setdefault("token_ids", []).extend(part.get("token_ids", ()))
        choice.setdefault("prompt", []).extend(part.get("prompt_token_ids", ()))
        for name, entries in (part.get("logprobs") or {}).items():
            choice.setdefault("logprobs", {}).setdefault(name, []).extend(entries or ())
        choice["finish_reason"] = choice.get("finish_reason") or part["finish_reason"]


def folded(chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices to which chunks, or one whole response, add up."""
    choices: list[dict[str, Any]] = [{} for _ in range(NUM_CHOICES)]
    for chunk in chunks:
        for part in chunk["choices"]:
            added(choices[part["index"]], [part])
    return choices


def counts(chunks: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """The tokens of the prompt and of the answer, as often as they are told; only some streams have times, too."""
    told = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return [(usage["prompt_tokens"], usage["completion_tokens"]) for usage in told]


@given(
    outputs(is_chat=True),
    st.sampled_from(list(PROFILES.values())),
    st.sampled_from(["reasoning_content", "reasoning", "both"]),
    st.booleans(),
    st.booleans(),
)
def test_the_chunks_of_a_chat_add_up(
    events: list[Event], profile: Profile, field: Any, has_usage: bool, has_ids: bool
) -> None:
    usage = profile.usage_in_streams if has_usage else None
    options = ChatOptions(usage=usage, profile=profile, reasoning_field=field)
    stream, one = (assembled(is_streamed=is_streamed, has_ids=has_ids) for is_streamed in (True, False))
    chunks = streamed(stream, ChatAssembler(stream, options), events)
    response = whole(one, ChatAssembler(one, options), events)

    assert folded(chunks) == folded([response])
    assert counts(chunks) == counts([response]) * has_usage
    assert {chunk["id"] for chunk in chunks} == {"answer-1"}


@given(outputs(is_chat=False), st.booleans(), st.booleans())
def test_the_chunks_of_a_completion_add_up(events: list[Event], has_usage: bool, has_ids: bool) -> None:
    options = SimpleNamespace(n=NUM_CHOICES, logprobs=0, include_usage=has_usage, timings_per_token=False)
    stream, one = (assembled(is_streamed=is_streamed, has_ids=has_ids) for is_streamed in (True, False))
    chunks = streamed(stream, CompletionAssembler(stream, options), events)
    response = whole(one, CompletionAssembler(one, options), events)

    assert folded(chunks) == folded([response])
    assert counts(chunks) == counts([response]) * has_usage


@pytest.mark.parametrize("has_logprobs", [False, True])
def test_a_piece_has_the_tokens_since_the_last_one(has_logprobs: bool) -> None:
    """A token without text of its own comes with the next text, or with the end."""
    given = [("", (1,)), ("a", (2, 3)), ("b", ()), ("", (4,)), ("c", (5,)), ("", (6, 7))]
    assembly, events = assembled(is_streamed=True), list[Event]()
    for text, token_ids in given:
        entries = tuple(TokenLogprob(token_id, b"", 0.0) for token_id in token_ids) if has_logprobs else None
        events.append(TextDelta(0, text, token_ids, entries))
    pieces = assembly.pieces(0, [*events, ChoiceFinished(0, "stop")])

    waiting = [("a", (1, 2, 3)), ("b", ()), ("c", (4, 5)), ("", (6, 7))]
    assert [(piece.text, piece.token_ids) for piece in pieces] == ([*given, ("", ())] if has_logprobs else waiting)
