"""Server side of one rendering process: start it, exchange a request for a reply, kill it."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec

from enginehouse.contract.errors import InvalidRequest
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.render_messages import (
    CheckTemplate,
    Ready,
    Remember,
    Render,
    Reply,
    Request,
    decode_reply,
    encode,
)
from enginehouse.settings.structuring import find_wide_integer
from enginehouse.workers.ipc import FrameTooLarge, frame
from enginehouse.workers.process import ChildProcess, Connection

__all__ = ["ProcessLost", "RenderClient"]

_MAX_REMEMBERED = 32
# A template that escapes its sandbox must not find keys here.
_ENVIRONMENT = ("HOME", "LANG", "PATH", "TZ")
_ENVIRONMENT_PREFIXES = ("DYLD_", "LC_", "LD_", "PYTHON")


class ProcessLost(Exception):
    """The process ended or sent something that is not a reply."""


class RenderClient:
    """One rendering process. It has at most one request at a time. Create one with :meth:`open`.

    Args:
        max_chars: maximum length of a rendered prompt in characters.
        memory_bytes: maximum memory that rendering may allocate.

    Attributes:
        is_idle: the process waits for a request. False from the sending of a request until its reply: if anything fails
            in between, the process must be killed. A failure before sending does not affect the process.
    """

    def __init__(self, max_chars: int, memory_bytes: int) -> None:
        self._process = ChildProcess(_command(max_chars, memory_bytes), _environment())
        # A character takes at most 4 bytes, a segment of at least one character at most 8 more.
        max_reply_bytes = 12 * max_chars + 65536
        self._connection: Connection[Request, Reply] = Connection(
            _pack, decode_reply, self._take, self._on_lost, max_reply_bytes
        )
        self._reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._keys: dict[tuple[str, tuple[str, ...]], int] = {}
        self.is_idle = True

    @classmethod
    async def open(cls, max_chars: int, memory_bytes: int) -> RenderClient:
        """Start a process and wait until it is ready.

        Raises:
            ProcessLost: it ended at once.
            OSError: it could not be started.
        """
        client = cls(max_chars, memory_bytes)
        try:
            await client._connection.open(client._process.socket)
            if not isinstance(await client._reply, Ready):
                raise ProcessLost("its first message is not Ready")
        except BaseException:
            await client.kill()
            raise
        return client

    @property
    def is_alive(self) -> bool:
        """True if the process runs, as far as the event loop knows."""
        return self._connection.is_open and not self._process.ended.done()

    async def render(self, prompt: ChatPrompt) -> Reply:
        """Send a prompt and wait for its reply.

        Raises:
            InvalidRequest: the prompt contains a value that cannot be sent; the process is not affected.
            ProcessLost: the process ended.
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
        """Have the process compile a template. Raises ProcessLost."""
        return await self._exchange(CheckTemplate(template))

    async def kill(self) -> None:
        """End the process at once and reap it; idempotent."""
        self._process.kill()
        self._connection.abort()
        await asyncio.wait([self._process.ended])

    async def _exchange(self, request: Render | CheckTemplate) -> Reply:
        if not self._connection.is_open:
            self.is_idle = False
            raise ProcessLost
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
            self._reply.set_exception(ProcessLost(reason or "it closed its link"))


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
