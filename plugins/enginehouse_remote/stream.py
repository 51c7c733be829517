"""Converts the chunks of a streamed answer to events. Pure: does not know sockets or requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from attrs import define, field
from msgspec import structs

from enginehouse.contract.errors import EngineDead, GenerationFailed
from enginehouse.contract.types import (
    CallDelta,
    ChoiceFinished,
    Event,
    FinishReason,
    ReasoningDelta,
    RequestFinished,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)
from enginehouse.contract.usage import Usage
from enginehouse_remote.calls import CallPieces

__all__ = ["AnswerStream"]

_NO_ID = -1
"""Placeholder: token ids are known only to the server with the vocabulary."""

_MAX_REASON_CHARS = 300
_MOST = 2**53  # largest count that every JSON reader accepts

_REASONS: Mapping[str, FinishReason] = {"length": "length", "content_filter": "content_filter"}


@define
class _Choice:
    """State of one choice.

    Attributes:
        calls: its tool calls.
        num_pieces: number of pieces with text, a lower bound for its tokens.
    """

    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    calls: CallPieces = field(factory=CallPieces)
    num_pieces: int = 0
    has_text: bool = False
    has_logprobs: bool = False


class AnswerStream:
    """Reads one answer. End events of its choices are delayed until the usage arrives, which comes last.

    Args:
        num_choices: number of requested choices.
        num_logprobs: alternatives to report per token; None reports nothing.
        requires_call: an answer that ends by itself must contain a tool call.
    """

    def __init__(self, num_choices: int, num_logprobs: int | None, requires_call: bool = False) -> None:
        self._choices = [_Choice() for _ in range(num_choices)]
        self._num_logprobs = num_logprobs
        self._requires_call = requires_call
        self._usage: Mapping[str, Any] = {}

    def push(self, chunk: Mapping[str, Any]) -> list[Event]:
        """Return the events of one chunk, possibly none.

        Raises:
            GenerationFailed: it is not a valid chunk.
        """
        events: list[Event] = []
        try:
            if isinstance(chunk.get("usage"), dict):
                self._usage = chunk["usage"]
            for data in chunk.get("choices") or ():
                self._push_choice(data, events)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
            said = repr(error)[:_MAX_REASON_CHARS]
            raise GenerationFailed(f"The remote server sent an invalid chunk: {said}") from error
        return events

    def finish(self, prefill_s: float, decode_s: float) -> list[Event]:
        """Return the final events.

        Raises:
            EngineDead: a choice has no end: the answer was cut off.
            GenerationFailed: requested log-probabilities or a required call are missing, or calls are ambiguous.
        """
        if any(choice.finish_reason is None for choice in self._choices):
            raise EngineDead("The remote server ended its answer before it was complete.")
        if self._num_logprobs is not None and any(one.has_text and not one.has_logprobs for one in self._choices):
            raise GenerationFailed("The remote server reported no log-probabilities; leave out logprobs.")
        if self._requires_call and any(one.finish_reason == "stop" and not one.calls for one in self._choices):
            raise GenerationFailed("The remote server made no call, although tool_choice requires one.")
        for choice in self._choices:
            if choice.finish_reason != "length":
                self._check_calls(choice)
        usage = self._usage
        num_made = sum(choice.num_pieces for choice in self._choices)
        num_tokens = _count(usage, "completion_tokens", num_made)
        num_reasoning = _count(usage.get("completion_tokens_details"), "reasoning_tokens", 0)
        events: list[Event] = []
        for index, choice in enumerate(self._choices):
            assert choice.finish_reason is not None
            own = num_tokens if len(self._choices) == 1 else choice.num_pieces
            part = Usage(completion_tokens=own, reasoning_tokens=num_reasoning if not index else 0)
            events.append(ChoiceFinished(index, choice.finish_reason, part, choice.stop_reason))
        total = Usage(
            prompt_tokens=_count(usage, "prompt_tokens", 0),
            cached_tokens=_count(usage.get("prompt_tokens_details"), "cached_tokens", 0),
            completion_tokens=num_tokens,
            reasoning_tokens=num_reasoning,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )
        return [*events, RequestFinished(total)]

    @staticmethod
    def _check_calls(choice: _Choice) -> None:
        try:
            choice.calls.check_ends()
        except ValueError as error:
            raise GenerationFailed(f"The remote server sent inconsistent tool calls: {error}") from error

    def _push_choice(self, data: Mapping[str, Any], events: list[Event]) -> None:
        index = data.get("index", 0)
        if isinstance(index, bool) or not 0 <= index < len(self._choices):
            raise IndexError(f"choice {index}")
        choice = self._choices[index]
        delta = data.get("delta") or {}
        reasoning = _text(delta.get("reasoning_content") or delta.get("reasoning"))
        if reasoning:
            choice.num_pieces += 1
            events.append(ReasoningDelta(index, reasoning))
        text = _text(delta.get("content") or data.get("text"))
        logprobs = self._logprobs(data.get("logprobs"))
        choice.has_text |= bool(text)
        choice.has_logprobs |= bool(logprobs)
        if text or logprobs:
            choice.num_pieces += len(logprobs or (None,))
            events.append(TextDelta(index, text, (_NO_ID,) * len(logprobs or ()), logprobs))
        legacy = delta.get("function_call")  # the form of calls before there could be several
        for call in delta.get("tool_calls") or (({"function": legacy},) if legacy else ()):
            choice.num_pieces += 1
            piece = choice.calls.push(call)
            events.append(CallDelta(index, piece.position, piece.arguments, piece.name))
        if data.get("finish_reason") is not None:
            choice.finish_reason = _REASONS.get(data["finish_reason"], "stop")
            stop = data.get("stop_reason", data.get("matched_stop"))
            choice.stop_reason = stop if isinstance(stop, str) or _is_count(stop) else None

    def _logprobs(self, data: Any) -> tuple[TokenLogprob, ...] | None:
        if self._num_logprobs is None or not isinstance(data, dict):
            return None
        entries: tuple[TokenLogprob, ...] | None = None
        if isinstance(data.get("content"), list):
            entries = tuple(_chat_logprob(entry) for entry in data["content"])
        elif isinstance(data.get("tokens"), list):
            entries = _completion_logprobs(data)
        if entries is None:
            return None
        # Some servers report more alternatives than requested.
        return tuple(structs.replace(entry, top=entry.top[: self._num_logprobs]) for entry in entries)


def _chat_logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    top = tuple(TopLogprob(_NO_ID, _bytes(one), _logprob(one["logprob"])) for one in entry.get("top_logprobs") or ())
    return TokenLogprob(_NO_ID, _bytes(entry), _logprob(entry["logprob"]), top)


def _text(value: Any) -> str:
    """Return a text, possibly empty; raises TypeError for anything else."""
    if value and not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value or ""


def _bytes(entry: Mapping[str, Any]) -> bytes:
    own = entry.get("bytes")
    if own is not None and not isinstance(own, list):  # bytes() of a number would create that many bytes
        raise TypeError(f"{type(own).__name__} instead of a list of bytes")
    return bytes(own) if own is not None else _text(entry["token"]).encode()


def _completion_logprobs(data: Mapping[str, Sequence[Any]]) -> tuple[TokenLogprob, ...]:
    tops = data.get("top_logprobs") or [{}] * len(data["tokens"])
    return tuple(
        TokenLogprob(
            _NO_ID,
            token.encode(),
            _logprob(logprob),
            tuple(TopLogprob(_NO_ID, other.encode(), _logprob(value)) for other, value in (top or {}).items()),
        )
        for token, logprob, top in zip(data["tokens"], data["token_logprobs"], tops, strict=True)
    )


def _count(data: Any, name: str, otherwise: int) -> int:
    value = data.get(name) if isinstance(data, dict) else None
    return value if _is_count(value) else otherwise


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _logprob(value: Any) -> float:
    """Return a finite number; raises TypeError for anything else, such as the text "nan", which float() accepts."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("a log-probability that is not a number")
    return float(value)
