"""One request to the servers: sent to one, retried on the next until the first output arrives, then read to its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import httpx
import msgspec

from enginehouse.contract.engine import Placement
from enginehouse.contract.errors import EngineDead, EnginehouseError, GenerationFailed
from enginehouse.contract.types import Event, RequestFinished
from enginehouse_remote.bodies import Body
from enginehouse_remote.failures import ServerFailed, of_exception, of_response, of_stream
from enginehouse_remote.options import RemoteOptions
from enginehouse_remote.reading import AnswerLimits, pieces_of, read_beginning
from enginehouse_remote.servers import Server, Servers
from enginehouse_remote.sse import read_events
from enginehouse_remote.stream import AnswerStream

__all__ = ["RemoteGeneration"]

_End = EnginehouseError | None


class RemoteGeneration:
    """Implements :class:`enginehouse.contract.engine.EngineStream`.

    A separate task reads the answer, so that :meth:`cancel` closes the connection immediately, independent of
    iteration: a server stops working when its client disconnects.
    """

    def __init__(
        self,
        servers: Servers,
        options: RemoteOptions,
        body: Body,
        *,
        blocks: Sequence[int],
        limits: AnswerLimits,
        new_stream: Callable[[], AnswerStream],
        on_end: Callable[[RemoteGeneration], None],
    ) -> None:
        self.num_prompt_tokens = 0  # reported with the usage, at the end
        self.prompt_token_ids = None
        self.num_waiting_events = 0
        self.placement: Placement | None = None
        self._servers, self._options = servers, options
        self._body, self._new_stream, self._limits = body, new_stream, limits
        self._blocks = blocks
        self._content = msgspec.json.encode(body.data)
        self._began = time.perf_counter()
        self._tried: set[Server] = set()
        self._has_shown = False
        self._arrived: asyncio.Queue[Sequence[Event] | None] = asyncio.Queue()
        self._error: _End = None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="remote request")
        self._task.add_done_callback(lambda _: self._ended(on_end))

    def cancel(self) -> None:
        """Close the connection."""
        self._task.cancel()

    def end(self, error: EnginehouseError) -> None:
        """Close the connection; the iterator raises ``error``."""
        if not self._task.done():
            self._error = error
            self._task.cancel()

    async def __aiter__(self) -> AsyncGenerator[Sequence[Event], None]:
        """Yield batches of events, one batch per read of the connection."""
        try:
            while (events := await self._arrived.get()) is not None:
                self.num_waiting_events -= len(events)
                yield events
            if self._error is not None:
                raise self._error
        finally:
            self.cancel()

    def _arrive(self, events: Sequence[Event]) -> None:
        self.num_waiting_events += len(events)
        self._arrived.put_nowait(events)

    def _ended(self, on_end: Callable[[RemoteGeneration], None]) -> None:
        if self._error is not None:
            self._fail(self._error)
        elif not self.accepted.done():
            self.accepted.cancel()
        self._arrived.put_nowait(None)
        on_end(self)

    async def _run(self) -> None:
        try:
            await self._try_servers()
        except EnginehouseError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - boundary to the library: a request always ends
            self._fail(GenerationFailed(f"The answer could not be read: {repr(error)[:300]}"))

    def _fail(self, error: EnginehouseError) -> None:
        self._error = error
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # marks it as retrieved: a caller that has left does not look

    async def _try_servers(self) -> None:
        last: ServerFailed | None = None
        while (chosen := self._servers.choose(self._tried, self._blocks)) is not None:
            server, placement = chosen
            self._tried.add(server)
            self.placement = placement if len(self._servers.all) > 1 else None
            try:
                with server.used():
                    await self._ask(server)
                return
            except ServerFailed as failed:
                if failed.is_down:
                    self._servers.mark_down(server, failed.final.message)
                if self._has_shown:
                    raise failed.final from failed
                last = failed
        assert last is not None
        if len(self._tried) > 1:
            number = f"none of the {len(self._tried)} servers of this model can serve the request; the last one: "
            raise type(last.final)(number + last.final.message, **last.final.fields) from last
        raise last.final from last

    async def _ask(self, server: Server) -> None:
        """Send the request to one server and read its answer.

        Raises:
            ServerFailed: another server may succeed.
            EnginehouseError: no other server would succeed.
        """
        limit_s = self._options.first_token_timeout_s
        try:
            # One timeout from the request to the first token, regardless of other data; each event resets it.
            async with asyncio.timeout(limit_s) as clock:
                await self._read(server, clock)
        except TimeoutError:
            if self._has_shown:
                limit_s = self._options.idle_timeout_s
            message = f"The server {server.url} sent nothing for {limit_s:g} s."
            raise ServerFailed(EngineDead(message), is_down=False) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise of_exception(error, server.url) from error

    async def _read(self, server: Server, clock: asyncio.Timeout) -> None:
        client, headers = self._servers.client, {"content-type": "application/json", "accept": "text/event-stream"}
        url = server.url + self._body.path
        async with client.stream("POST", url, content=self._content, headers=headers) as response:
            if response.status_code != 200:
                retry_after = response.headers.get("retry-after")
                beginning, adapters = await read_beginning(response), self._body.adapters
                raise of_response(response.status_code, beginning, server.url, retry_after, adapters)
            self._servers.mark_up(server)
            if not self.accepted.done():
                self.accepted.set_result(None)
            await self._read_stream(response, server, clock)

    async def _read_stream(self, response: httpx.Response, server: Server, clock: asyncio.Timeout) -> None:
        stream, began, num_events = self._new_stream(), 0.0, 0
        chunks = read_events(pieces_of(response, self._limits.max_bytes))
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if "error" in chunk:
                    raise of_stream(chunk["error"], server.url)
                events = stream.push(chunk)
                if not events:
                    continue
                num_events += len(events)
                if num_events > self._limits.max_events:
                    message = f"The answer of the server {server.url} has more tokens than were requested."
                    raise GenerationFailed(message)
                if not self._has_shown:
                    self._has_shown, began = True, time.perf_counter()
                clock.reschedule(asyncio.get_running_loop().time() + self._options.idle_timeout_s)
                self._arrive(events)
        ended = time.perf_counter()
        began = began or ended
        try:
            events = stream.finish(prefill_s=began - self._began, decode_s=ended - began)
        except EngineDead as error:
            raise ServerFailed(error, is_down=False) from error
        summary = events[-1]
        assert isinstance(summary, RequestFinished)
        self.num_prompt_tokens = summary.usage.prompt_tokens
        self._arrive(events)
