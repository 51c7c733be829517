"""The server's side: an :class:`enginehouse.backend.Engine` whose work happens behind a link.

Lives on the event loop. Each step of the worker is one message and wakes each request in it once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from enginehouse.backend import Progress
from enginehouse.engine.worker.carrier import Carrier, start_carrier
from enginehouse.engine.worker.connection import Connection
from enginehouse.engine.worker.generation import WorkerGeneration
from enginehouse.engine.worker.messages import (
    Accepted,
    CallFailed,
    Cancel,
    Close,
    Detokenize,
    Detokenized,
    Died,
    Failure,
    Figures,
    FromWorker,
    GetStats,
    GetView,
    Load,
    LoadFailed,
    LoadProgress,
    Ready,
    Rejected,
    Stats,
    StepOutputs,
    StopThinking,
    Submit,
    ThinkingStopped,
    Tokenize,
    Tokenized,
    ToWorker,
    View,
)
from enginehouse.errors import EngineDead, EnginehouseError, InvalidRequest, Overloaded
from enginehouse.inspection import EngineFigures, EngineView
from enginehouse.types import EngineRequest, EngineStats, ModelInfo, RequestFinished, Segment

__all__ = ["WorkerEngine"]

# How long a worker may take to close its model before it is killed; it holds nothing that could be lost.
_CLOSE_S = 2.0

# After the link broke: how long to wait for the exit status, which says why. After the process ended: how long
# to wait for what it sent last, in case a process that it started keeps the link open.
_AUTOPSY_S = 0.3

# How long to wait for a killed worker, or for a worker thread, which cannot be killed.
_KILL_S = 1.0

# Bytes that may wait for a worker that does not read; more are refused instead of filling the memory.
_MAX_UNSENT_BYTES = 64 * 1024 * 1024


class WorkerEngine:
    """An engine in a worker. Make one with :meth:`open`.

    Attributes:
        info: the loaded model's.
        died: the reason, once the worker has ended without being asked to.
        figures: what the worker last said that it has counted.
    """

    info: ModelInfo

    def __init__(self, carrier: Carrier, on_progress: Progress) -> None:
        self._loop = asyncio.get_running_loop()
        self._carrier = carrier
        self._on_progress = on_progress
        self._connection = Connection(self._handle, self._on_lost)
        self.figures = EngineFigures()
        self.died: asyncio.Future[EngineDead] = self._loop.create_future()
        self._loaded: asyncio.Future[ModelInfo] = self._loop.create_future()
        self._generations: dict[str, WorkerGeneration] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_numbers = itertools.count()
        self._reason: str | None = None  # the worker's own last words
        self._is_ready = False
        self._is_closing = False
        carrier.ended.add_done_callback(lambda _: self._loop.call_later(_AUTOPSY_S, self._bury))

    # -- life --------------------------------------------------------------------------------------

    @classmethod
    async def open(cls, load: Load, *, isolation: str, python: str | None, on_progress: Progress) -> WorkerEngine:
        """Start a worker and wait until it has loaded the model; cancelling this ends the worker.

        Args:
            load: what to load.
            isolation: ``process`` or ``thread``.
            python: interpreter for the process; None is this one.
            on_progress: called on the event loop while the model loads.

        Raises:
            ModelLoadError, MissingDependency, ConfigError: the worker says why it cannot load the model.
            EngineDead: the worker died while loading.
        """
        carrier = start_carrier(isolation, python)
        engine = cls(carrier, on_progress)
        try:
            await engine._connection.open(carrier.socket)
            engine._connection.send(load)
            engine.info = await engine._loaded
            engine._is_ready = True
        except BaseException:
            carrier.kill()
            await engine.close()
            raise
        return engine

    async def close(self) -> None:
        """Stop; running requests end with EngineDead."""
        self._is_closing = True
        self._end_everything("The server is shutting down.")
        if self._is_ready and self._connection.is_open:
            self._connection.send(Close())
            await self._wait_ended(_CLOSE_S)
        self._carrier.kill()
        self._connection.abort()
        await self._wait_ended(_KILL_S)

    async def _wait_ended(self, timeout_s: float) -> None:
        await asyncio.wait([self._carrier.ended], timeout=timeout_s)

    def _on_lost(self, reason: str | None) -> None:
        """The link has ended: find out why, but not for long."""
        self._reason = self._reason or reason
        if self._carrier.ended.done():
            self._bury()
        else:
            self._carrier.ended.add_done_callback(lambda _: self._bury())
            self._loop.call_later(_AUTOPSY_S, self._bury)

    def _bury(self) -> None:
        """The worker is dead, or useless because its link is: end everything that waits for it."""
        if self._is_closing or self.died.done():
            return
        ended = self._carrier.ended
        reason = self._reason or (ended.result() if ended.done() else "the worker closed its link")
        self._carrier.kill()
        self._connection.abort()
        self.died.set_result(EngineDead(reason))
        self._end_everything(_lost_request(reason) if self._is_ready else reason)

    def _end_everything(self, reason: str) -> None:
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(EngineDead(reason))
        for future in (self._loaded, *self._calls.values()):
            _settle(future, EngineDead(reason))
            if not future.cancelled():
                future.exception()  # counts as seen even when nobody waits for it any more

    # -- requests ----------------------------------------------------------------------------------

    async def submit(self, request: EngineRequest) -> WorkerGeneration:
        """Queue a request; returns when the worker has accepted it.

        Raises:
            RequestError: the request cannot be served.
            Overloaded: the queue is full.
            EngineDead: the worker is gone.
        """
        request_id = request.request_id
        if request_id in self._generations:
            raise InvalidRequest(f"A request with the id {request_id!r} is running.", "request_id")
        generation = WorkerGeneration(self._loop, lambda: self._cancel(request_id))
        self._check_room()
        self._connection.send(Submit(request))
        self._generations[request_id] = generation
        try:
            await generation.wait_accepted()
        except asyncio.CancelledError:
            generation.cancel()
            raise
        return generation

    def _cancel(self, request_id: str) -> None:
        if self._generations.pop(request_id, None) is not None:
            self._connection.send(Cancel(request_id))

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Token ids of a prompt, exactly as ``submit`` would encode it."""
        token_ids: list[int] = await self._call(lambda call: Tokenize(call, tuple(segments), add_special))
        return token_ids

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text of ids; raises InvalidRequest for ids outside the vocabulary."""
        return b"".join(await self.pieces(token_ids)).decode("utf-8", "replace")

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each id; raises InvalidRequest for ids outside the vocabulary."""
        pieces: list[bytes] = await self._call(lambda call: Detokenize(call, tuple(token_ids)))
        return pieces

    async def stats(self) -> EngineStats:
        """What the engine is doing now; answered after the running step."""
        stats: EngineStats = await self._call(GetStats)
        return stats

    async def view(self) -> EngineView:
        """What runs, waits and is kept; answered after the running step."""
        view: EngineView = await self._call(GetView)
        return view

    async def stop_thinking(self, request_id: str) -> int:
        """Close the reasoning of a request's choices by force; returns of how many, 0 when none is thinking."""
        num_choices: int = await self._call(lambda call: StopThinking(call, request_id))
        return num_choices

    async def _call(self, message_for: Callable[[int], ToWorker]) -> Any:
        """Send the message that ``message_for`` makes of a new call number, and wait for its answer."""
        call = next(self._call_numbers)
        self._check_room()
        self._connection.send(message_for(call))
        answer = self._calls[call] = self._loop.create_future()
        try:
            return await answer
        finally:
            del self._calls[call]

    def _check_room(self) -> None:
        if self.died.done():
            raise EngineDead(_lost_request(self.died.result().message))
        if self._is_closing or not self._connection.is_open:
            raise EngineDead(_lost_request("its worker is gone"))
        if self._connection.num_unsent_bytes > _MAX_UNSENT_BYTES:
            raise Overloaded("The model's worker does not take requests at the moment; try again.")

    # -- what comes back ---------------------------------------------------------------------------

    def _handle(self, message: FromWorker) -> None:
        match message:
            case StepOutputs():
                self._distribute(message)
            case Accepted():
                if (generation := self._generations.get(message.request_id)) is not None:
                    generation.accept(message.num_prompt_tokens)
            case Rejected():
                if (generation := self._generations.pop(message.request_id, None)) is not None:
                    generation.fail(message.failure.to_error())
            case Tokenized(call=call, token_ids=answer) | Detokenized(call=call, pieces=answer):
                self._answer(call, answer)
            case Stats():
                self._answer(message.call, message.stats)
            case View():
                self._answer(message.call, message.view)
            case ThinkingStopped():
                self._answer(message.call, message.num_choices)
            case Figures():
                self.figures = message.figures
            case CallFailed():
                self._answer(message.call, message.failure.to_error())
            case LoadProgress():
                self._on_progress(message.share, message.text)
            case Ready():
                _settle(self._loaded, message.info)
            case LoadFailed():
                _settle(self._loaded, message.failure.to_error())
            case Died():
                self._reason = message.reason

    def _distribute(self, message: StepOutputs) -> None:
        """Give each request its events; those of requests that were cancelled meanwhile are dropped."""
        generations = self._generations
        for request_id, output in message.outputs:
            generation = generations.get(request_id)
            if generation is None:
                continue
            if isinstance(output, Failure):
                del generations[request_id]
                generation.fail(output.to_error())
                continue
            if isinstance(output, RequestFinished):
                del generations[request_id]
            generation.push(output)

    def _answer(self, call: int, answer: object) -> None:
        if (future := self._calls.get(call)) is not None:
            _settle(future, answer)


def _lost_request(reason: str) -> str:
    """What a client is told whose request the worker took along."""
    return f"The model stopped working ({reason}); it is being restarted, so try again in a moment."


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    """Give a future its result or error, unless its waiter was cancelled."""
    if future.done():
        return
    if isinstance(outcome, EnginehouseError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
