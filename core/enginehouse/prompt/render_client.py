"""The server's end of one rendering process: start it, exchange a request for a reply, kill it."""

from __future__ import annotations

import asyncio
import os
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
    """One rendering process. It has at most one request at a time; after a failure it must be killed."""

    def __init__(self, process: asyncio.subprocess.Process, max_reply_bytes: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._requests, self._replies = process.stdin, process.stdout
        self._max_reply_bytes = max_reply_bytes
        self._keys: dict[tuple[str, tuple[str, ...]], int] = {}

    @classmethod
    async def open(cls, max_chars: int, memory_bytes: int) -> RenderClient:
        """Start a process and wait until it is ready.

        Raises:
            ProcessLost: it ended at once.
            OSError: it could not be started.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # never import from the current directory
            *("-m", "enginehouse.prompt.render_process", str(os.getpid()), str(max_chars), str(memory_bytes)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        # A character takes at most 4 bytes, a segment of at least one character at most 8 more.
        client = cls(process, 12 * max_chars + 65536)
        try:
            if not isinstance(await client._receive(), Ready):
                raise ProcessLost
        except BaseException:
            await client.kill()
            raise
        return client

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
        if self._process.returncode is None:
            self._process.kill()
        self._requests.close()
        await self._process.wait()

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
