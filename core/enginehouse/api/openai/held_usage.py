"""Token counts on the last chunk with content, where a profile wants them there and not in a chunk of their own.

Which chunk is the last one shows when the stream ends, so one chunk is always held back. Wraps the dialect of chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enginehouse.api.openai.answer import Choice
from enginehouse.api.openai.chat_dialect import ChatDialect
from enginehouse.api.openai.choice_parser import Piece
from enginehouse.api.openai.encoding import encode_line

__all__ = ["HeldUsage"]

_EVENT_END = b"}\n\n"


class HeldUsage:
    """The dialect of chats, but usage rides on the last chunk that has something to say, else on the very last one."""

    def __init__(self, dialect: ChatDialect) -> None:
        self._dialect = dialect
        self._held = b""
        self._behind = b""
        self._has_content = False

    def opening(self) -> bytes:
        """As the dialect has it."""
        return self._dialect.opening()

    def event(self, piece: Piece) -> bytes:
        """What may leave now: the chunk before, when this one takes its place as the last with content."""
        event = self._dialect.event(piece)
        has_content = piece.finish_reason is None and piece.scores is None
        if self._has_content and not has_content:
            self._behind += event
            return b""
        ready = self.flush()
        self._held, self._has_content = event, has_content
        return ready

    def flush(self) -> bytes:
        """What was held back, without usage."""
        ready = self._held + self._behind
        self._held = self._behind = b""
        return ready

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """What was held back, with usage."""
        counts = b',"usage":' + encode_line(self._dialect.counts(usage))
        return self._held.removesuffix(_EVENT_END) + counts + _EVENT_END + self._behind

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """As the dialect has it."""
        return self._dialect.whole(choices, usage)
