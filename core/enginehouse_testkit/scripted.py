"""The engine ``scripted``: replays a JSON file (see ``script``), for tests of all components above the engine.

A configuration selects it with ``backend = "scripted"`` and ``source = "file.json"``. Every choice of every request
gets the same tokens, unless the script has replies to prompts. Token ids 0 to 255 are single bytes; each further text
or bytes of the script has an id from 256 on. A prompt has one token per UTF-8 byte and does not affect the answer
otherwise. Text, stop strings, token limits, slots and cancellation behave as in the real engine, because the text goes
through the same :class:`enginehouse.engine.text.text_stream.TextStream`; sampling parameters have no effect.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from attrs import define, field, frozen
from attrs.validators import ge, gt, optional

from enginehouse.contract.backend import Match, MemoryEstimate, ModelSource, Probe, Progress
from enginehouse.contract.engine import EngineStream
from enginehouse.contract.errors import (
    ContextLengthExceeded,
    EngineDead,
    EnginehouseError,
    InvalidRequest,
    Overloaded,
    UnsupportedParameter,
)
from enginehouse.contract.hookspecs import API_VERSION
from enginehouse.contract.types import (
    EngineCapabilities,
    EngineRequest,
    EngineStats,
    Event,
    ModelInfo,
    Segment,
)
from enginehouse_testkit.replay import Replay, Tape
from enginehouse_testkit.script import Script, read_script

__all__ = ["ScriptedBackend", "ScriptedEngine", "ScriptedOptions"]


@frozen(kw_only=True)
class ScriptedOptions:
    """Settings of a scripted model. At most ``max_queue`` requests wait for one of ``slots``."""

    context: int | None = field(default=None, validator=optional(gt(0)))
    slots: int = field(default=64, validator=gt(0))
    max_queue: int = field(default=128, validator=ge(0))


class ScriptedBackend:
    """The backend ``scripted``."""

    name = "scripted"
    api_version = API_VERSION
    options: type[Any] = ScriptedOptions
    opens: Literal["model", "engine"] = "engine"

    def probe(self) -> Probe:
        """Report that it is always available."""
        return Probe(available=True, devices=("cpu",))

    def match(self, source: ModelSource) -> Match:
        """Accept only JSON files."""
        is_script = source.path is not None and source.path.suffix == ".json"
        return Match(1.0, "a script") if is_script else Match(0.0, "not a .json file")

    def estimate(self, source: ModelSource, options: Any) -> MemoryEstimate:
        """Report no memory use."""
        return MemoryEstimate(weights_bytes=0, kv_bytes_per_token=0, total_bytes=0)

    def open(self, source: ModelSource, options: Any, progress: Progress) -> ScriptedEngine:
        """Read the script and return the engine."""
        progress(0.0, "reading the script")
        return ScriptedEngine(read_script(source), options)


class ScriptedEngine:
    """Implements :class:`enginehouse.contract.engine.Engine` by replaying one script for every request."""

    def __init__(self, script: Script, options: ScriptedOptions | None = None) -> None:
        options = options or ScriptedOptions()
        self.tape = Tape.of(script)
        self.slots = _Slots(options.slots, options.max_queue)
        self.info = ModelInfo(
            backend="scripted",
            max_context=options.context or 131_072,
            vocab_size=len(self.tape.token_bytes),
            engine=EngineCapabilities(
                constraint_kinds=("composition",), constraint_problem="a script follows no constraint"
            ),
            metadata={"tokens": str(len(script.tokens))},
        )
        self._open: set[_ScriptedStream] = set()

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Check and queue the request."""
        constraint = request.constraint
        if constraint is not None and constraint.kind != "composition":  # a script may contain a tool call
            raise UnsupportedParameter(f"{constraint.param}: a script follows no constraint.", constraint.param)
        token_ids = request.token_ids
        if token_ids is None:
            token_ids = tuple(await self.tokenize(request.segments, request.add_special))
        elif not all(0 <= token_id < self.info.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be in 0..{self.info.vocab_size - 1}", "prompt")
        if len(token_ids) >= self.info.max_context:
            raise ContextLengthExceeded(len(token_ids), self.info.max_context)
        generation = _ScriptedStream(self, request, token_ids, self.slots.enter())
        self._open.add(generation)
        return generation

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Return one token per UTF-8 byte."""
        return list("".join(segment.text for segment in segments).encode())

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids."""
        return b"".join(await self.pieces(token_ids)).decode("utf-8", "replace")

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id."""
        if not all(0 <= token_id < self.info.vocab_size for token_id in token_ids):
            raise InvalidRequest(f"token ids must be in 0..{self.info.vocab_size - 1}", "tokens")
        return [self.tape.token_bytes[token_id] for token_id in token_ids]

    async def stats(self) -> EngineStats:
        """Return the numbers of waiting and running requests."""
        slots = self.slots
        return EngineStats(num_waiting=len(slots.waiting), num_running=slots.num_running, max_sequences=slots.num_slots)

    async def close(self) -> None:
        """End all running requests."""
        for generation in list(self._open):
            generation.end(EngineDead("the engine was closed"))

    def forget(self, generation: _ScriptedStream) -> None:
        """Drop a generation that has ended."""
        self._open.discard(generation)


@define(eq=False)
class _Slots:
    """Slots in order of arrival. A ticket is a future: True when its slot is free, False when given up."""

    num_slots: int
    max_queue: int
    num_running: int = 0
    waiting: deque[asyncio.Future[bool]] = field(factory=deque)

    def enter(self) -> asyncio.Future[bool]:
        """Return a ticket; raises Overloaded if the queue is full."""
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
        """Return the ticket, whether it had a slot or still waited."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)
            if not ticket.done():  # its waiter may have been cancelled
                ticket.set_result(False)
            return
        while self.waiting:
            following = self.waiting.popleft()
            if not following.done():
                following.set_result(True)
                return
        self.num_running -= 1


class _ScriptedStream:
    """The replay for one request."""

    num_waiting_events = 0

    def __init__(
        self, engine: ScriptedEngine, request: EngineRequest, token_ids: tuple[int, ...], ticket: asyncio.Future[bool]
    ) -> None:
        self.num_prompt_tokens = len(token_ids)
        self.prompt_token_ids = token_ids if request.return_token_ids else None
        self._token_ids = token_ids
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
        """Iterate over batches of events."""
        try:
            await self._ticket
            began = time.perf_counter()
            tape = self._engine.tape.answering(self._token_ids)
            replay = Replay(tape, self._request, self.num_prompt_tokens, self._engine.info.max_context)
            if scored := replay.score(self._token_ids):
                yield scored
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
