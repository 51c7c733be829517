"""Calls of the functions of surfaces: directly for our own, for others named, bounded and off the event loop.

A surface of another distribution runs its functions in threads of its own and its coroutines on an event loop of its
own (:mod:`enginehouse.plugins.guard`). What they ask of core runs on core's loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from attrs import evolve, field, frozen

from enginehouse.api.generation.decoding import BodyDecoder, DecodedCall
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.api.http.frames import encode_chunk, encode_json
from enginehouse.contract.errors import PluginFailed
from enginehouse.contract.surface import (
    Answer,
    Assembler,
    Chunk,
    DetachedAssembler,
    GenerationRoute,
    Piece,
    Reply,
    ReplyRoute,
    Surface,
)
from enginehouse.contract.types import GenerateRequest
from enginehouse.contract.usage import Usage
from enginehouse.plugins import Guard, guard_of
from enginehouse.plugins.results import Expectation
from enginehouse.plugins.threads import CoreLoop, OnCoreLoop, PluginLoop
from enginehouse.serving.background import run_in_thread, run_with_plugins

_T = TypeVar("_T")

_ASSEMBLER, _REPLY = Expectation(Assembler), Expectation(Reply)
_CHUNK, _CHUNKS = Expectation(Chunk | bytes), Expectation(Sequence[Chunk | bytes])
_WHOLE = Expectation(Chunk | list[Chunk])
_EARLY = Expectation(Chunk)
_STREAM = "stream of its reply"


@frozen
class SurfaceCalls:
    """The calls of one surface.

    Attributes:
        guard: names the surface.
        is_foreign: it is not our own.
    """

    guard: Guard
    is_foreign: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "is_foreign", self.guard.threads is not None)

    @classmethod
    def of(cls, surface: Surface) -> SurfaceCalls:
        """Return the calls of a registered surface, or of core's own."""
        return cls(guard_of(surface, "surface"))

    async def decode(self, decoder: BodyDecoder[Any], body: bytes, server: ServerAccess) -> DecodedCall[Any]:
        """Decode the body of a request, which runs the validators of its class."""
        if not self.is_foreign:
            return await decoder.read(body, server)
        return await self.guard.run("reading of a body", lambda: decoder.decode(body, server))

    async def requests(self, route: GenerationRoute, call: DecodedCall[Any]) -> Sequence[GenerateRequest] | Reply:
        """Return the requests of a call, or the response to it."""
        if self.guard.loops is None:
            if call.are_foreign:
                made = await run_with_plugins(True, lambda: route.requests(call))
            else:
                made = await run_in_thread(call.is_large, lambda: route.requests(call))
            return await made if isinstance(made, Awaitable) else made
        seen = _from_elsewhere(call)
        found: Any = await self.ask("requests", lambda: route.requests(seen))
        if isinstance(found, Awaitable):
            waiting, loop = found, self.guard.loops.choose("requests")
            found = await self.guard.run_async("requests", lambda: waiting, loop)
            if isinstance(found, Reply):
                return self._reply(found, "requests", route.requests, loop)
        if isinstance(found, Reply):
            return self._reply(found, "requests", route.requests, self.guard.loops.choose("requests"))
        if not isinstance(found, Sequence) or not found or not all(isinstance(one, GenerateRequest) for one in found):
            what = f"gave {type(found).__name__}, a Reply or a sequence of GenerateRequest was expected"
            raise self.guard.mistake("requests", what, route.requests)
        return found

    async def assemble(self, route: GenerationRoute, call: DecodedCall[Any], answer: Answer) -> Assembler:
        """Return the writer of a response."""
        seen = _from_elsewhere(call) if self.is_foreign else call
        assembler = await self.guard.run_async("assemble", lambda: route.assemble(seen, answer))
        return self.checked(_ASSEMBLER, assembler, "assemble", route.assemble)

    async def is_detached(self, route: GenerationRoute, call: DecodedCall[Any]) -> bool:
        """Return True if the response goes on when its client disconnects."""
        detached = route.detached
        if detached is None:
            return False
        seen = _from_elsewhere(call) if self.is_foreign else call
        return await self.ask("detached", lambda: detached(seen))

    async def push(self, assembler: Assembler, piece: Piece) -> None:
        """Add a piece to a response that is not streamed."""
        await self.ask("push", lambda: self.chunks("push", assembler.push, piece))

    def chunks(
        self, place: str, function: Callable[..., Iterable[Chunk | bytes]], *arguments: Any
    ) -> Iterable[Chunk | bytes]:
        """Return the chunks that a function of the assembler gives; called by the work of :meth:`ask`."""
        given = function(*arguments)
        if not self.is_foreign:
            return given
        listed: Any = given if isinstance(given, str | bytes | Mapping) else list(given)
        return self.checked(_CHUNKS, listed, place, function)

    def whole(self, assembler: Assembler, usage: Usage, details: dict[str, Any] | None) -> Chunk | list[Chunk]:
        """Return a response that is not streamed; called by the work of :meth:`ask`."""
        return self.checked(_WHOLE, assembler.whole(usage, details), "whole", assembler.whole)

    def early(self, assembler: DetachedAssembler) -> Chunk:
        """Return the first response to a client of a detached one; called by the work of :meth:`ask`."""
        return self.checked(_EARLY, assembler.early(), "early", assembler.early)

    async def handle(self, route: ReplyRoute, call: DecodedCall[Any]) -> Reply:
        """Return the response of a route that does not generate."""
        if self.guard.loops is None:
            return await route.handle(call)
        seen, loop = _from_elsewhere(call), self.guard.loops.choose("handle")
        reply = await self.guard.run_async("handle", lambda: route.handle(seen), loop)
        return self._reply(reply, "handle", route.handle, loop)

    async def ask(self, place: str, work: Callable[[], _T]) -> _T:
        """Return ``work()``, which calls the surface or its assembler.

        Raises:
            PluginFailed: it failed or took too long.
        """
        if not self.is_foreign:
            return work()
        return await self.guard.run(place, lambda: self.guard.call(place, work))

    def checked(
        self, expectation: Expectation, value: _T, place: str, function: Callable[..., Any] | None = None
    ) -> _T:
        """Return a result; that of a foreign surface is checked.

        Raises:
            PluginFailed: its type is wrong.
        """
        if self.is_foreign and (found := expectation.check(value)) is not None:
            raise self.guard.mistake(place, found, function)
        return value

    def _reply(self, given: Reply, place: str, function: Callable[..., Any], loop: PluginLoop) -> Reply:
        """Return a reply of a foreign surface with its body encoded, or its stream read on ``loop``."""
        reply = self.checked(_REPLY, given, place, function)
        if reply.stream is not None:
            return evolve(reply, stream=_ForeignChunks(self, reply.stream, loop))
        with self.guard.calling(place):
            return evolve(reply, body=encode_json(reply.body)) if isinstance(reply.body, dict | list) else reply


@frozen
class _ForeignChunks(AsyncIterator[Chunk | bytes]):
    """The chunks of a stream that another event loop produces."""

    _surface: SurfaceCalls
    _stream: AsyncIterator[Chunk | bytes]
    _loop: PluginLoop

    async def __anext__(self) -> Chunk | bytes:
        chunk = await self._surface.guard.run_async(_STREAM, self._next, self._loop)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def _next(self) -> bytes | None:
        chunk = await anext(self._stream, None)
        return None if chunk is None else encode_chunk(self._surface.checked(_CHUNK, chunk, _STREAM))

    async def aclose(self) -> None:
        """End the stream; a failure is logged."""
        close = getattr(self._stream, "aclose", None)
        try:
            if close is not None:
                await self._surface.guard.run_async(_STREAM, close, self._loop)
        except PluginFailed:
            pass


def _from_elsewhere(call: DecodedCall[Any]) -> DecodedCall[Any]:
    """Return a call whose server may be asked from any thread."""
    return evolve(call, server=cast(ServerAccess, OnCoreLoop(call.server, CoreLoop())))
