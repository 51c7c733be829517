"""Calls of the functions of surfaces: directly for our own, for others named, bounded and off the event loop.

A surface of another distribution runs its functions in threads of its own and its coroutines on an event loop of its
own (:mod:`enginehouse.plugins.guard`). What they ask of core runs on core's loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from attrs import evolve, field, frozen

from enginehouse.api.generation.decoding import BodyDecoder, Decoded
from enginehouse.api.generation.server_access import ServerAccess
from enginehouse.contract.errors import PluginFailed
from enginehouse.contract.surface import Answer, AnswerRoute, Assembler, Chunk, GenerationRoute, Reply, Surface
from enginehouse.contract.types import GenerateRequest
from enginehouse.plugins import Guard, guard_of
from enginehouse.plugins.plugin_loops import CoreLoop, OnCoreLoop, PluginLoop
from enginehouse.plugins.results import Expectation
from enginehouse.serving.background import run_in_thread, run_with_plugins

_T = TypeVar("_T")

_ASSEMBLER = Expectation(Assembler)


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

    async def decode(self, decoder: BodyDecoder[Any], body: bytes, server: ServerAccess) -> Decoded[Any]:
        """Decode the body of a request, which runs the validators of its class."""
        if not self.is_foreign:
            return await decoder.read(body, server)
        return await self.guard.run("reading of a body", lambda: decoder.decode(body, server))

    async def requests(self, route: GenerationRoute, call: Decoded[Any]) -> Sequence[GenerateRequest] | Reply:
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
                return self._checked(found, "requests", route.requests, loop)
        if isinstance(found, Reply):
            return self._checked(found, "requests", route.requests, self.guard.loops.choose("requests"))
        if not isinstance(found, Sequence) or not found or not all(isinstance(one, GenerateRequest) for one in found):
            what = f"gave {type(found).__name__}, a Reply or a sequence of GenerateRequest was expected"
            raise self.guard.mistake("requests", what, route.requests)
        return found

    async def assemble(self, route: GenerationRoute, call: Decoded[Any], answer: Answer) -> Assembler:
        """Return the writer of a response."""
        seen = _from_elsewhere(call) if self.is_foreign else call
        assembler = await self.guard.run_async("assemble", lambda: route.assemble(seen, answer))
        wrong = _ASSEMBLER.check(assembler) if self.is_foreign else None
        if wrong is not None:
            raise self.guard.mistake("assemble", wrong, route.assemble)
        return assembler

    async def is_detached(self, route: GenerationRoute, call: Decoded[Any]) -> bool:
        """Return True if the response goes on when its client disconnects."""
        detached = route.detached
        return detached is not None and await self.ask("detached", lambda: detached(call))

    async def handle(self, route: AnswerRoute, call: Decoded[Any]) -> Reply:
        """Return the response of a route that does not generate."""
        if self.guard.loops is None:
            return await route.handle(call)
        seen, loop = _from_elsewhere(call), self.guard.loops.choose("handle")
        reply = await self.guard.run_async("handle", lambda: route.handle(seen), loop)
        return self._checked(reply, "handle", route.handle, loop)

    async def ask(self, place: str, work: Callable[[], _T]) -> _T:
        """Return ``work()``, which calls the surface or its assembler.

        Raises:
            PluginFailed: it failed or took too long.
        """
        if not self.is_foreign:
            return work()
        return await self.guard.run(place, lambda: self.guard.call(place, work))

    def _checked(self, reply: Any, place: str, function: Callable[..., Any], loop: PluginLoop) -> Reply:
        """Return a reply whose stream is read on ``loop``."""
        if not isinstance(reply, Reply):
            raise self.guard.mistake(place, f"gave {type(reply).__name__}, a Reply was expected", function)
        return reply if reply.stream is None else evolve(reply, stream=_ForeignChunks(self.guard, reply.stream, loop))


@frozen
class _ForeignChunks(AsyncIterator[Chunk | msgspec.Raw]):
    """The chunks of a stream that another event loop produces."""

    _guard: Guard
    _stream: AsyncIterator[Chunk | msgspec.Raw]
    _loop: PluginLoop

    async def __anext__(self) -> Chunk | msgspec.Raw:
        chunk = await self._guard.run_async("stream of its reply", lambda: anext(self._stream, None), self._loop)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """End the stream; a failure is logged."""
        close = getattr(self._stream, "aclose", None)
        try:
            if close is not None:
                await self._guard.run_async("stream of its reply", close, self._loop)
        except PluginFailed:
            pass


def _from_elsewhere(call: Decoded[Any]) -> Decoded[Any]:
    """Return a call whose server may be asked from any thread."""
    return evolve(call, server=cast(ServerAccess, OnCoreLoop(call.server, CoreLoop())))
