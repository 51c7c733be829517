"""Core's engine over any runner, without a worker: it steps on the event loop's own thread, while a client reads.

For contract suites that test a runner through an engine. Requests that are read at the same time share a batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import msgspec

from enginehouse.contract.backend import Runner
from enginehouse.contract.engine import EngineStream
from enginehouse.contract.errors import EnginehouseError, InvalidRequest
from enginehouse.contract.sampler import SamplerPlugin
from enginehouse.contract.structured import StructuredDecoder
from enginehouse.contract.types import EngineRequest, EngineSettings, EngineStats, Event, RequestFinished, Segment
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.text.segments import encode_segments

__all__ = ["InlineEngine"]


class InlineEngine:
    """Implements :class:`enginehouse.contract.engine.Engine`.

    Attributes:
        runner: the runner of its model.
    """

    def __init__(
        self,
        runner: Runner,
        samplers: Mapping[str, SamplerPlugin] | None = None,
        decoders: Iterable[StructuredDecoder] = (),
        settings: EngineSettings | None = None,
    ) -> None:
        self.runner = runner
        self._tokenizer = runner.tokenizer
        self._engine = StepEngine(runner, settings or EngineSettings(slots=4), samplers or {}, decoders)
        self._generations: dict[str, _InlineStream] = {}
        self.info = msgspec.structs.replace(runner.info, engine=self._engine.capabilities)

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Check and queue a request."""
        if request.token_ids is not None:
            token_ids = list(request.token_ids)
        else:
            token_ids = encode_segments(self._tokenizer, request.segments, request.add_special)
        self._engine.check(request, len(token_ids))
        generation = _InlineStream(self, request.request_id, len(token_ids))
        self._engine.add(request, token_ids)
        self._generations[request.request_id] = generation
        return generation

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Tokenize as ``submit`` does."""
        return encode_segments(self._tokenizer, segments, add_special)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return b"".join(await self.pieces(token_ids)).decode("utf-8", "replace")

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id."""
        if not all(0 <= token_id < self._tokenizer.vocab_size for token_id in token_ids):
            raise InvalidRequest("token ids must be in the vocabulary", "tokens")
        return [self._tokenizer.token_bytes[token_id] for token_id in token_ids]

    async def stats(self) -> EngineStats:
        """Return the engine's statistics."""
        return self._engine.stats()

    async def close(self) -> None:
        """Stop, and close the runner."""
        self._deliver(self._engine.close())

    def step(self) -> None:
        """Run one step; its output is queued in the generations."""
        self._deliver(self._engine.step())

    def cancel(self, request_id: str) -> None:
        """Cancel a request and drop it."""
        if self._generations.pop(request_id, None) is not None:
            self._engine.cancel(request_id)

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._generations.pop(request_id, None)

    def _deliver(self, outputs: Iterable[tuple[str, Event | EnginehouseError]]) -> None:
        for request_id, output in outputs:
            if generation := self._generations.get(request_id):
                generation.waiting.append(output)


class _InlineStream:
    """One request; a reader that finds no events steps the engine."""

    def __init__(self, engine: InlineEngine, request_id: str, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.prompt_token_ids = None
        self.waiting: list[Event | EnginehouseError] = []
        self._engine = engine
        self._request_id = request_id
        self._is_ended = False

    @property
    def num_waiting_events(self) -> int:
        """Number of outputs that are not read yet."""
        return len(self.waiting)

    def cancel(self) -> None:
        """Stop generating."""
        self._is_ended = True
        self._engine.cancel(self._request_id)

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Iterate over batches of events."""
        while not self._is_ended:
            waiting, self.waiting = self.waiting, []
            events: list[Event] = []
            for output in waiting:
                if isinstance(output, EnginehouseError):
                    self._end()
                    raise output
                events.append(output)
            if not events:
                self._engine.step()
                await asyncio.sleep(0)  # let the other readers consume their events
                continue
            if isinstance(events[-1], RequestFinished):
                self._end()
            yield events

    def _end(self) -> None:
        self._is_ended = True
        self._engine.forget(self._request_id)
