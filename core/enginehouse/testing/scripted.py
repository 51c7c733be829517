"""The engine ``scripted``: replays a JSON file (see ``script``), for tests of everything above the engine.

A configuration names it with ``backend = "scripted"`` and ``source = "file.json"``. Every choice of every
request gets the same tokens. Token ids 0 to 255 stand for single bytes; each further text or bytes of the
script has an id from 256 on. A prompt has one token per UTF-8 byte, whatever it says. Text, stop strings,
token limits, slots and cancellation behave as in the real engine, because the text goes through the same
:class:`enginehouse.output.text_stream.TextStream`; sampling parameters have no effect.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from attrs import define, field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.backend import Generation, Match, MemoryEstimate, ModelSource, Probe, Progress
from enginehouse.errors import (
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
)
from enginehouse.hookspecs import API_VERSION
from enginehouse.output.text_stream import Piece, TextStream
from enginehouse.testing.script import Script, read_script
from enginehouse.types import (
    ChoiceFinished,
    EngineRequest,
    EngineStats,
    Event,
    ModelInfo,
    RequestFinished,
    Segment,
    TextDelta,
    TokenLogprob,
    TopLogprob,
)

__all__ = ["ScriptedBackend", "ScriptedEngine", "ScriptedOptions"]

_NUM_BYTES = 256


@frozen(kw_only=True)
class ScriptedOptions:
    """Settings of a scripted model. ``max_queue`` requests may wait for one of ``slots``."""

    context: int | None = field(default=None, validator=optional(gt(0)))
    slots: int = field(default=64, validator=gt(0))
    max_queue: int = field(default=128, validator=ge(0))


class ScriptedBackend:
    """The backend ``scripted``."""

    name = "scripted"
    api_version = API_VERSION
    options: type[Any] = ScriptedOptions
    opens: Literal["runner", "engine"] = "engine"

    def probe(self) -> Probe:
        """It runs everywhere."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """Only JSON files are scripts."""
        is_script = source.path is not None and source.path.suffix == ".json"
        return Match(1.0, "a script") if is_script else Match(0.0, "not a .json file")

    def estimate(self, source: ModelSource, options: Any) -> MemoryEstimate:
        """A script needs no memory worth counting."""
        return MemoryEstimate(weights_bytes=0, kv_bytes_per_token=0, total_bytes=0)

    def open(self, source: ModelSource, options: Any, progress: Progress) -> ScriptedEngine:
        """Read the script."""
        progress(0.0, "reading the script")
        return ScriptedEngine(read_script(source), options)


class ScriptedEngine:
    """Implements :class:`enginehouse.backend.Engine` by replaying one script to every request."""

    def __init__(self, script: Script, options: ScriptedOptions | None = None) -> None:
        options = options or ScriptedOptions()
        self.script = script
        self.token_bytes: list[bytes] = [bytes([byte]) for byte in range(_NUM_BYTES)]
        self.entries = tuple(self._entries(script))
        self.slots = _Slots(options.slots, options.max_queue)
        self.info = ModelInfo(
            backend="scripted",
            max_context=options.context or 131_072,
            vocab_size=len(self.token_bytes),
            metadata={"tokens": str(len(script.tokens))},
        )
        self._open: set[_ScriptedGeneration] = set()

    def _entries(self, script: Script) -> Iterator[_Entry]:
        ids: dict[bytes, int] = {}
        for token in script.tokens:
            if token.delay_s is not None or token.error is not None:
                yield _Entry(None, token.delay_s or 0.0, token.error)
                continue
            data = token.text.encode() if token.text is not None else bytes(token.bytes or ())
            if data not in ids:
                ids[data] = len(self.token_bytes)
                self.token_bytes.append(data)
            yield _Entry(ids[data], 0.0, None)

    async def submit(self, request: EngineRequest) -> Generation:
        """Check and queue the request."""
        token_ids = request.token_ids
        if token_ids is None:
            token_ids = tuple(await self.tokenize(request.segments, request.add_special))
        elif not all(0 <= token_id < self.info.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be in 0..{self.info.vocab_size - 1}", "prompt")
        if len(token_ids) >= self.info.max_context:
            raise ContextLengthExceeded(len(token_ids), self.info.max_context)
        generation = _ScriptedGeneration(self, request, len(token_ids), self.slots.enter())
        self._open.add(generation)
        return generation

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """One token per UTF-8 byte."""
        return list("".join(segment.text for segment in segments).encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of the ids."""
        if not all(0 <= token_id < self.info.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be in 0..{self.info.vocab_size - 1}", "tokens")
        return b"".join(self.token_bytes[token_id] for token_id in token_ids).decode("utf-8", "replace")

    async def stats(self) -> EngineStats:
        """Requests that wait and run."""
        slots = self.slots
        return EngineStats(num_waiting=len(slots.waiting), num_running=slots.num_running, max_sequences=slots.num_slots)

    async def close(self) -> None:
        """End everything that runs."""
        for generation in list(self._open):
            generation.end(EngineDead("the engine was closed"))

    def forget(self, generation: _ScriptedGeneration) -> None:
        """Drop a generation that has ended."""
        self._open.discard(generation)


@frozen
class _Entry:
    """A script token in the form in which it is replayed: one of a token id, a delay or an error."""

    token_id: int | None
    delay_s: float
    error: str | None


@define(eq=False)
class _Slots:
    """Slots in order of arrival. A ticket is a future: True when its slot is free, False when given up."""

    num_slots: int
    max_queue: int
    num_running: int = 0
    waiting: deque[asyncio.Future[bool]] = field(factory=deque)

    def enter(self) -> asyncio.Future[bool]:
        """A ticket; raises Overloaded when the queue is full."""
        ticket: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.num_running < self.num_slots:
            self.num_running += 1
            ticket.set_result(True)
        elif len(self.waiting) >= self.max_queue:
            raise Overloaded(f"{len(self.waiting)} requests wait already; try again later.")
        else:
            self.waiting.append(ticket)
        return ticket

    def leave(self, ticket: asyncio.Future[bool]) -> None:
        """Give the ticket back, whether its turn had come or not."""
        if not ticket.done():
            self.waiting.remove(ticket)
            ticket.set_result(False)
        elif self.waiting:
            self.waiting.popleft().set_result(True)
        else:
            self.num_running -= 1


class _ScriptedGeneration:
    """One request's replay."""

    def __init__(
        self, engine: ScriptedEngine, request: EngineRequest, num_prompt_tokens: int, ticket: asyncio.Future[bool]
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._engine = engine
        self._request = request
        self._ticket = ticket
        self._ended = asyncio.Event()
        self._error: EnginehouseError | None = None
        self._submitted = time.perf_counter()

    def cancel(self) -> None:
        """Stop and free the slot."""
        self.end(None)

    def end(self, error: EnginehouseError | None) -> None:
        """Stop, with ``error`` if given; idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._error = error
            self._engine.forget(self)
            self._engine.slots.leave(self._ticket)

    async def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Batches of events."""
        try:
            await self._ticket
            began = time.perf_counter()
            replay = _Replay(self._engine, self._request, self.num_prompt_tokens)
            while not (self._ended.is_set() or replay.is_done):
                if delay_s := replay.take_delay():
                    await self._sleep(delay_s)
                    continue
                if events := replay.step():
                    yield events
                await asyncio.sleep(0)  # other streams run between two steps, as they do in a batch
            if self._error is not None:
                raise self._error
            if not self._ended.is_set():
                yield [replay.summary(began - self._submitted, time.perf_counter() - began)]
        finally:
            self.cancel()

    async def _sleep(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._ended.wait()
        except TimeoutError:
            pass


class _Replay:
    """Where a request stands in the script; makes the events of one step at a time."""

    def __init__(self, engine: ScriptedEngine, request: EngineRequest, num_prompt_tokens: int) -> None:
        self._engine = engine
        self._num_prompt_tokens = num_prompt_tokens
        self._num_logprobs = request.sampling.num_logprobs
        rest = engine.info.max_context - num_prompt_tokens
        self._max_tokens = min(request.stopping.max_tokens or rest, rest)
        stop = request.stopping.stop
        self._streams = {n: TextStream(engine.token_bytes, frozenset(), stop) for n in range(request.num_choices)}
        self._num_tokens: dict[int, int] = {}
        self._position = 0  # in the script; all choices advance together
        self._num_made = 0  # tokens per running choice

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return not self._streams

    def take_delay(self) -> float:
        """Seconds to wait before the next step; 0 is none."""
        entry = self._peek()
        if entry is None or not entry.delay_s:
            return 0.0
        self._position += 1
        return entry.delay_s

    def step(self) -> Sequence[Event]:
        """The events of the next ``tokens_per_step`` tokens, perhaps none; raises GenerationFailed where it says so."""
        events: list[Event] = []
        for _ in range(self._engine.script.tokens_per_step):
            entry = self._peek()
            if entry is None:
                self._finish_all("stop", events)
            elif entry.error is not None:
                if events:
                    break
                raise GenerationFailed(entry.error)
            elif entry.token_id is None:
                break  # a delay
            else:
                self._position += 1
                self._push(entry.token_id, events)
            if self.is_done:
                break
        return events

    def summary(self, queue_s: float, decode_s: float) -> RequestFinished:
        """The last event."""
        return RequestFinished(
            self._num_prompt_tokens, 0, sum(self._num_tokens.values()), queue_s=queue_s, decode_s=decode_s
        )

    def _peek(self) -> _Entry | None:
        entries = self._engine.entries
        if self._position >= len(entries) and self._engine.script.loop:
            self._position = 0
        return entries[self._position] if self._position < len(entries) else None

    def _push(self, token_id: int, events: list[Event]) -> None:
        """Give one token to every running choice."""
        self._num_made += 1
        for choice, stream in list(self._streams.items()):
            piece = stream.push(token_id)
            self._report(choice, piece, events)
            if piece.stop is not None:
                self._finish(choice, "stop", piece.stop, events)
        if self._num_made >= self._max_tokens:
            self._finish_all("length", events)

    def _finish_all(self, reason: Literal["stop", "length"], events: list[Event]) -> None:
        for choice, stream in list(self._streams.items()):
            self._report(choice, stream.flush(), events)
            self._finish(choice, reason, None, events)

    def _finish(
        self, choice: int, reason: Literal["stop", "length"], stop_reason: str | None, events: list[Event]
    ) -> None:
        del self._streams[choice]
        self._num_tokens[choice] = self._num_made
        events.append(ChoiceFinished(choice, reason, self._num_made, stop_reason))

    def _report(self, choice: int, piece: Piece, events: list[Event]) -> None:
        if piece.text or piece.token_ids:
            logprobs = None
            if self._num_logprobs is not None:
                logprobs = tuple(self._logprob(token_id, self._num_logprobs) for token_id in piece.token_ids)
            events.append(TextDelta(choice, piece.text, piece.token_ids, logprobs))

    def _logprob(self, token_id: int, num_top: int) -> TokenLogprob:
        """An invented distribution: the replayed token has probability 1/2, single bytes share the rest."""
        token_bytes = self._engine.token_bytes
        others = [other for other in range(num_top) if other != token_id][: max(0, num_top - 1)]
        ranked = [token_id, *others] if num_top else []
        top = tuple(
            TopLogprob(other, token_bytes[other], -(rank + 1) * math.log(2)) for rank, other in enumerate(ranked)
        )
        return TokenLogprob(token_id, token_bytes[token_id], -math.log(2), top)
