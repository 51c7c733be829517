"""Writes the responses of ``/api/chat`` and ``/api/generate``: one JSON object per line, or one whole object.

The last object of a stream has the members that a whole response has besides its text. Durations are integers of
nanoseconds: ``load_duration`` is the time until the engine accepted the request, so it includes the load of the model,
its queue and the chat template; ``prompt_eval_duration`` and ``eval_duration`` are measured in the worker.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from attrs import define, field

from enginehouse.contract.surface import Answer, CallPiece, Chunk, ErrorAnswer, Piece
from enginehouse.contract.timings import progress_object, timings
from enginehouse.contract.types import TokenLogprob
from enginehouse.contract.usage import Usage

__all__ = ["OllamaAssembler", "done", "now"]

_encode = msgspec.json.Encoder().encode
_NS = 1_000_000_000


def now() -> str:
    """Return the time in the format of ``created_at``; runs for every token."""
    seconds, nanoseconds = divmod(time.time_ns(), _NS)
    return f"{_second(seconds)}.{nanoseconds // 1000:06}Z"


@functools.lru_cache(maxsize=1)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def done(model: str, kind: Literal["chat", "generate"], reason: str) -> Chunk:
    """Return a whole response without text, for a request that loads or unloads a model."""
    empty: Chunk = {"response": ""} if kind == "generate" else {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": now(), **empty, "done": True, "done_reason": reason}


@define
class _OpenCall:
    """A tool call whose arguments are not complete."""

    id: str
    name: str
    index: int
    arguments: list[str] = field(factory=list)


class OllamaAssembler:
    """Writes one response.

    A tool call is sent once its arguments are complete, because they are an object. Arguments other than a JSON object,
    as those of an answer that was cut off, are sent as text.

    Args:
        model: name by which the client asked for the model.
        kind: ``message`` objects of chats, or ``response`` texts.
        has_timings: the objects have the member ``timings``.
    """

    def __init__(
        self, answer: Answer, model: str, kind: Literal["chat", "generate"], *, has_timings: bool = False
    ) -> None:
        self._model, self._kind = model, kind
        self._usage = answer.usage if has_timings else None
        self._load_s = answer.usage().total_s
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Chunk] = []
        self._logprobs: list[Chunk] = []
        self._open: _OpenCall | None = None
        self._reason = "stop"
        self._is_streamed = answer.is_streamed
        self._is_usual = answer.is_streamed and not has_timings
        said = b'"message":{"role":"assistant","content":%b}' if kind == "chat" else b'"response":%b'
        head = b'{"model":%b,"created_at":"%%b",' % _encode(model).replace(b"%", b"%%")
        self._text_chunk = head + said + b',"done":false}'

    def opening(self) -> Sequence[Chunk]:
        """Return nothing: the role is in every chunk."""
        return ()

    def push(self, piece: Piece) -> Sequence[Chunk | bytes]:
        """Return a chunk with what the piece completes."""
        if piece.finish_reason is not None:
            self._reason = "length" if piece.finish_reason == "length" else "stop"
            return self._close_call()
        if piece.call is not None:
            return self._add_call(piece.call)
        if not (piece.text or piece.reasoning or piece.logprobs):
            progress = piece.progress  # comes alone
            return () if progress is None else (self._chunk("") | {"prompt_progress": progress_object(progress)},)
        self._texts.append(piece.text)
        if self._is_usual and not piece.reasoning and not piece.logprobs:  # the usual case, for every token
            return (self._text_chunk % (now().encode(), _encode(piece.text)),)
        logprobs = [_logprob(entry) for entry in piece.logprobs or ()]
        self._thoughts.append(piece.reasoning)
        self._logprobs += logprobs
        if not self._is_streamed:
            return ()
        return (self._chunk(piece.text, piece.reasoning, logprobs=logprobs),)

    def _add_call(self, piece: CallPiece) -> Sequence[Chunk]:
        ready: Sequence[Chunk] = ()
        if piece.id is not None and piece.name is not None:
            ready = self._close_call()
            self._open = _OpenCall(piece.id, piece.name, piece.index)
        if self._open is not None:
            self._open.arguments.append(piece.arguments)
        return ready

    def _close_call(self) -> Sequence[Chunk]:
        """Return the open call, if there is one."""
        call, self._open = self._open, None
        if call is None:
            return ()
        written = "".join(call.arguments)
        arguments = _object(written or "{}")
        if arguments is None:
            text = json.dumps({"name": call.name, "arguments": written}, ensure_ascii=False)
            self._texts.append(text)
            return (self._chunk(text),)
        function = {"index": call.index, "name": call.name, "arguments": arguments}
        self._calls.append({"id": call.id, "function": function})
        return (self._chunk("", calls=self._calls[-1:]),)

    def _chunk(
        self, text: str, thinking: str = "", *, calls: Sequence[Chunk] = (), logprobs: Sequence[Chunk] = ()
    ) -> Chunk:
        said: Chunk
        thoughts: Chunk = {"thinking": thinking} if thinking else {}
        if self._kind == "chat":
            message: Chunk = {"role": "assistant", "content": text, **thoughts}
            if calls:
                message["tool_calls"] = list(calls)
            said = {"message": message}
        else:
            said = {"response": text, **thoughts, **({"tool_calls": list(calls)} if calls else {})}
        more: Chunk = {"logprobs": list(logprobs)} if logprobs else {}
        if self._usage is not None:
            more["timings"] = timings(self._usage())
        return {"model": self._model, "created_at": now(), **said, **more, "done": False}

    def close(self, usage: Usage, details: dict[str, Any] | None) -> Sequence[Chunk]:
        """Return the last chunk of a stream."""
        return (self._chunk("") | self._figures(usage, details),)

    def fail(self, error: ErrorAnswer) -> Sequence[Chunk]:
        """Return the error as the last chunk."""
        return ({"error": error.message},)

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        """Return the whole response."""
        text, thinking = "".join(self._texts), "".join(self._thoughts)
        return self._chunk(text, thinking, calls=self._calls, logprobs=self._logprobs) | self._figures(usage, details)

    def _figures(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        # The worker may begin before the server has noticed that it accepted the request.
        outside_s = usage.total_s - usage.queue_s - usage.prefill_s - usage.decode_s
        figures = {
            "done": True,
            "done_reason": self._reason,
            "total_duration": _ns(usage.total_s),
            "load_duration": _ns(max(0.0, min(self._load_s, outside_s))),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(usage.prefill_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(usage.decode_s),
        }
        return figures if details is None else {**figures, "enginehouse": details}


def _ns(seconds: float) -> int:
    return round(seconds * _NS)


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _logprob(entry: TokenLogprob) -> Chunk:
    return {**_token(entry.token, entry.logprob), "top_logprobs": [_token(one.token, one.logprob) for one in entry.top]}


def _token(token: bytes, logprob: float) -> Chunk:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}
