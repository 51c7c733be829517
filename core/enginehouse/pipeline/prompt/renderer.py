"""Renders chats in separate processes, because a template can hang and threads cannot be killed.

Used by the pipeline, on the event loop. Handles deadlines and fairness between templates; rendering itself is
:mod:`enginehouse.pipeline.prompt.templates`.

A template that hangs, fills memory or crashes fails its own request and costs one process, which is replaced. It cannot
block others: one template holds at most all processes but one, and templates whose last run ended that way leave one of
the ready processes to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable

from enginehouse.contract.errors import RenderError, ServerOverloaded
from enginehouse.contract.types import Segment
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.render_client import ProcessLost, RenderClient
from enginehouse.pipeline.prompt.render_messages import Failed, Rendered, Reply

__all__ = ["ChatPrompt", "Renderer"]

_MAX_SUSPECTS = 256
_START_TIMEOUT_S = 60.0  # Python itself takes 0.2 s; a busy machine much longer
_MAX_BACKOFF_S = 5.0

_log = logging.getLogger(__name__)


class Renderer:
    """A small pool of rendering processes.

    Args:
        timeout_s: maximum seconds from the call to the result, including the wait for a process.
        max_chars: maximum length of a rendered prompt in characters.
        num_processes: at least 2, so that a hanging template leaves one free.
        memory_bytes: maximum memory that rendering allocates per process (enforced on Linux only).
    """

    def __init__(
        self, timeout_s: float, max_chars: int, num_processes: int = 2, memory_bytes: int = 256 * 1024 * 1024
    ) -> None:
        if num_processes < 2:
            raise ValueError("a renderer needs at least two processes")
        self._timeout_s = timeout_s
        self._max_chars, self._memory_bytes = max_chars, memory_bytes
        self._num_processes = num_processes
        self._idle: list[RenderClient] = []
        self._busy: Counter[str] = Counter()  # number of processes held by each template
        self._clients: set[RenderClient] = set()
        self._waiting: deque[tuple[str, asyncio.Future[RenderClient]]] = deque()
        self._suspects: dict[str, None] = {}  # templates whose last run hung, exhausted memory or crashed
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start all processes and wait until they are ready.

        Raises:
            RuntimeError: none could be started.
        """
        starts = [self._start_one() for _ in range(self._num_processes)]
        await asyncio.wait(starts, timeout=_START_TIMEOUT_S)
        if not self._clients:
            await self.close()
            raise RuntimeError("the rendering processes could not be started")

    async def render(self, prompt: ChatPrompt) -> tuple[Segment, ...]:
        """Return the prompt as segments, see :func:`enginehouse.pipeline.prompt.templates.render`.

        Raises:
            InvalidRequest: the prompt contains a value that cannot be sent to a process.
            RenderError: the template refused, failed, or exceeded a limit.
            ServerOverloaded: no process became free in time, not caused by this template.
        """
        reply = await self._run(prompt.template, lambda client: client.render(prompt))
        assert isinstance(reply, Rendered)
        return reply.segments

    async def check(self, template: str) -> None:
        """Raise RenderError if ``template`` cannot be compiled."""
        await self._run(template, lambda client: client.check(template))

    async def close(self) -> None:
        """End all processes; waiting calls get ServerOverloaded."""
        self._closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(ServerOverloaded("The server is shutting down."))
        self._waiting.clear()
        await asyncio.gather(*(client.kill() for client in self._clients))
        self._clients.clear()
        self._idle.clear()

    async def _run(self, template: str, call: Callable[[RenderClient], Awaitable[Reply]]) -> Reply:
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                try:
                    reply = await self._attempt(template, call, deadline)
                except ProcessLost:  # not necessarily caused by the template
                    reply = await self._attempt(template, call, deadline)
        except TimeoutError:
            if template not in self._suspects:
                raise ServerOverloaded("All rendering processes are busy; try again.") from None
            raise RenderError(f"The chat template took longer than {self._timeout_s:g} s.", "messages") from None
        except ProcessLost:
            raise RenderError("The chat template crashed the process that rendered it.", "messages") from None
        if isinstance(reply, Failed):
            raise RenderError(reply.message, reply.param)
        return reply

    async def _attempt(
        self, template: str, call: Callable[[RenderClient], Awaitable[Reply]], deadline: asyncio.Timeout
    ) -> Reply:
        client = await self._take(template)
        reply, blame = None, True
        try:
            reply = await call(client)
        except asyncio.CancelledError:  # the running render cannot be stopped otherwise; its caller may have left
            blame = deadline.expired()
            raise
        finally:
            healthy = client.is_idle and not (isinstance(reply, Failed) and reply.exhausted)
            if reply is not None or (blame and not healthy):
                self._judge(template, suspect=not healthy)
            self._give_back(client, template, healthy)
        return reply

    def _judge(self, template: str, suspect: bool) -> None:
        if not suspect:
            self._suspects.pop(template, None)
            return
        self._suspects[template] = None
        if len(self._suspects) > _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]

    async def _take(self, template: str) -> RenderClient:
        """Wait for a process that ``template`` may use; first come, first served among the eligible."""
        if self._closed:
            raise ServerOverloaded("The server is shutting down.")
        if not self._waiting and self._may_use(template) and (client := self._pop_idle()):
            self._busy[template] += 1
            return client
        future: asyncio.Future[RenderClient] = asyncio.get_running_loop().create_future()
        self._waiting.append((template, future))
        self._serve_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give_back(future.result(), template, healthy=True)
            raise

    def _pop_idle(self) -> RenderClient | None:
        while self._idle:
            client = self._idle.pop()
            if client.is_alive:
                return client
            self._start_one(instead_of=client)  # killed by someone else
        return None

    def _may_use(self, template: str) -> bool:
        if template in self._suspects:
            num_ready = len(self._idle) + self._busy.total()  # without those that are starting
            if sum(self._busy[suspect] for suspect in self._suspects) >= num_ready - 1:
                return False
        return self._busy[template] < self._num_processes - 1

    def _serve_waiting(self) -> None:
        still_waiting: deque[tuple[str, asyncio.Future[RenderClient]]] = deque()
        while self._waiting:
            template, future = self._waiting.popleft()
            if future.done():
                continue
            if self._may_use(template) and (client := self._pop_idle()):
                self._busy[template] += 1
                future.set_result(client)
            else:
                still_waiting.append((template, future))
        self._waiting = still_waiting

    def _give_back(self, client: RenderClient, template: str, healthy: bool) -> None:
        self._busy[template] -= 1
        if not self._busy[template]:
            del self._busy[template]
        if healthy:
            self._idle.append(client)
        elif not self._closed:
            self._start_one(instead_of=client)
        self._serve_waiting()

    def _start_one(self, instead_of: RenderClient | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._replace(instead_of))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return task

    async def _replace(self, old: RenderClient | None) -> None:
        """Kill ``old`` and start a process; retry with increasing delays until it succeeds."""
        if old is not None:
            await old.kill()
            self._clients.discard(old)
        backoff_s = 0.1
        while not self._closed:
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    client = await RenderClient.open(self._max_chars, self._memory_bytes)
                break
            except (OSError, ProcessLost, TimeoutError) as error:
                _log.error("a rendering process could not be started: %r", error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        else:
            return
        self._clients.add(client)
        self._idle.append(client)
        self._serve_waiting()
