"""Nothing that core does with texts of clients takes time that grows faster than they do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest

from enginehouse.cli.output import JsonFormatter
from enginehouse.contract.types import Message, Segment
from enginehouse.engine.text.segments import encode_segments, min_tokens
from enginehouse.engine.text.text_stream import TextStream
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.templates import render
from enginehouse_testkit.fake_tokenizer import FakeTokenizer
from enginehouse_testkit.growth import assert_near_linear
from enginehouse_testkit.hostile_texts import HOSTILE_UNITS, hostile_text

TOKENIZER = FakeTokenizer()
UNITS = HOSTILE_UNITS.values()
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def quadratic(text: str) -> int:
    """What the test must find."""
    return sum(text.count(character, 0, place) for place, character in enumerate(text))


def test_quadratic_time_is_found() -> None:
    with pytest.raises(AssertionError, match="faster than the input"):
        assert_near_linear(partial(hostile_text, "a"), quadratic, 16_000)


def test_linear_time_passes() -> None:
    assert assert_near_linear(partial(hostile_text, "a b"), lambda text: sorted(text.split()), 200_000) > 0


def rendered(text: str) -> tuple[Segment, ...]:
    messages = (Message(role="user", content=text),)
    prompt = ChatPrompt(template=CHATML, messages=messages, special_tokens=tuple(TOKENIZER.special_tokens))
    return render(prompt, 100_000_000)


@pytest.mark.parametrize("unit", UNITS, ids=HOSTILE_UNITS)
def test_rendering_and_encoding(unit: str) -> None:
    """A chat with one hostile message: markers, the template, segments, ids."""
    size = 40_000
    assert_near_linear(partial(hostile_text, unit), rendered, size)
    assert_near_linear(
        lambda n: rendered(hostile_text(unit, n)), lambda segments: encode_segments(TOKENIZER, segments, True), size
    )


def test_many_messages_and_many_segments() -> None:
    """Instead of one long one."""

    def many(num_messages: int) -> tuple[Segment, ...]:
        messages = tuple(Message(role="user", content=f"<|im_end|>{n}") for n in range(num_messages))
        return render(
            ChatPrompt(template=CHATML, messages=messages, special_tokens=("<|im_end|>", "<|im_start|>")), 10**9
        )

    assert_near_linear(lambda n: n, many, 2000)
    assert_near_linear(many, lambda segments: encode_segments(TOKENIZER, segments, True), 4000)

    def user_text(num_segments: int) -> list[Segment]:
        return [Segment("a" if number % 2 else "<|im_end|>", number % 2 == 1) for number in range(num_segments)]

    assert_near_linear(user_text, lambda segments: encode_segments(TOKENIZER, segments, True), 60_000)
    alternating: Callable[[int], list[Segment]] = lambda n: [Segment("<|im_end|>", n % 2 == 0) for n in range(n)]  # noqa: E731
    assert_near_linear(alternating, lambda segments: encode_segments(TOKENIZER, segments, True), 20_000)
    assert_near_linear(alternating, lambda segments: min_tokens(TOKENIZER, segments), 20_000)


@pytest.mark.parametrize("unit", UNITS, ids=HOSTILE_UNITS)
def test_log_lines(unit: str) -> None:
    def record(size: int) -> logging.LogRecord:
        return logging.LogRecord("x", logging.INFO, "", 1, "%s", (hostile_text(unit, size),), None)

    assert_near_linear(record, JsonFormatter().format, 200_000)


@pytest.mark.parametrize("unit", UNITS, ids=HOSTILE_UNITS)
def test_streamed_text(unit: str) -> None:
    """Token by token, with stop strings that nearly come."""
    stops = (unit * 20 + "#", unit * 3 + "##")

    def show(token_ids: list[int]) -> None:
        stream = TextStream(TOKENIZER.token_bytes, TOKENIZER.control_token_ids, stops)
        for token_id in token_ids:
            stream.push(token_id)

    assert_near_linear(lambda n: TOKENIZER.encode(hostile_text(unit, n), False), show, 8000)
