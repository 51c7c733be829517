"""The assembler: whatever comes, a stream accumulates to the message that is not streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.surface import CallPiece, ErrorAnswer, Piece
from enginehouse.contract.usage import Usage
from enginehouse_anthropic.assembler import MessageAssembler, MessageOptions, ThinkingDisplay
from enginehouse_anthropic.signatures import Signatures

SIGNATURES = Signatures()
USAGE = Usage(prompt_tokens=12, cached_tokens=5, kept_tokens=6, completion_tokens=7, reasoning_tokens=2)
END = Piece(0, finish_reason="stop")


@frozen
class Answered:
    """A response whose model has accepted it."""

    id: str = "msg_1"
    request_id: str = "req_1"
    model: str = "small"
    num_prompt_tokens: int = 12
    is_streamed: bool = True

    def usage(self) -> Usage:
        return Usage()


def assembler(thinking: ThinkingDisplay = "shown") -> MessageAssembler:
    options = MessageOptions(thinking=thinking, signatures=SIGNATURES, stop_sequences=("END",))
    return MessageAssembler(Answered(), options)


def streamed(pieces: Iterable[Piece], thinking: ThinkingDisplay = "shown") -> list[dict[str, Any]]:
    writer = assembler(thinking)
    events = list(writer.opening())
    for piece in pieces:
        events += writer.push(piece)
    return deepcopy(events + list(writer.close(USAGE, None)))


def whole(pieces: Iterable[Piece], thinking: ThinkingDisplay = "shown") -> dict[str, Any]:
    writer = assembler(thinking)
    for piece in pieces:
        writer.push(piece)
    return writer.whole(USAGE, None)


def accumulated(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, if it is one that it accepts."""
    first, *rest, delta, last = events
    assert first["type"] == "message_start" and last == {"type": "message_stop"}
    message = deepcopy(first["message"])
    assert message["content"] == [] and message["stop_reason"] is None
    block: dict[str, Any] | None = None
    partial = ""
    for event in rest:
        assert event["index"] == len(message["content"])
        if event["type"] == "content_block_start":
            assert block is None
            block, partial = deepcopy(event["content_block"]), ""
            continue
        assert block is not None
        if event["type"] == "content_block_stop":
            if block["type"] == "tool_use" and partial:
                block["input"] = json.loads(partial)
            message["content"].append(block)
            block = None
            continue
        match event["delta"]:
            case {"type": "text_delta", "text": str(text)}:
                block["text"] += text
            case {"type": "thinking_delta", "thinking": str(text)}:
                block["thinking"] += text
            case {"type": "signature_delta", "signature": str(text)}:
                block["signature"] = text
            case {"type": "input_json_delta", "partial_json": str(text)}:
                partial += text
            case other:
                raise AssertionError(other)
    assert block is None and delta["type"] == "message_delta"
    return {**message, **delta["delta"], "usage": delta["usage"]}


def calls(index: int) -> st.SearchStrategy[list[Piece]]:
    """The pieces of one call, whose arguments may be malformed."""
    first = Piece(0, call=CallPiece(index, "", f"call_{index}", "get"))
    texts = st.lists(st.sampled_from(['{"a"', ": 1", ', "b": "', "x", '"', "}", "\\", "{", ""]), max_size=8)
    return texts.map(lambda parts: [first, *(Piece(0, call=CallPiece(index, part)) for part in parts)])


TEXTS = st.sampled_from(["\n", " ", "Hello", " world", "\n\n", "é"])
PIECES = st.one_of(
    TEXTS.map(lambda text: [Piece(0, text)]),
    TEXTS.map(lambda text: [Piece(0, reasoning=text)]),
    st.integers(0, 9).flatmap(calls),
)
ANSWERS = st.lists(PIECES, max_size=12).map(lambda groups: [piece for group in groups for piece in group])


@given(ANSWERS, st.sampled_from(["shown", "sealed", "dropped"]))
def test_a_stream_accumulates_to_the_message(pieces: list[Piece], thinking: ThinkingDisplay) -> None:
    message = whole([*pieces, END], thinking)

    assert accumulated(streamed([*pieces, END], thinking)) == message
    assert message["stop_reason"] == "end_turn"
    kinds = [block["type"] for block in message["content"]]
    assert kinds.count("tool_use") == sum(piece.call is not None and piece.call.id is not None for piece in pieces)
    for block in message["content"]:
        if block["type"] == "text":
            assert block["text"].strip() or kinds == ["text"]
    if thinking == "shown":
        said = "".join(block["text"] for block in message["content"] if block["type"] == "text")
        assert said.split() == "".join(piece.text for piece in pieces).split() or "tool_use" in kinds


def test_events_of_an_answer() -> None:
    """Reasoning, text and a call: three blocks, one after the other."""
    pieces = [
        Piece(0, reasoning="Hm"),
        Piece(0, "\n\n"),
        Piece(0, "Let me see."),
        Piece(0, "\n"),
        Piece(0, call=CallPiece(0, '{"city": "Par', "call_7", "weather")),
        Piece(0, call=CallPiece(0, 'is"}')),
        Piece(0, finish_reason="tool_calls"),
    ]
    start, *blocks, delta, stop = streamed(pieces)
    signature = blocks[2]["delta"]["signature"]

    assert start["message"]["usage"]["input_tokens"] == 12
    assert [(event["type"], event["index"], event.get("delta", event.get("content_block"))) for event in blocks] == [
        ("content_block_start", 0, {"type": "thinking", "thinking": "", "signature": ""}),
        ("content_block_delta", 0, {"type": "thinking_delta", "thinking": "Hm"}),
        ("content_block_delta", 0, {"type": "signature_delta", "signature": signature}),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, {"type": "text", "text": ""}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "\n\nLet me see."}),
        ("content_block_delta", 1, {"type": "text_delta", "text": "\n"}),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, {"type": "tool_use", "id": "toolu_7", "name": "weather", "input": {}}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": '{"city": "Par'}),
        ("content_block_delta", 2, {"type": "input_json_delta", "partial_json": 'is"}'}),
        ("content_block_stop", 2, None),
    ]
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None, "stop_details": None}
    assert stop == {"type": "message_stop"}


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (Piece(0, finish_reason="stop"), ("end_turn", None)),
        (Piece(0, finish_reason="stop", stop_reason="END"), ("stop_sequence", "END")),
        (Piece(0, finish_reason="stop", stop_reason="of the settings"), ("end_turn", None)),
        (Piece(0, finish_reason="stop", stop_reason=7), ("end_turn", None)),
        (Piece(0, finish_reason="length", limit="max_tokens"), ("max_tokens", None)),
        (Piece(0, finish_reason="length", limit="context"), ("model_context_window_exceeded", None)),
        (Piece(0, finish_reason="tool_calls"), ("tool_use", None)),
        (Piece(0, finish_reason="content_filter"), ("refusal", None)),
    ],
)
def test_stop_reasons(end: Piece, expected: tuple[str, str | None]) -> None:
    message = whole([Piece(0, "Hi"), end])

    assert (message["stop_reason"], message["stop_sequence"]) == expected


@pytest.mark.parametrize(("counts_kept", "fresh", "kept"), [(False, 7, 0), (True, 1, 6)])
def test_usage_counts_reused_and_kept_tokens_separately(counts_kept: bool, fresh: int, kept: int) -> None:
    options = MessageOptions(thinking="shown", signatures=SIGNATURES, counts_kept=counts_kept)
    usage = MessageAssembler(Answered(), options).whole(USAGE, None)["usage"]

    assert usage == {
        "input_tokens": fresh,
        "cache_creation_input_tokens": kept,
        "cache_read_input_tokens": 5,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
        "service_tier": "standard",
    }


def test_sealed_reasoning_is_in_its_signature_only() -> None:
    (block,) = whole([Piece(0, reasoning="a "), Piece(0, reasoning="secret"), END], "sealed")["content"]

    assert block["thinking"] == ""
    assert SIGNATURES.open(block["signature"]) == "a secret"
    assert Signatures().open(block["signature"]) is None
    assert SIGNATURES.open(SIGNATURES.sign("visible")) is None and SIGNATURES.open("ErUB/foreign==") is None


def test_an_error_ends_a_stream() -> None:
    error = ErrorAnswer(503, "Busy.", "overloaded_error", "model_overloaded", request_id="req_1")

    assert assembler().fail(error) == [
        {
            "type": "error",
            "error": {"type": "overloaded_error", "message": "Busy.", "code": "model_overloaded"},
            "request_id": "req_1",
        }
    ]
