"""The stream and the whole response are made of the same pieces."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from enginehouse.contract.surface import Piece
from enginehouse.contract.types import TokenLogprob
from enginehouse.contract.usage import Usage
from enginehouse_llama_server.answers import CompletionAssembler
from enginehouse_llama_server.bodies import CompletionBody
from enginehouse_testkit.surface_answers import FakeAnswer

USAGE = Usage(prompt_tokens=7, cached_tokens=3, completion_tokens=5, prefill_s=0.25, decode_s=0.5)
NUM_CHOICES = 2

entries = st.builds(
    lambda token_id, token: TokenLogprob(token_id, token, -0.5), st.integers(0, 9), st.binary(max_size=3)
)
pieces = st.builds(
    lambda index, text, logprobs: Piece(
        index, text, tuple(logprobs), token_ids=tuple(entry.token_id for entry in logprobs)
    ),
    st.integers(0, NUM_CHOICES - 1),
    st.text(max_size=3),
    st.lists(entries, max_size=2),
)
ends = st.sampled_from([("stop", None), ("stop", 2), ("stop", "word"), ("length", None)])


def assembler(body: CompletionBody, *, is_streamed: bool) -> CompletionAssembler:
    call: Any = SimpleNamespace(body=body)
    return CompletionAssembler(call, FakeAnswer(is_streamed=is_streamed), ["Hi"], [None], is_many=True)


def plain(events: Iterable[Any]) -> list[dict[str, Any]]:
    """The events, some of which are prepared JSON."""
    read: list[dict[str, Any]] = [
        msgspec.json.decode(event if isinstance(event, bytes) else msgspec.json.encode(event)) for event in events
    ]
    return read


@given(st.lists(pieces, max_size=12), st.tuples(ends, ends), st.sampled_from([None, 3]))
def test_events_add_up_to_the_whole_response(said: list[Piece], ended: Any, n_probs: int | None) -> None:
    said += [
        Piece(index, finish_reason=reason, stop_reason=stop, token_ids=(index,))
        for index, (reason, stop) in enumerate(ended)
    ]
    body = CompletionBody(prompt="Hi", n_cmpl=NUM_CHOICES, n_probs=n_probs, return_tokens=True)
    streamed, one = assembler(body, is_streamed=True), assembler(body, is_streamed=False)
    events = plain(event for piece in said for event in streamed.push(piece))
    lasts = streamed.close(USAGE, None)
    assert not any(event for piece in said for event in one.push(piece))
    wholes = one.whole(USAGE, None)
    assert isinstance(wholes, list)

    for last, whole in zip(lasts, wholes, strict=True):
        own = [event for event in events if event["index"] == whole["index"]]
        folded = {**last, "content": "".join(event["content"] for event in own)}
        folded["tokens"] = [token for event in [*own, last] for token in event["tokens"]]
        folded["generation_settings"] = {**last["generation_settings"], "stream": False}
        if n_probs is not None:
            folded["completion_probabilities"] = [one for event in own for one in event["completion_probabilities"]]
        assert folded == whole
        assert (whole["timings"]["prompt_n"], whole["timings"]["cache_n"]) == (4, 3)
