"""The server's end of one rendering process: start it, exchange a request for a reply, kill it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys

import msgspec

from enginehouse.prompt.chat_prompt import ChatPrompt
from enginehouse.prompt.render_frames import HEADER_BYTES, CheckTemplate, Ready, Remember, Render, Reply, pack

__all__ = ["ProcessLost", "RenderClient"]

_MAX_REMEMBERED = 32
# A template that escaped its sandbox should not find keys here.
_ENVIRONMENT = ("HOME", "LANG", "PATH", "SYSTEMROOT", "TZ")
_ENVIRONMENT_PREFIXES = ("DYLD_", "LC_", "LD_", "PYTHON")

_decode = msgspec.msgpack.Decoder(Reply).decode


class ProcessLost(Exception):
    """The process ended or wrote something that is no frame."""


class RenderClient:
    """One rendering process. It has at most one request at a time; after a failure it must be killed.

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
        """Whether the process runs."""
        return self._process.poll() is None

    async def render(self, prompt: ChatPrompt) -> Reply:
        """Send a prompt and wait for its reply. Raises ProcessLost."""
        parts = prompt.template, prompt.special_tokens
        frames = b""
        key = self._keys.get(parts)
        if key is None:
            forget = len(self._keys) >= _MAX_REMEMBERED
            if forget:
                self._keys.clear()
            key = self._keys[parts] = len(self._keys)
            frames = pack(Remember(key, *parts, forget))
        small = msgspec.structs.replace(prompt, template="", special_tokens=())
        return await self._exchange(frames + pack(Render(key, small)))

    async def check(self, template: str) -> Reply:
        """Have a template compiled. Raises ProcessLost."""
        return await self._exchange(pack(CheckTemplate(template)))

    async def kill(self) -> None:
        """End the process at once and reap it; idempotent."""
        self._process.kill()
        self._requests.close()
        with contextlib.suppress(OSError):
            await self._requests.wait_closed()
        await asyncio.to_thread(self._process.wait)

    async def _exchange(self, frames: bytes) -> Reply:
        try:
            self._requests.write(frames)
            await self._requests.drain()
        except OSError as error:
            raise ProcessLost from error
        return await self._receive()

    async def _receive(self) -> Reply:
        try:
            size = int.from_bytes(await self._replies.readexactly(HEADER_BYTES), "big")
            if size > self._max_reply_bytes:
                raise ProcessLost
            reply: Reply = _decode(await self._replies.readexactly(size))
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise ProcessLost from error
        return reply


def _start(max_chars: int, memory_bytes: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process and our end of its standard input and output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    command = [sys.executable, "-P", "-m", "enginehouse.prompt.render_process"]  # -P: not from the current directory
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
