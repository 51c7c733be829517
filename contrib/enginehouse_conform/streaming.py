"""H01 to H05: the shape of streams, and characters in both directions."""

from __future__ import annotations

import json
from typing import Any

from enginehouse.cli.target import Target
from enginehouse_conform.check import Check, require
from enginehouse_conform.reading import answered, content_of, forced, forced_text, read_stream, refused

__all__ = ["CHECKS"]

_FORCED = "Grüße 漢字かな 한국어 🧑🏽\u200d🚀 🇨🇦 \U0001d518 e\u0301"


def _frame(target: Target) -> None:
    stream = read_stream(target.chat(stream=True))
    require("content-length" not in stream.answer.headers, "a stream has a Content-Length")
    for event in stream.events:
        require(event.get("object") == "chat.completion.chunk", f"an event is a {event.get('object')!r}")
    for choice in stream.choices():
        missing = {"index", "delta", "finish_reason"} - set(choice)
        require(not missing, f"a choice of a chunk lacks {', '.join(sorted(missing))}")


def _role_and_end(target: Target) -> None:
    choices = read_stream(target.chat(stream=True)).choices(0)
    require(choices and choices[0]["delta"].get("role") == "assistant", "the first chunk has no role 'assistant'")
    require(not any(choice["delta"].get("role") for choice in choices[1:]), "a later chunk repeats the role")
    ends = [place for place, choice in enumerate(choices) if choice.get("finish_reason")]
    require(len(ends) == 1, f"{len(ends)} chunks have a finish reason")
    later = [choice for choice in choices[ends[0] + 1 :] if choice["delta"].get("content")]
    require(not later, "content follows the finish reason")


def _early(target: Target) -> None:
    answer = read_stream(target.chat(stream=True, max_tokens=120)).answer
    share = answer.first_byte_s / answer.total_s if answer.total_s else 0
    slow = answer.total_s > 0.2  # faster answers are inconclusive
    require(not slow or share < 0.5, f"the first byte came after {share:.0%} of the time")
    cache = answer.headers.get("cache-control", "")
    require("no-cache" in cache or "no-store" in cache, f"Cache-Control is {cache!r}, so that proxies may keep streams")


def _usage_chunk(target: Target) -> None:
    stream = read_stream(target.chat(stream=True, stream_options={"include_usage": True}))
    last = stream.events[-1]
    require(last.get("choices") == [] and last.get("usage"), "the last chunk is not the one with the token counts")
    require(len(stream.usages()) == 1, f"{len(stream.usages())} chunks have token counts")
    usage, whole = last["usage"], answered(target.chat())["usage"]
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    require(usage["total_tokens"] == total, f"total_tokens is {usage['total_tokens']}, not {total}")
    for name in ("prompt_tokens", "completion_tokens"):
        require(usage[name] == whole[name], f"{name} is {usage[name]} streamed and {whole[name]} whole")


def _no_usage_chunk(target: Target) -> None:
    without: tuple[dict[str, Any], ...] = ({"stream_options": {"include_usage": False}}, {"stream_options": {}}, {})
    for options in without:
        stream = read_stream(target.chat(stream=True, **options))
        require(not stream.usages(), f"token counts came with {json.dumps(options)}")


def _stray_options(target: Target) -> None:
    refused(target.chat(stream_options={"include_usage": True}), "stream_options without stream", "stream_options")


def _same(target: Target) -> None:
    bodies: list[dict[str, Any]] = [{}, {"max_tokens": 3}, {"stop": ["e"], "max_tokens": 24}, {"seed": 7}]
    for fields in bodies:
        whole = answered(target.chat(**fields))
        stream = read_stream(target.chat(stream=True, **fields))
        shown = json.dumps(fields)
        text, streamed = content_of(whole), stream.text()
        require(text == streamed, f"{shown}: {text!r} whole and {streamed!r} streamed")
        reason = whole["choices"][0]["finish_reason"]
        require(stream.reasons() == [reason], f"{shown}: ends with {reason!r} whole and {stream.reasons()} streamed")


def _whole_characters(target: Target) -> None:
    data = forced_text(target, _FORCED)
    require(json.loads(content_of(data)) == _FORCED, f"whole: {content_of(data)!r}")
    stream = read_stream(target.chat(stream=True, **forced(_FORCED)))
    require("\ufffd" not in stream.text(), "a piece of the stream holds a replacement character")
    require(json.loads(stream.text()) == _FORCED, f"streamed: {stream.text()!r}")


def _odd_characters(target: Target) -> None:
    for name, content in (
        ("a lone surrogate", "\ud83d"),
        ("a null character", "a\u0000b"),
        ("line separators", "a\u2028b\r\nc"),
        ("1,000 emoji", "🧑🏽" * 1000),
    ):
        answer = target.chat(messages=[{"role": "user", "content": content}], max_tokens=2)
        require(answer.status < 500, f"{name} in a message was answered with {answer.shown()}")
    answered(target.chat(max_tokens=2), "a plain request afterwards")


def _one_line(target: Target) -> None:
    text = "a\nb\r\nc\u2028d"
    forced_text(target, text)
    stream = read_stream(target.chat(stream=True, **forced(text)))
    require(json.loads(stream.text()) == text, f"streamed: {stream.text()!r}")


CHECKS = (
    Check("H01", "A stream is `data:` lines of one JSON chunk each, a blank line after each, and one [DONE].", _frame),
    Check("H01", "The first chunk has the role, one chunk the finish reason, and no text follows.", _role_and_end),
    Check("H01", "Text leaves while the answer is still being made, and no proxy may keep it.", _early),
    Check("H02", "include_usage adds one chunk with the same token counts as a whole answer.", _usage_chunk),
    Check("H02", "Without include_usage no chunk has token counts.", _no_usage_chunk),
    Check("H02", "stream_options without stream is refused by name.", _stray_options),
    Check("H03", "Streamed and whole answers say the same and end the same way.", _same),
    Check("H04", "Characters that take several tokens arrive whole.", _whole_characters),
    Check("H05", "Odd characters in a request never break the server.", _odd_characters),
    Check("H05", "Line breaks inside an answer do not break the lines of a stream.", _one_line),
)
