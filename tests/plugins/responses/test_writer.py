"""The writer: whatever the pieces are, the events build up the final response, in a strict order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from enginehouse.contract.surface import CallPiece, ErrorAnswer, Piece
from enginehouse.contract.types import TokenLogprob, TopLogprob
from enginehouse.contract.usage import Usage
from enginehouse_responses.body import ResponsesBody
from enginehouse_responses.resource import Resource
from enginehouse_responses.tools import Toolbox
from enginehouse_responses.writer import ResponseWriter

from .harness import check_events, check_response, check_stream

TOOLS = [
    {"type": "function", "name": "now"},
    {"type": "custom", "name": "write"},
    {"type": "namespace", "name": "mcp__a", "description": "", "tools": [{"type": "function", "name": "read"}]},
]
USAGE = Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=3, reasoning_tokens=1)
ERROR = ErrorAnswer(500, "boom", "server_error", "engine_error")
TEXT = st.text(min_size=1, max_size=5)
LOGPROB = (TokenLogprob(1, b"\xc3", -0.5, (TopLogprob(1, b"\xc3", -0.5), TopLogprob(2, b"b", -1.0))),)


def _cut(text: str, places: Sequence[int]) -> list[str]:
    """The text in fragments, some of them empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@st.composite
def _calls(draw: st.DrawFn, index: int) -> list[Piece]:
    name = draw(st.sampled_from(["now", "write", "mcp__a__read"]))
    whole = draw(st.sampled_from([{"input": draw(TEXT)}, {"place": 'R\\"\n'}, {}]))
    text = json.dumps(whole, ensure_ascii=draw(st.booleans()))
    first, *rest = _cut(text, draw(st.lists(st.integers(0, 100), max_size=6)))
    pieces = [Piece(0, call=CallPiece(index, arguments=first, id=f"call_{index}", name=name))]
    return pieces + [Piece(0, call=CallPiece(index, arguments=fragment)) for fragment in rest]


@st.composite
def _answers(draw: st.DrawFn) -> list[Piece]:
    """Pieces as core sends them: fragments of a call follow each other."""
    pieces: list[Piece] = []
    for kind in draw(st.lists(st.sampled_from(["text", "scored", "reasoning", "call"]), max_size=8)):
        if kind == "call":
            num_calls = sum(piece.call is not None and piece.call.id is not None for piece in pieces)
            pieces += draw(_calls(num_calls))
        elif kind == "reasoning":
            pieces.append(Piece(0, reasoning=draw(TEXT)))
        else:
            pieces.append(Piece(0, text=draw(TEXT), logprobs=LOGPROB if kind == "scored" else None))
    return pieces


def _writer(status: str = "in_progress", **options: Any) -> ResponseWriter:
    body, toolbox = ResponsesBody(input="hi", tools=TOOLS), Toolbox()
    toolbox.add(TOOLS, "tools")
    resource = Resource.of("resp_1", "m", body, toolbox, is_stored=False)
    resource.status = status
    return ResponseWriter(resource, toolbox, seal=lambda text: text[::-1], has_logprobs=True, **options)


def _plain(chunks: Any) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = [
        msgspec.json.decode(chunk if isinstance(chunk, bytes) else msgspec.json.encode(chunk)) for chunk in chunks
    ]
    return plain


@settings(max_examples=30)  # the judge is slow
@given(_answers(), st.sampled_from(["stop", "length", "tool_calls", "fails", "is cancelled"]))
def test_events_build_up_the_final_response(pieces: list[Piece], end: str) -> None:
    writer = _writer()
    events = _plain(writer.opening())
    for piece in pieces:
        events += _plain(writer.push(piece))
    if end in ("fails", "is cancelled"):
        writer.is_cancelled = end == "is cancelled"
        events += _plain(writer.fail(ERROR))
    else:
        events += _plain(writer.push(Piece(0, finish_reason=end)))
        events += _plain(writer.close(USAGE, None))

    check_stream(events)
    check_response(writer.to_plain())
    assert events[-1]["response"] == writer.to_plain()
    expected = {"length": "incomplete", "fails": "failed", "is cancelled": "cancelled"}.get(end, "completed")
    assert events[-1]["response"]["status"] == expected
    statuses = [item["status"] for item in events[-1]["response"]["output"]]
    assert statuses[:-1] == ["completed"] * len(statuses[:-1])
    if statuses:
        assert statuses[-1] == ("completed" if expected == "completed" else "incomplete")


@given(TEXT, st.booleans(), st.lists(st.integers(0, 1000), max_size=8))
def test_the_input_of_a_custom_tool_is_read_as_it_arrives(text: str, is_ascii: bool, places: list[int]) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    first, *rest = _cut(arguments, places)
    writer = _writer()
    writer.push(Piece(0, call=CallPiece(0, arguments=first, id="call_1", name="write")))
    events = [event for fragment in rest for event in _plain(writer.push(Piece(0, call=CallPiece(0, fragment))))]
    deltas = [event["delta"] for event in events]
    writer.push(Piece(0, finish_reason="tool_calls"))
    response = writer.whole(USAGE, None)

    assert response["output"][0]["input"] == text
    assert text.endswith("".join(deltas))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a', "a"),
        ('{"input"', '{"input"'),
        ('{"in', '{"in'),
        ("{}", ""),
        ("", ""),
        ('{"other": 1}', '{"other": 1}'),
        ("plain text", "plain text"),
        ('{"input": 7}', '{"input": 7}'),
    ],
)
def test_arguments_of_another_form_become_the_input(arguments: str, text: str) -> None:
    writer = _writer()
    for fragment in (arguments[:3], arguments[3:]):
        is_first = fragment is arguments[:3] or not writer.to_plain()["output"]
        call = CallPiece(0, fragment, id="call_1" if is_first else None, name="write" if is_first else None)
        writer.push(Piece(0, call=call))

    assert writer.whole(USAGE, None)["output"][0]["input"] == text


def test_a_response_in_the_background_is_queued_first() -> None:
    writer = _writer("queued")
    events = _plain([*writer.opening(), *writer.push(Piece(0, text="a")), *writer.close(USAGE, None)])

    assert [event["type"] for event in events[:4]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.output_item.added",
    ]


def test_usage_says_what_was_cached_and_kept() -> None:
    assert _writer().whole(USAGE, None)["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 3},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


def test_open_responses_names_the_events_of_reasoning_differently() -> None:
    writer = _writer(dialect="open_responses")
    events = _plain([*writer.opening(), *writer.push(Piece(0, reasoning="a")), *writer.close(USAGE, None)])

    assert [event["type"] for event in events if "reasoning" in event["type"]] == [
        "response.reasoning.delta",
        "response.reasoning.done",
    ]
    check_events(events)
