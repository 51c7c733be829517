"""Responses of `/v1/chat/completions`: whole and as events, in the format of a profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from attrs import frozen

from enginehouse.api.http.sse import event
from enginehouse.api.openai.answer import Assembly, Choice, model_name
from enginehouse.api.openai.choice_parser import CallPiece, Piece
from enginehouse.api.openai.encoding import chat_logprobs, encode_json, encode_line
from enginehouse.settings.profiles import Profile

__all__ = ["ChatDialect", "ChatOptions", "HeldUsage"]

_REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}

_EVENT_END = b"}\n\n"


@frozen(kw_only=True)
class ChatOptions:
    """Options of the response format.

    Attributes:
        num_choices: number of choices.
        usage_chunk: a stream ends with a chunk that has the token counts only.
        profile: determines the format.
        reasoning_field: member for reasoning, unless the profile specifies it.
    """

    num_choices: int
    usage_chunk: bool
    profile: Profile
    reasoning_field: Literal["reasoning_content", "reasoning", "both"]


class ChatDialect:
    """Writes ``chat.completion`` and ``chat.completion.chunk`` objects.

    Events are performance-critical: everything that does not change between them is encoded once.
    """

    def __init__(self, request_id: str, assembly: Assembly, options: ChatOptions) -> None:
        profile, running = options.profile, assembly.running[0]
        self._profile = profile
        self._assembly = assembly
        self._reasoning_fields = _REASONING_FIELDS[profile.reasoning_field or options.reasoning_field]
        self._head = {
            "id": request_id,
            "created": int(time.time()),
            "model": model_name(running),
            "system_fingerprint": running.card.fingerprint,
        }
        self._chunk_head = self._select(profile.chunk_head, profile.chunk_object)
        start = b"data: " + encode_line(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._starts = [start + str(index).encode() + b',"delta":{' for index in range(options.num_choices)]
        self._opening = encode_line(profile.opening_delta)[1:-1]
        self._no_logprobs = b'},"logprobs":null' if profile.null_logprobs else b"}"
        self._usage = b',"usage":null' if options.usage_chunk else b""
        self._end = self._no_logprobs + b',"finish_reason":null}]' + self._usage + b"}\n\n"

    def _select(self, members: Sequence[str], kind: str) -> dict[str, Any]:
        """Return the head of an object of that kind."""
        head = {**self._head, "object": kind}
        return {name: head[name] for name in members}

    def opening(self) -> bytes:
        """Return the role of every choice."""
        return b"".join(start + self._opening + self._end for start in self._starts)

    def event(self, piece: Piece) -> bytes:
        """Return a chunk with text, reasoning or part of a call, or with the finish reason of the choice."""
        start = self._starts[piece.index]
        if piece.finish_reason is None and piece.logprobs is None and piece.text:
            return start + b'"content":' + encode_line(piece.text) + self._end
        if piece.scores is not None:
            return start + self._end.removesuffix(_EVENT_END) + b"," + encode_line(piece.scores)[1:] + b"\n\n"
        logprobs = self._no_logprobs
        if piece.logprobs is not None:
            logprobs = b'},"logprobs":' + encode_line(chat_logprobs(piece.logprobs))
        end = logprobs + b',"finish_reason":' + encode_json(piece.finish_reason) + b"}]" + self._usage + b"}\n\n"
        return start + self._delta(piece) + end

    def _delta(self, piece: Piece) -> bytes:
        """Return the members of a delta."""
        if piece.finish_reason is not None:
            return b""
        if piece.reasoning:
            return encode_line(dict.fromkeys(self._reasoning_fields, piece.reasoning))[1:-1]
        if piece.call is not None:
            return b'"tool_calls":[' + encode_line(_call_delta(piece.call)) + b"]"
        return b'"content":' + encode_line(piece.text)

    def flush(self) -> bytes:
        """Return nothing: events are never held back."""
        return b""

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return the chunk without choices that has the token counts."""
        return event(encode_line({**self._chunk_head, "choices": [], "usage": self.counts(usage)}))

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """Return the whole response."""
        head = self._select(self._profile.whole_head, "chat.completion")
        written = [self._choice(choice) for choice in choices]
        scores = self._assembly.scores.members(0) if self._assembly.scores is not None else {}
        return encode_json({**head, "choices": written, **scores, "usage": self.counts(usage)})

    def counts(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the token counts that the profile includes."""
        if self._profile.usage_details:
            return usage
        return {name: count for name, count in usage.items() if isinstance(count, int)}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        written: dict[str, Any] = {"index": choice.index, "message": self._message(choice)}
        if choice.logprobs is not None or self._profile.null_logprobs:
            written["logprobs"] = None if choice.logprobs is None else chat_logprobs(choice.logprobs)
        return {**written, "finish_reason": choice.finish_reason}

    def _message(self, choice: Choice) -> dict[str, Any]:
        """Return the message of a complete choice; content is null if there are only calls."""
        nulls = self._profile.null_members
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if "refusal" in nulls:
            message["refusal"] = None
        if choice.reasoning or "reasoning" in nulls:
            message |= dict.fromkeys(self._reasoning_fields, choice.reasoning or None)
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": "".join(call.arguments)},
                }
                for call in choice.calls
            ]
        elif "tool_calls" in nulls:
            message["tool_calls"] = None
        return message


def _call_delta(call: CallPiece) -> dict[str, Any]:
    """Return one entry of ``tool_calls`` in a delta."""
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


class HeldUsage:
    """Chat dialect with usage attached to the last chunk with content, else to the very last chunk."""

    def __init__(self, dialect: ChatDialect) -> None:
        self._dialect = dialect
        self._held = b""
        self._behind = b""
        self._has_content = False

    def opening(self) -> bytes:
        """Return the dialect's opening."""
        return self._dialect.opening()

    def event(self, piece: Piece) -> bytes:
        """Return the bytes to send now: the previous chunk, once this one replaces it as the last with content."""
        event = self._dialect.event(piece)
        has_content = piece.finish_reason is None and piece.scores is None
        if self._has_content and not has_content:
            self._behind += event
            return b""
        ready = self.flush()
        self._held, self._has_content = event, has_content
        return ready

    def flush(self) -> bytes:
        """Return what was held back, without usage."""
        ready = self._held + self._behind
        self._held = self._behind = b""
        return ready

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Return what was held back, with usage."""
        counts = b',"usage":' + encode_line(self._dialect.counts(usage))
        return self._held.removesuffix(_EVENT_END) + counts + _EVENT_END + self._behind

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """Return the dialect's whole response."""
        return self._dialect.whole(choices, usage)
