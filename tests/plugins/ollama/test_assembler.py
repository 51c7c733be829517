"""The stream and the whole response are made of the same pieces: what the chunks of one add up to is the other."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.surface import CallPiece, Piece
from enginehouse.contract.types import TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse_ollama.answers import OllamaAssembler
from enginehouse_testkit.surface_answers import FakeAnswer

USAGE = Usage(prompt_tokens=7, completion_tokens=5, prefill_s=0.25, decode_s=0.5, total_s=1.0)
TIMES = {"created_at", "load_duration"}

texts = st.text(max_size=4)
scores = st.none() | st.builds(lambda token: (TokenLogprob(0, token, -0.5),), st.binary(min_size=1, max_size=3))
said = st.builds(lambda text, logprobs: [Piece(0, text, logprobs)], texts, scores)
thought = st.builds(lambda text: [Piece(0, reasoning=text)], texts)
argument_texts = st.sampled_from(['{"a":1}', '{"a": {"b": [1, null]}}', "{}", "", "[1]", '{"a', "nonsense"])


@st.composite
def called(draw: st.DrawFn) -> list[Piece]:
    """A call in fragments; its arguments need not be an object."""
    written = draw(argument_texts)
    cut = draw(st.integers(0, len(written)))
    first = CallPiece(0, written[:cut], id="call_1", name="f")
    return [Piece(0, call=first), Piece(0, call=CallPiece(0, written[cut:]))]


@st.composite
def outputs(draw: st.DrawFn) -> list[Piece]:
    groups = draw(st.lists(said | thought | called(), max_size=8))
    pieces: list[Piece] = []
    num_calls = 0
    for group in groups:
        if group[0].call is not None:
            for piece in group:
                assert piece.call is not None
                piece.call.index = num_calls
            num_calls += 1
        pieces += group
    return [*pieces, Piece(0, finish_reason=draw(st.sampled_from(["stop", "length", "tool_calls"])))]


def folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Add chunks up as clients do."""
    whole = dict(chunks[-1])
    holders = [chunk.get("message", chunk) for chunk in chunks]
    holder = dict(holders[-1])
    for name in ("content", "response", "thinking"):
        if any(name in one for one in holders):
            holder[name] = "".join(one.get(name, "") for one in holders)
    calls = [call for one in holders for call in one.get("tool_calls", [])]
    scored = [entry for chunk in chunks for entry in chunk.get("logprobs", [])]
    holder |= {"tool_calls": calls} if calls else {}
    if "message" in whole:
        whole["message"] = holder
    else:
        whole |= holder
    return whole | ({"logprobs": scored} if scored else {})


@given(outputs(), st.sampled_from(["chat", "generate"]))
def test_a_stream_adds_up_to_the_whole_response(pieces: list[Piece], kind: Any) -> None:
    streamed = OllamaAssembler(FakeAnswer(is_streamed=True), "m", kind)
    sent = [*streamed.opening(), *(chunk for piece in pieces for chunk in streamed.push(piece))]
    chunks = [
        msgspec.json.decode(chunk if isinstance(chunk, bytes) else msgspec.json.encode(chunk))
        for chunk in (*sent, *streamed.close(USAGE, None))
    ]
    one = OllamaAssembler(FakeAnswer(), "m", kind)
    for piece in pieces:
        one.push(piece)
    whole = one.whole(USAGE, None)

    assert {name: value for name, value in folded(chunks).items() if name not in TIMES} == {
        name: value for name, value in whole.items() if name not in TIMES
    }
    assert all(chunk["done"] is (chunk is chunks[-1]) for chunk in chunks)
    assert (whole["prompt_eval_duration"], whole["eval_duration"]) == (250_000_000, 500_000_000)


def test_durations_are_not_longer_than_the_whole() -> None:
    """The server notices late that the worker accepted the request, so that both count the same time."""
    assembler = OllamaAssembler(FakeAnswer(so_far=Usage(total_s=0.5)), "m", "chat")
    whole = assembler.whole(USAGE, None)

    assert whole["load_duration"] == 250_000_000
