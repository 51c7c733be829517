"""Renders chats and decodes images in separate processes: both may hang or crash, and threads cannot be killed.

Used by the pipeline, on the event loop. Handles deadlines and fairness between templates; rendering itself is
:mod:`enginehouse.pipeline.prompt.templates`.

A template that hangs, fills memory or crashes fails its own request and costs one process, which is replaced. It cannot
block others: one template holds at most all processes but one, and templates whose last run ended that way leave one of
the ready processes to the others. All images together count as one template.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import msgspec

from enginehouse.contract.errors import InvalidRequest, RenderError, ServerOverloaded
from enginehouse.contract.media import MAX_IMAGE_PIXELS
from enginehouse.contract.types import Segment
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.render_messages import (
    CheckTemplate,
    Decode,
    Decoded,
    Failed,
    Ready,
    Remember,
    Render,
    Rendered,
    Reply,
    Request,
    decode_reply,
    encode,
)
from enginehouse.settings.structuring import find_wide_integer
from enginehouse.workers.ipc import FrameTooLarge, frame
from enginehouse.workers.process import ChildProcess, Connection

_MAX_QUARANTINED = 256
_START_TIMEOUT_S = 60.0  # Python itself takes 0.2 s; a busy machine much longer
_CHECK_TIMEOUT_S = 60.0  # a model that is loaded on a busy machine can wait; a refused one has to be loaded again
_EXIT_S = 1.0  # from the end of its link to its exit status, which says why
_MAX_BACKOFF_S = 5.0

_MAX_REMEMBERED = 32
_IMAGES = "\0images"  # in place of a template
# A template that escapes its sandbox must not find keys here.
_ENVIRONMENT = ("HOME", "LANG", "PATH", "TZ")
_ENVIRONMENT_PREFIXES = ("DYLD_", "LC_", "LD_", "PYTHON")

_log = logging.getLogger(__name__)


class Renderer:
    """A small pool of rendering processes.

    Args:
        timeout_s: maximum seconds of :meth:`render` from the call to the result, including the wait for a process.
        max_chars: maximum length of a rendered prompt in characters.
        num_processes: maximum number, at least 2, so that a hanging template leaves one free. Another one is started
            when a request waits that may use it; a server of one model has one.
        memory_bytes: maximum memory that rendering allocates per process (enforced on Linux only).

    Attributes:
        timeout_s: as given.
    """

    def __init__(
        self, timeout_s: float, max_chars: int, num_processes: int = 2, memory_bytes: int = 256 * 1024 * 1024
    ) -> None:
        if num_processes < 2:
            raise ValueError("a renderer needs at least two processes")
        self.timeout_s = timeout_s
        self._max_chars, self._memory_bytes = max_chars, memory_bytes
        self._num_processes, self._num_started = num_processes, 0
        self._idle: list[_RenderProcess] = []
        self._busy: Counter[str] = Counter()  # number of processes held by each template
        self._clients: set[_RenderProcess] = set()
        self._waiting: deque[tuple[str, asyncio.Future[_RenderProcess]]] = deque()
        self._quarantined: dict[str, None] = {}  # templates whose last run hung, exhausted memory or crashed
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start one process and wait until it is ready.

        Raises:
            RuntimeError: it could not be started.
        """
        self._num_started = 1
        await asyncio.wait([self._start_one()], timeout=_START_TIMEOUT_S)
        if not self._clients:
            await self.close()
            raise RuntimeError("the rendering process could not be started")

    async def render(self, prompt: ChatPrompt) -> tuple[Segment, ...]:
        """Return the prompt as segments, see :func:`enginehouse.pipeline.prompt.templates.render`.

        Raises:
            InvalidRequest: the prompt contains a value that cannot be sent to a process.
            RenderError: the template refused, failed, or exceeded a limit.
            ServerOverloaded: no process became free in time, not caused by this template.
        """
        reply = await self._run(prompt.template, lambda client: client.render(prompt), self.timeout_s)
        assert isinstance(reply, Rendered)
        return reply.segments

    async def check(self, template: str) -> None:
        """Compile ``template``, within a minute.

        Raises:
            RenderError: it cannot be compiled.
            ServerOverloaded: no process became free in time.
        """
        await self._run(template, lambda client: client.check(template), max(self.timeout_s, _CHECK_TIMEOUT_S))

    async def decode(self, data: bytes, target_pixels: int, timeout_s: float) -> Decoded:
        """Return the pixels of an image file, see :func:`enginehouse.pipeline.prompt.pixels.decode_image`.

        Args:
            data: the file.
            target_pixels: larger images are shrunk to at most this number.
            timeout_s: maximum seconds, including the wait for a process.

        Raises:
            RenderError: the image is damaged, too large, or exceeded a limit.
            ServerOverloaded: no process became free in time, not caused by images.
        """
        reply = await self._run(_IMAGES, lambda client: client.decode(data, target_pixels), timeout_s, "its decoding")
        assert isinstance(reply, Decoded)
        return reply

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

    async def _run(
        self,
        template: str,
        call: Callable[[_RenderProcess], Awaitable[Reply]],
        timeout_s: float,
        subject: str = "The chat template",
    ) -> Reply:
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                try:
                    reply = await self._attempt(template, call, deadline)
                except _ProcessLost:  # not necessarily caused by the template
                    reply = await self._attempt(template, call, deadline)
        except TimeoutError:
            if template not in self._quarantined:
                raise ServerOverloaded("All rendering processes are busy; try again.") from None
            raise RenderError(f"{subject} took longer than {timeout_s:g} s.", "messages") from None
        except _ProcessLost:
            raise RenderError(f"{subject} crashed the rendering process.", "messages") from None
        if isinstance(reply, Failed):
            raise RenderError(reply.message, reply.param)
        return reply

    async def _attempt(
        self, template: str, call: Callable[[_RenderProcess], Awaitable[Reply]], deadline: asyncio.Timeout
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
                self._judge(template, healthy=healthy)
            self._give_back(client, template, healthy)
        return reply

    def _judge(self, template: str, healthy: bool) -> None:
        if healthy:
            self._quarantined.pop(template, None)
            return
        self._quarantined[template] = None
        if len(self._quarantined) > _MAX_QUARANTINED:
            del self._quarantined[next(iter(self._quarantined))]

    async def _take(self, template: str) -> _RenderProcess:
        """Wait for a process that ``template`` may use; first come, first served among the eligible."""
        if self._closed:
            raise ServerOverloaded("The server is shutting down.")
        if not self._waiting and self._may_use(template) and (client := self._pop_idle()):
            self._busy[template] += 1
            return client
        future: asyncio.Future[_RenderProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append((template, future))
        self._serve_waiting()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._give_back(future.result(), template, healthy=True)
            raise

    def _pop_idle(self) -> _RenderProcess | None:
        while self._idle:
            client = self._idle.pop()
            if client.is_alive:
                return client
            self._start_one(instead_of=client)  # killed by someone else
        return None

    def _may_use(self, template: str) -> bool:
        if template in self._quarantined:
            num_ready = len(self._idle) + self._busy.total()  # without those that are starting
            if sum(self._busy[name] for name in self._quarantined) >= num_ready - 1:
                return False
        return self._busy[template] < self._num_processes - 1

    def _serve_waiting(self) -> None:
        still_waiting: deque[tuple[str, asyncio.Future[_RenderProcess]]] = deque()
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
        limit = self._num_processes - 1  # of one template
        if self._num_started < self._num_processes and any(self._busy[name] < limit for name, _ in still_waiting):
            self._num_started += 1
            self._start_one()

    def _give_back(self, client: _RenderProcess, template: str, healthy: bool) -> None:
        self._busy[template] -= 1
        if not self._busy[template]:
            del self._busy[template]
        if healthy:
            self._idle.append(client)
        elif not self._closed:
            self._start_one(instead_of=client)
        self._serve_waiting()

    def _start_one(self, instead_of: _RenderProcess | None = None) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._replace(instead_of))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return task

    async def _replace(self, old: _RenderProcess | None) -> None:
        """Kill ``old`` and start a process; retry with increasing delays until it succeeds."""
        if old is not None:
            await old.kill()
            self._clients.discard(old)
        backoff_s = 0.1
        while not self._closed:
            try:
                async with asyncio.timeout(_START_TIMEOUT_S):
                    client = await _RenderProcess.open(self._max_chars, self._memory_bytes)
                break
            except (OSError, _ProcessLost, TimeoutError) as error:
                _log.error("a rendering process could not be started: %r", error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        else:
            return
        self._clients.add(client)
        self._idle.append(client)
        self._serve_waiting()


class _ProcessLost(Exception):
    """The process ended or sent something that is not a reply."""


class _RenderProcess:
    """One rendering process. It has at most one request at a time. Create one with :meth:`open`.

    Args:
        max_chars: maximum length of a rendered prompt in characters.
        memory_bytes: maximum memory that rendering may allocate.

    Attributes:
        is_idle: the process waits for a request. False from the sending of a request until its reply: if anything fails
            in between, the process must be killed. A failure before sending does not affect the process.
    """

    def __init__(self, max_chars: int, memory_bytes: int) -> None:
        self._process = ChildProcess(_command(max_chars, memory_bytes), _environment(), own_session=False)
        # A character takes at most 4 bytes, a segment of at least one character at most 8 more.
        max_reply_bytes = max(12 * max_chars, 3 * MAX_IMAGE_PIXELS) + 65536
        self._connection: Connection[Request, Reply] = Connection(
            _pack, decode_reply, self._take, self._on_lost, max_reply_bytes
        )
        self._reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._keys: dict[tuple[str, tuple[str, ...]], int] = {}
        self.is_idle = True

    @classmethod
    async def open(cls, max_chars: int, memory_bytes: int) -> _RenderProcess:
        """Start a process and wait until it is ready.

        Raises:
            _ProcessLost: it ended at once.
            OSError: it could not be started.
        """
        client = cls(max_chars, memory_bytes)
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(client.kill)
            try:
                await client._connection.open(client._process.socket)
                if not isinstance(await client._reply, Ready):
                    raise _ProcessLost("its first message is not Ready")
            except _ProcessLost as error:
                await asyncio.wait([client._process.ended], timeout=_EXIT_S)
                await client.kill()
                raise _ProcessLost(f"{error}; its {client._process.ended.result().text}") from error
            undo.pop_all()
        return client

    @property
    def is_alive(self) -> bool:
        """True if the process runs, as far as the event loop knows."""
        return self._connection.is_open and not self._process.ended.done()

    async def render(self, prompt: ChatPrompt) -> Reply:
        """Send a prompt and wait for its reply.

        Raises:
            InvalidRequest: the prompt contains a value that cannot be sent; the process is not affected.
            _ProcessLost: the process ended.
        """
        parts = prompt.template, prompt.special_tokens
        try:
            if parts not in self._keys:
                forget = len(self._keys) >= _MAX_REMEMBERED
                key = 0 if forget else len(self._keys)
                self._connection.send(Remember(key, *parts, forget))
                if forget:
                    self._keys.clear()
                self._keys[parts] = key
            small = msgspec.structs.replace(prompt, template="", special_tokens=())
            return await self._exchange(Render(self._keys[parts], small))
        except (OverflowError, RecursionError, UnicodeEncodeError, FrameTooLarge) as error:
            raise _refusal(prompt, error) from error

    async def check(self, template: str) -> Reply:
        """Have the process compile a template. Raises _ProcessLost."""
        return await self._exchange(CheckTemplate(template))

    async def decode(self, data: bytes, target_pixels: int) -> Reply:
        """Have the process decode an image file. Raises RenderError if it cannot be sent, and _ProcessLost."""
        try:
            return await self._exchange(Decode(data, target_pixels))
        except FrameTooLarge as error:
            raise RenderError(f"it is too large to be decoded: {error}") from error

    async def kill(self) -> None:
        """End the process at once and reap it; idempotent."""
        self._process.kill()
        self._connection.abort()
        await asyncio.wait([self._process.ended])

    async def _exchange(self, request: Render | CheckTemplate | Decode) -> Reply:
        if not self._connection.is_open:
            self.is_idle = False
            raise _ProcessLost
        self._reply = asyncio.get_running_loop().create_future()
        self._connection.send(request)
        self.is_idle = False
        reply = await self._reply
        self.is_idle = True
        return reply

    def _take(self, reply: Reply) -> None:
        if self._reply.done():  # it was not asked
            self._connection.abort()
        else:
            self._reply.set_result(reply)

    def _on_lost(self, reason: str | None) -> None:
        if not self._reply.done():
            self._reply.set_exception(_ProcessLost(reason or "it closed its link"))


def _pack(message: Request) -> bytes:
    return frame(encode(message))


def _refusal(prompt: ChatPrompt, error: Exception) -> InvalidRequest:
    """Return the error for a prompt that cannot be encoded; ``param`` is the field of the invalid value."""
    if isinstance(error, OverflowError):
        for name, value in prompt.extra.items():
            param = name if name == "tools" else f"chat_template_kwargs.{name}"
            if (found := find_wide_integer(value, param)) is not None:
                path, number = found
                return InvalidRequest(f"{path}: {number} does not fit into 64 bits; write it as a string", param)
    if isinstance(error, RecursionError):
        return InvalidRequest("The chat is nested too deeply to be rendered.", "messages")
    if isinstance(error, FrameTooLarge):
        return InvalidRequest(f"The chat is too large to be rendered: {error}.", "messages")
    return InvalidRequest("The chat holds a text or number that cannot be encoded.", "messages")


def _command(max_chars: int, memory_bytes: int) -> list[str]:
    # -P: do not import from the current directory
    program = [sys.executable, "-P", "-m", "enginehouse.pipeline.prompt.render_process"]
    return [*program, str(max_chars), str(memory_bytes)]


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
