"""From engine events to what each choice says: the one assembly behind streamed and whole answers.

An :class:`Assembly` turns events into :class:`Piece` values. A stream encodes each piece as it comes; a
whole answer folds the same pieces into :class:`Choice` values. Wire formats are in ``chat`` and
``completions``, which implement :class:`Dialect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec
from attrs import define, field

from enginehouse.api.access import AccessRecord
from enginehouse.errors import GenerationFailed
from enginehouse.pipeline import RunningRequest
from enginehouse.types import ChoiceFinished, Event, FinishReason, RequestFinished, TextDelta, TokenLogprob

__all__ = ["Assembly", "Choice", "Dialect", "Piece", "event_batches"]


class Piece(msgspec.Struct, gc=False):
    """What one event adds to one choice: text with its log-probabilities, or the end."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None


@define
class Choice:
    """A whole choice: the sum of its pieces."""

    index: int
    texts: list[str] = field(factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        """Append ``piece``."""
        self.texts.append(piece.text)
        if piece.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *piece.logprobs]
        self.finish_reason = self.finish_reason or piece.finish_reason

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self.texts)


class Dialect(Protocol):
    """How one endpoint writes an answer; made per request."""

    def opening(self) -> bytes:
        """Events before the first piece, perhaps none."""
        ...

    def event(self, piece: Piece) -> bytes:
        """One server-sent event."""
        ...

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """The event with the token counts."""
        ...

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> bytes:
        """The JSON of an answer that is not streamed."""
        ...


@define
class Assembly:
    """What all prompts of one API call have said; choice ``n`` of prompt ``p`` has index ``p * num_choices + n``."""

    num_prompts: int
    num_choices: int
    record: AccessRecord
    finished: list[RequestFinished] = field(factory=list)
    _reasons: list[str] = field(factory=list)

    def push(self, prompt: int, event: Event) -> Piece | None:
        """The piece that ``event`` adds; None when it adds nothing to show."""
        if type(event) is TextDelta:
            if not event.text and not event.logprobs:
                return None
            return Piece(prompt * self.num_choices + event.choice, event.text, event.logprobs)
        if isinstance(event, ChoiceFinished):
            self._reasons.append(event.finish_reason)
            return Piece(prompt * self.num_choices + event.choice, finish_reason=event.finish_reason)
        assert isinstance(event, RequestFinished)
        self.finished.append(event)
        return None

    async def fold(self, batches: AsyncIterator[tuple[int, Sequence[Event]]]) -> list[Choice]:
        """Every choice as a whole, when the last one has ended."""
        choices = [Choice(index) for index in range(self.num_prompts * self.num_choices)]
        async for prompt, events in batches:
            for event in events:
                piece = self.push(prompt, event)
                if piece is not None:
                    self.record.mark_first_token()
                    choices[piece.index].add(piece)
        return choices

    def complete(self) -> None:
        """Check that everything has ended and note it in the access record."""
        if len(self.finished) < self.num_prompts or len(self._reasons) < self.num_prompts * self.num_choices:
            raise GenerationFailed("The engine ended the request before it was complete.")
        record, finished = self.record, self.finished
        record.outcome = ",".join(sorted(set(self._reasons)))
        record.prompt_tokens = sum(event.num_prompt_tokens for event in finished)
        record.cached_tokens = sum(event.num_cached_tokens for event in finished)
        record.completion_tokens = sum(event.num_completion_tokens for event in finished)
        record.queue_s = max(event.queue_s for event in finished)
        record.prefill_s = max(event.prefill_s for event in finished)
        record.decode_s = max(event.decode_s for event in finished)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object; prompt tokens count once per prompt."""
        prompt = sum(event.num_prompt_tokens for event in self.finished)
        completion = sum(event.num_completion_tokens for event in self.finished)
        cached = sum(event.num_cached_tokens for event in self.finished)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


async def event_batches(running: Sequence[RunningRequest]) -> AsyncIterator[tuple[int, Sequence[Event]]]:
    """Batches of events of one or several requests as they come, each with the index of its request."""
    if len(running) == 1:
        async for batch in running[0].generation:
            yield 0, batch
        return
    arrived: asyncio.Queue[tuple[int, Sequence[Event]] | BaseException | None] = asyncio.Queue()

    async def collect(index: int) -> None:
        try:
            async for batch in running[index].generation:
                arrived.put_nowait((index, batch))
            arrived.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again where the batches are read
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(collect(index)) for index in range(len(running))]
    try:
        num_open = len(tasks)
        while num_open:
            item = await arrived.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
