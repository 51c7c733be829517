"""Writes one message: its blocks, as events and as a whole, from the same state.

At most one block is open; the next one opens after it is closed, so that indexes are contiguous. Each block gives the
events of a stream and, when it is closed, its object in the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from attrs import define, evolve, field, frozen

from enginehouse.contract.surface import Answer, CallPiece, Chunk, ErrorAnswer, Piece
from enginehouse.contract.timings import progress_object, timings
from enginehouse.contract.usage import Usage
from enginehouse_anthropic.errors import error_body
from enginehouse_anthropic.partial_json import PartialObject
from enginehouse_anthropic.signatures import Signatures

__all__ = ["MessageAssembler", "MessageOptions", "ThinkingDisplay"]

ThinkingDisplay = Literal["shown", "sealed", "dropped"]
"""Report of reasoning: its text, only a signature that carries it, or nothing, as it was not asked for."""


@frozen(kw_only=True)
class MessageOptions:
    """Form of an answer, as the request states it.

    Attributes:
        has_stop_regex: regular expressions may end the answer; what they match is shown like a stop sequence.
        has_timings: the message and the events of a stream have the member ``timings``.
        counts_kept: prompt tokens that the prefix cache keeps since this request are counted separately.
    """

    thinking: ThinkingDisplay
    signatures: Signatures
    stop_sequences: tuple[str, ...] = ()
    has_stop_regex: bool = False
    counts_kept: bool = False
    has_timings: bool = False


class _Block(Protocol):
    """A block that is open."""

    def start(self) -> Chunk:
        """Return the block as it opens."""
        ...

    def stop(self) -> Iterator[Chunk]:
        """Yield the last deltas."""
        ...

    def whole(self) -> Chunk:
        """Return the closed block."""
        ...


@define
class _Text:
    texts: list[str] = field(factory=list)

    def start(self) -> Chunk:
        return {"type": "text", "text": ""}

    def add(self, text: str) -> Chunk:
        self.texts.append(text)
        return {"type": "text_delta", "text": text}

    def stop(self) -> Iterator[Chunk]:
        yield from ()

    def whole(self) -> Chunk:
        return {"type": "text", "text": "".join(self.texts)}


@define
class _Thinking:
    signatures: Signatures
    is_sealed: bool
    texts: list[str] = field(factory=list)
    signature: str = ""

    def start(self) -> Chunk:
        return {"type": "thinking", "thinking": "", "signature": ""}

    def add(self, text: str) -> Chunk | None:
        self.texts.append(text)
        return None if self.is_sealed else {"type": "thinking_delta", "thinking": text}

    def stop(self) -> Iterator[Chunk]:
        text = "".join(self.texts)
        self.signature = self.signatures.seal(text) if self.is_sealed else self.signatures.sign(text)
        yield {"type": "signature_delta", "signature": self.signature}

    def whole(self) -> Chunk:
        text = "" if self.is_sealed else "".join(self.texts)
        return {"type": "thinking", "thinking": text, "signature": self.signature}


@define
class _ToolUse:
    id: str
    name: str
    arguments: PartialObject = field(factory=PartialObject)

    def start(self) -> Chunk:
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": {}}

    def add(self, text: str) -> Chunk | None:
        return _json_delta(self.arguments.push(text))

    def stop(self) -> Iterator[Chunk]:
        if (last := _json_delta(self.arguments.finish())) is not None:
            yield last

    def whole(self) -> Chunk:
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": self.arguments.value()}


def _json_delta(text: str) -> Chunk | None:
    return {"type": "input_json_delta", "partial_json": text} if text else None


class MessageAssembler:
    """The state machine of one message."""

    def __init__(self, answer: Answer, options: MessageOptions) -> None:
        self._answer = answer
        self._options = options
        self._content: list[Chunk] = []
        self._open: _Block | None = None
        self._space = ""  # white space that becomes text only if more text follows
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def opening(self) -> Iterator[Chunk]:
        """Yield the event that comes first."""
        usage = self._usage(Usage(prompt_tokens=self._answer.num_prompt_tokens))
        yield {"type": "message_start", "message": {**self._head(), "content": [], "usage": usage}}

    def push(self, piece: Piece) -> list[Chunk]:
        """Return the events of a piece."""
        block = self._open
        is_text = piece.text and piece.finish_reason is None and not self._options.has_timings
        if is_text and type(block) is _Text:  # the usual case, for every token
            return [{"type": "content_block_delta", "index": len(self._content), "delta": block.add(piece.text)}]
        events = self._push(piece)
        if not self._options.has_timings:
            return list(events)
        measured = timings(self._answer.usage())
        return [{**event, "timings": measured} for event in events]

    def close(self, usage: Usage, details: dict[str, Any] | None) -> list[Chunk]:
        """Return the events that end the stream."""
        events = list(self._finish())
        last = {"type": "message_delta", "delta": self._stop(), "usage": self._usage(usage)}
        return [*events, self._described(last, usage, details), {"type": "message_stop"}]

    def fail(self, error: ErrorAnswer) -> list[Chunk]:
        """Return the event that reports an error."""
        return [error_body(evolve(error, request_id=self._answer.request_id))]

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        """Return the message."""
        for _ in self._finish():
            pass
        message = {**self._head(), "content": self._content, "usage": self._usage(usage)}
        return self._described(message, usage, details)

    def _head(self) -> Chunk:
        return {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            **self._stop(),
        }

    def _stop(self) -> Chunk:
        return {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence, "stop_details": None}

    def _usage(self, usage: Usage) -> Chunk:
        """Return the counts; those of the prompt add up to its length."""
        fresh = usage.prompt_tokens - usage.cached_tokens
        # Claude Code takes a final count of 0 for one that is not given, and adds that of the beginning.
        kept = max(0, min(usage.kept_tokens, fresh - 1)) if self._options.counts_kept else 0
        return {
            "input_tokens": fresh - kept,
            "cache_creation_input_tokens": kept,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
            "service_tier": "standard",
        }

    def _described(self, chunk: Chunk, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        measured = {"timings": timings(usage)} if self._options.has_timings else {}
        return {**chunk, **measured, **({} if details is None else {"enginehouse": details})}

    def _push(self, piece: Piece) -> Iterator[Chunk]:
        if piece.progress is not None:
            yield {"type": "ping", "prompt_progress": progress_object(piece.progress)}
        if piece.reasoning and self._options.thinking != "dropped":
            yield from self._think(piece.reasoning)
        if piece.text:
            yield from self._say(piece.text)
        if piece.call is not None:
            yield from self._call(piece.call)
        if piece.finish_reason is not None:
            self._end(piece)

    def _think(self, text: str) -> Iterator[Chunk]:
        block = self._open
        if not isinstance(block, _Thinking):
            block = _Thinking(self._options.signatures, self._options.thinking == "sealed")
            yield from self._switch(block)
        yield from self._delta(block.add(text))

    def _say(self, text: str) -> Iterator[Chunk]:
        block = self._open
        if not isinstance(block, _Text):
            text, self._space = self._space + text, ""
            if text.isspace():
                self._space = text
                return
            block = _Text()
            yield from self._switch(block)
        yield from self._delta(block.add(text))

    def _call(self, call: CallPiece) -> Iterator[Chunk]:
        block = self._open
        if call.id is not None and call.name is not None:
            block = _ToolUse(f"toolu_{call.id.removeprefix('call_')}", call.name)
            self._space = ""
            yield from self._switch(block)
        assert isinstance(block, _ToolUse), "a call begins with its name"
        yield from self._delta(block.add(call.arguments))

    def _switch(self, block: _Block) -> Iterator[Chunk]:
        """Close the open block and open the next one."""
        yield from self._shut()
        self._open = block
        yield {"type": "content_block_start", "index": len(self._content), "content_block": block.start()}

    def _delta(self, delta: Chunk | None) -> Iterator[Chunk]:
        if delta is not None:
            yield {"type": "content_block_delta", "index": len(self._content), "delta": delta}

    def _shut(self) -> Iterator[Chunk]:
        block, self._open = self._open, None
        if block is not None:
            for delta in block.stop():
                yield from self._delta(delta)
            yield {"type": "content_block_stop", "index": len(self._content)}
            self._content.append(block.whole())

    def _finish(self) -> Iterator[Chunk]:
        """Close what is open; white space alone is text only if there is nothing else."""
        yield from self._shut()
        if self._space and not self._content:
            block = _Text()
            yield from self._switch(block)
            yield from self._delta(block.add(self._space))
            yield from self._shut()

    def _end(self, piece: Piece) -> None:
        reason, stop = piece.finish_reason, piece.stop_reason
        if reason == "tool_calls":
            self._stop_reason = "tool_use"
        elif reason == "length":
            self._stop_reason = "model_context_window_exceeded" if piece.limit == "context" else "max_tokens"
        elif reason == "content_filter":
            self._stop_reason = "refusal"
        elif isinstance(stop, str) and (self._options.has_stop_regex or stop in self._options.stop_sequences):
            self._stop_reason, self._stop_sequence = "stop_sequence", stop
        else:
            self._stop_reason = "end_turn"
