"""The state machine that writes a response: opens and closes items, numbers the events, and shows the whole.

The stream and the response that is not streamed are made of the same item objects, so they cannot differ. Items come
strictly one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from enginehouse.contract.surface import CallPiece, Chunk, ErrorAnswer, Piece
from enginehouse.contract.timings import progress_object, timings
from enginehouse.contract.usage import Usage
from enginehouse_responses.options import Dialect
from enginehouse_responses.output import CallItem, CustomCallItem, MessageItem, OutputItem, ReasoningItem, Status
from enginehouse_responses.resource import Resource, usage_of
from enginehouse_responses.tools import Toolbox

__all__ = ["ResponseWriter"]

_encode = msgspec.json.Encoder().encode
_ENDS = {
    "cancelled": "response.incomplete",  # the API has no event of its own
    "completed": "response.completed",
    "failed": "response.failed",
    "incomplete": "response.incomplete",
}
_TEXT_HEAD = b'{"type":"response.output_text.delta","item_id":"%b","output_index":%d,"content_index":0,"delta":'

_RENAMED: dict[Dialect, dict[str, str]] = {
    "openai": {},
    "open_responses": {"reasoning_text.delta": "reasoning.delta", "reasoning_text.done": "reasoning.done"},
}


class ResponseWriter:
    """Writes one response; an assembler of :mod:`enginehouse.contract.surface`.

    Args:
        seal: returns the opaque form of reasoning; None if the client does not ask for it.
        has_logprobs: the client asks for log-probabilities.
        keeps_prompt: the prompt is added to the prefix cache.
        dialect: determines the names of events.
        usage: returns the usage so far, for requests with ``timings_per_token``.

    Attributes:
        is_cancelled: the client has cancelled the response; set before :meth:`fail`.
    """

    def __init__(
        self,
        resource: Resource,
        toolbox: Toolbox,
        *,
        seal: Callable[[str], str] | None = None,
        has_logprobs: bool = False,
        keeps_prompt: bool = True,
        dialect: Dialect = "openai",
        usage: Callable[[], Usage] | None = None,
    ) -> None:
        self.is_cancelled = False
        self.resource = resource
        self._toolbox = toolbox
        self._seal = seal
        self._has_logprobs = has_logprobs
        self._keeps_prompt = keeps_prompt
        self._usage = usage
        self._renamed = _RENAMED[dialect]
        self._items: list[OutputItem] = []
        self._current: OutputItem | None = None
        self._text_head = b""  # of the events of its text
        self._call_index: int | None = None  # of the open call
        self._reason: str | None = None
        self._num_events = 0

    def to_plain(self) -> Chunk:
        """Return the response as it is now."""
        return self.resource.to_plain([item.to_plain() for item in self._items])

    # -- what core calls ---------------------------------------------------------------------------

    def opening(self) -> list[Chunk]:
        """Return the first two events, each with the whole response."""
        kinds = ("created", self.resource.status)
        return [self._event(f"response.{kind}", response=self.to_plain()) for kind in kinds]

    def push(self, piece: Piece) -> Sequence[Chunk | bytes]:
        """Return the events of a piece."""
        item = self._current
        is_text = piece.text and piece.logprobs is None and piece.finish_reason is None
        if is_text and type(item) is MessageItem and self._usage is None:
            return (self._text_event(item, piece.text),)  # the usual case; this runs for every token
        events = self._begin()
        if piece.progress is not None:
            progress = progress_object(piece.progress)
            events.append(self._event("response.in_progress", response=self.to_plain(), prompt_progress=progress))
        if piece.reasoning:
            events += self._add_reasoning(piece.reasoning)
        if piece.call is not None:
            events += self._add_call(piece.call)
        if piece.text or piece.logprobs:
            events += self._add_text(piece)
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
        if self._usage is None:
            return events
        measured = timings(self._usage())
        return [{**event, "timings": measured} for event in events]

    def close(self, usage: Usage, details: dict[str, Any] | None) -> list[Chunk]:
        """Return the events that end the open item and the response."""
        events = [*self._begin(), *self._end_items()]
        self.resource.usage, self.resource.details = usage_of(usage, is_kept=self._keeps_prompt), details
        self.resource.finish(self._reason)
        if self._usage is None:
            return [*events, self._end()]
        self.resource.timings = timings(usage)
        return [*events, {**self._end(), "timings": self.resource.timings}]

    def fail(self, error: ErrorAnswer) -> list[Chunk]:
        """Return the events of a response that breaks off."""
        events = [*self._begin(), *self._close_item("incomplete")]
        if self.is_cancelled:
            self.resource.cancel()
        else:
            self.resource.fail(_code_of(error), error.message)
        return [*events, self._end()]

    def whole(self, usage: Usage, details: dict[str, Any] | None) -> Chunk:
        """Return the response that is not streamed."""
        self.close(usage, details)
        return self.to_plain()

    def _begin(self) -> list[Chunk]:
        """Return the event of a response in the background that is no longer queued."""
        if self.resource.status != "queued":
            return []
        self.resource.status = "in_progress"
        return [self._event("response.in_progress", response=self.to_plain())]

    # -- items -------------------------------------------------------------------------------------

    def _add_text(self, piece: Piece) -> Iterator[Chunk]:
        item = self._current
        if not isinstance(item, MessageItem):
            item = MessageItem(has_logprobs=self._has_logprobs)
            yield from self._open_item(item)
        yield from self._of_item(item.push(piece.text, piece.logprobs))

    def _add_reasoning(self, text: str) -> Iterator[Chunk]:
        item = self._current
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(self._seal)
            yield from self._open_item(item)
        yield from self._of_item(item.push(text))

    def _add_call(self, piece: CallPiece) -> Iterator[Chunk]:
        item = self._current
        if piece.id is not None and piece.name is not None:
            known = self._toolbox.find(piece.name)
            name = piece.name if known is None else known.name
            namespace = None if known is None else known.namespace
            kind = CustomCallItem if known is not None and known.kind == "custom" else CallItem
            item = kind(piece.id, name, namespace)
            yield from self._open_item(item)
            self._call_index = piece.index
        assert isinstance(item, CallItem | CustomCallItem), "a call's fragments follow its beginning"
        assert piece.index == self._call_index, "calls come one after the other"
        yield from self._of_item(item.push(piece.arguments))

    def _open_item(self, item: OutputItem) -> Iterator[Chunk]:
        yield from self._close_item("completed")
        self._items.append(item)
        self._current = item
        self._text_head = _TEXT_HEAD % (item.id.encode(), len(self._items) - 1)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=item.to_plain())
        yield from self._of_item(item.opened())

    def _close_item(self, status: Status) -> Iterator[Chunk]:
        item = self._current
        if item is not None:
            yield from self._of_item(item.close(status))
            self._current = None
            yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item.to_plain())

    def _end_items(self) -> Iterator[Chunk]:
        """Close the last item; a response without any gets an empty message, which clients expect."""
        if not self._items:
            yield from self._open_item(MessageItem(has_logprobs=self._has_logprobs))
        is_cut = self._reason in ("length", "content_filter")
        yield from self._close_item("incomplete" if is_cut else "completed")

    # -- events ------------------------------------------------------------------------------------

    def _of_item(self, events: Iterator[tuple[str, Chunk]]) -> Iterator[Chunk]:
        for kind, members in events:
            assert self._current is not None
            where = {"item_id": self._current.id, "output_index": len(self._items) - 1}
            yield self._event(f"response.{self._renamed.get(kind, kind)}", **where, **members)

    def _text_event(self, item: MessageItem, text: str) -> bytes:
        """Return the event of a text without log-probabilities, as JSON."""
        item.add(text)
        number = self._num_events
        self._num_events = number + 1
        return b'%b%b,"logprobs":[],"sequence_number":%d}' % (self._text_head, _encode(text), number)

    def _end(self) -> Chunk:
        return self._event(_ENDS[self.resource.status], response=self.to_plain())

    def _event(self, kind: str, **members: Any) -> Chunk:
        number = self._num_events
        self._num_events += 1
        return {"type": kind, "sequence_number": number, **members}


def _code_of(error: ErrorAnswer) -> str:
    """Return the error code of a failed response."""
    if error.status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if 400 <= error.status < 500 else "server_error"
