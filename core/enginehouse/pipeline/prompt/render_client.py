"""Server side of one rendering process: start it, exchange a request for a reply, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

import msgspec

from enginehouse.contract.errors import InvalidRequest
from enginehouse.pipeline.prompt.chat_prompt import ChatPrompt
from enginehouse.pipeline.prompt.render_frames import HEADER_BYTES, CheckTemplate, Ready, Remember, Render, Reply, pack
from enginehouse.settings.structuring import find_wide_integer

__all__ = ["ProcessLost", "RenderClient"]

_MAX_REMEMBERED = 32
# A template that escapes its sandbox must not find keys here.
_ENVIRONMENT = ("HOME", "LANG", "PATH", "SYSTEMROOT", "TZ")
_ENVIRONMENT_PREFIXES = ("DYLD_", "LC_", "LD_", "PYTHON")

_decode = msgspec.msgpack.Decoder(Reply).decode


class ProcessLost(Exception):
    """The process ended or wrote something that is not a frame."""


class RenderClient:
    """One rendering process. It has at most one request at a time.

    Attributes:
        is_idle: the process waits for a request. False from the sending of a request until its reply: if anything fails
            in between, the process must be killed. A failure before sending does not affect the process.

    The process is an ordinary :class:`subprocess.Popen`: asyncio's own needs a thread per child to notice its
    end, and loses the exit status when that races with a signal.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        replies: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
        max_reply_bytes: int,
    ) -> None:
        self._process = process
        self._requests, self._replies = requests, replies
        self._max_reply_bytes = max_reply_bytes
        self._keys: dict[tuple[str, tuple[str, ...]], int] = {}
        self.is_idle = True

    @classmethod
    async def open(cls, max_chars: int, memory_bytes: int) -> RenderClient:
        """Start a process and wait until it is ready.

        Raises:
            ProcessLost: it ended at once.
            OSError: it could not be started.
        """
        process, ours = _start(max_chars, memory_bytes)
        try:
            replies, requests = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise
        # A character takes at most 4 bytes, a segment of at least one character at most 8 more.
        client = cls(process, replies, requests, 12 * max_chars + 65536)
        try:
            if not isinstance(await client._receive(), Ready):
                raise ProcessLost
        except BaseException:
            await client.kill()
            raise
        return client

    @property
    def is_alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    async def render(self, prompt: ChatPrompt) -> Reply:
        """Send a prompt and wait for its reply.

        Raises:
            InvalidRequest: the prompt contains a value that cannot be sent; the process is not affected.
            ProcessLost: the process ended.
        """
        parts = prompt.template, prompt.special_tokens
        known = self._keys.get(parts)
        forget = known is None and len(self._keys) >= _MAX_REMEMBERED
        key = known if known is not None else 0 if forget else len(self._keys)
        small = msgspec.structs.replace(prompt, template="", special_tokens=())
        try:
            frames = pack(Render(key, small))
        except (OverflowError, RecursionError, UnicodeEncodeError) as error:
            raise _refusal(prompt, error) from error
        if known is None:
            frames = pack(Remember(key, *parts, forget)) + frames
            if forget:
                self._keys.clear()
            self._keys[parts] = key
        return await self._exchange(frames)

    async def check(self, template: str) -> Reply:
        """Have the process compile a template. Raises ProcessLost."""
        return await self._exchange(pack(CheckTemplate(template)))

    async def kill(self) -> None:
        """End the process at once and reap it; idempotent."""
        self._process.kill()
        self._requests.close()
        with contextlib.suppress(OSError):
            await self._requests.wait_closed()
        await asyncio.to_thread(self._process.wait)

    async def _exchange(self, frames: bytes) -> Reply:
        self.is_idle = False
        try:
            self._requests.write(frames)
            await self._requests.drain()
        except OSError as error:
            raise ProcessLost from error
        reply = await self._receive()
        self.is_idle = True
        return reply

    async def _receive(self) -> Reply:
        try:
            size = int.from_bytes(await self._replies.readexactly(HEADER_BYTES), "big")
            if size > self._max_reply_bytes:
                raise ProcessLost
            reply: Reply = _decode(await self._replies.readexactly(size))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise ProcessLost from error
        return reply


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
    return InvalidRequest("The chat holds a text or number that cannot be encoded.", "messages")


def _start(max_chars: int, memory_bytes: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the process; return it and the server's end of its standard input and output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    command = [
        sys.executable,
        "-P",
        "-m",
        "enginehouse.pipeline.prompt.render_process",
    ]  # -P: do not import from the current directory
    limits = [str(number) for number in (os.getpid(), max_chars, memory_bytes)]
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command, *limits], stdin=theirs.fileno(), stdout=theirs.fileno(), env=environment
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
