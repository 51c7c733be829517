"""Server-sent events: those we write, and those that a server behind a remote model sends."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import strategies as st

from enginehouse.contract.errors import EngineError, EnginehouseError, GenerationFailed
from enginehouse.contract.types import Event
from enginehouse.settings.config import ModelSettings, PluginsSettings, Settings
from enginehouse_remote.sse import read_events
from enginehouse_remote.stream import AnswerStream
from enginehouse_testkit.served import served

from .cases import JSON, NASTY_TEXT, NUM_CASES, run_cases, some_members


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model whose tokens are bytes and pieces of characters, drawn at random."""
    source = str(tmp_path_factory.mktemp("fake"))
    model = ModelSettings(source=source, backend="fake", isolation="thread", context=512)
    settings = Settings(models={"fake": model}, plugins=PluginsSettings(allow=("samplers", "parsers")))
    with served(settings, timeout=60) as client:
        yield client


_OPTIONS = st.fixed_dictionaries(
    {"seed": st.integers(0, 2**31), "max_tokens": st.integers(1, 16), "temperature": st.sampled_from([0.0, 1.0, 2.0])},
    optional={
        "n": st.integers(1, 3),
        "stop": st.lists(NASTY_TEXT.filter(bool), min_size=1, max_size=2),
        "logprobs": st.just(True),
        "ignore_eos": st.just(True),
        "user": NASTY_TEXT,
    },
)


def _folded(body: bytes, num_choices: int) -> list[tuple[str, str | None, int]]:
    """Text, finish reason and number of log-probabilities of each choice; checks the framing."""
    assert body.endswith(b"data: [DONE]\n\n")
    lines = body.decode("utf-8").removesuffix("\n\n").split("\n\n")
    assert all(line.startswith(("data: ", ":")) and "\n" not in line and "\r" not in line for line in lines)
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if not line.startswith(":")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    folded = []
    for index in range(num_choices):
        own = [choice for choice in choices if choice["index"] == index]
        reasons = [choice["finish_reason"] for choice in own if choice["finish_reason"]]
        assert len(reasons) == 1 and own[-1]["finish_reason"] == reasons[0]
        text = "".join(choice["delta"].get("content") or "" for choice in own)
        folded.append((text, reasons[0], sum(len((one.get("logprobs") or {}).get("content", ())) for one in own)))
    return folded


@NUM_CASES
def test_streams_are_framed_and_say_what_whole_answers_say(client: httpx.Client, num_cases: int) -> None:
    def check(options: dict[str, Any], content: str) -> None:
        body = {"messages": [{"role": "user", "content": content}], **options}
        whole = client.post("/v1/chat/completions", json=body)
        streamed = client.post("/v1/chat/completions", json={**body, "stream": True})
        assert whole.status_code == streamed.status_code and whole.status_code in (200, 400), whole.text
        if whole.status_code == 200:
            expected = [
                (
                    choice["message"]["content"] or "",
                    choice["finish_reason"],
                    len((choice["logprobs"] or {}).get("content", ())),
                )
                for choice in whole.json()["choices"]
            ]
            assert _folded(streamed.content, options.get("n", 1)) == expected

    run_cases(num_cases // 2, check, options=_OPTIONS, content=NASTY_TEXT)


_ANY = st.sampled_from([None, True, -1, 0, 1.5, 10**30, "", "text", [], {}, ["a"], {"a": 1}, [{"token": "a"}]])
_TEXT = st.one_of(NASTY_TEXT, NASTY_TEXT, _ANY)
_CALL = some_members(
    {
        "index": st.one_of(st.integers(0, 1), _ANY),
        "id": st.one_of(st.sampled_from(["a", "b", ""]), _ANY),
        "function": st.one_of(some_members({"name": _TEXT, "arguments": _TEXT}, most=2), _ANY),
    },
    most=3,
)
_DELTA = some_members(
    {
        "content": _TEXT,
        "role": _ANY,
        "reasoning_content": _TEXT,
        "tool_calls": st.one_of(st.lists(_CALL, max_size=2), _ANY),
        "function_call": st.one_of(some_members({"name": _TEXT, "arguments": _TEXT}, most=2), _ANY),
    },
    most=2,
)
_LOGPROB = some_members(
    {"token": _TEXT, "logprob": st.one_of(st.just(-1.0), _ANY), "bytes": _ANY, "top_logprobs": _ANY}, most=4
)
_LOGPROBS = some_members(
    {"content": st.one_of(st.lists(_LOGPROB, max_size=2), _ANY), "tokens": _ANY, "token_logprobs": _ANY}, most=3
)
_CHOICE = some_members(
    {
        "index": st.one_of(st.integers(0, 1), st.integers(0, 1), _ANY),
        "delta": st.one_of(_DELTA, _DELTA, _DELTA, _ANY),
        "text": _TEXT,
        "finish_reason": st.one_of(st.sampled_from([None, "stop", "length", "tool_calls"]), _ANY),
        "logprobs": st.one_of(_LOGPROBS, _ANY),
        "stop_reason": _ANY,
    },
    most=4,
)
_CHUNK = some_members(
    {
        "choices": st.one_of(st.lists(_CHOICE, max_size=2), st.lists(_CHOICE, max_size=2), _ANY),
        "usage": _ANY,
        "error": _ANY,
    },
    most=2,
)
_END = {"choices": [{"index": index, "delta": {}, "finish_reason": "stop"} for index in (0, 1)]}
_LINE = st.one_of(
    _CHUNK.map(lambda chunk: b"data: " + json.dumps(chunk).encode()),
    _CHUNK.map(lambda chunk: b"data: " + json.dumps(chunk).encode()),
    JSON.map(lambda data: b"data:" + json.dumps(data, ensure_ascii=False).encode()),
    st.binary(max_size=20),
    st.sampled_from(
        [b"data: [DONE]", b": ping", b"event: error", b"data:", b"data: {", b"id: 5", b"data: " + b"[" * 5000]
    ),
)


async def _read(body: bytes, cuts: list[int], stream: AnswerStream) -> list[Event]:
    async def pieces() -> AsyncIterator[bytes]:
        places = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
        for start, end in itertools.pairwise(places):
            yield body[start:end]

    events: list[Event] = []
    async for chunk in read_events(pieces()):
        events += stream.push(chunk)
    return events + stream.finish(0.0, 0.0)


@NUM_CASES
def test_what_a_server_sends_is_events_or_an_error(num_cases: int) -> None:
    """Whatever it is and however it is cut: values of the right types, or an error that can be told."""

    def check(lines: list[bytes], end: bytes, cuts: list[int], num_logprobs: int | None, is_whole: bool) -> None:
        ending = [b"data: " + json.dumps(_END).encode(), b"data: [DONE]"] if is_whole else []
        body = end.join([*lines, *ending, b""])
        results = []
        for places in ([], cuts, list(range(len(body)))[:200]):
            try:
                events = asyncio.run(_read(body, places, AnswerStream(2, num_logprobs)))
                msgspec.msgpack.decode(msgspec.msgpack.encode(events), type=list[Event])  # what they claim to be
                results.append(str(events))
            except (GenerationFailed, EngineError) as error:
                results.append(str(error))
        assert len(set(results)) == 1, "the cuts make a difference"
        assert issubclass(GenerationFailed, EnginehouseError)

    run_cases(
        num_cases,
        check,
        lines=st.lists(_LINE, max_size=4),
        end=st.sampled_from([b"\n\n", b"\r\n\r\n", b"\n"]),
        cuts=st.lists(st.integers(0, 10_000), max_size=8),
        num_logprobs=st.sampled_from([None, 2]),
        is_whole=st.booleans(),
    )
