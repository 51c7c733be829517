"""Bytes of decoded media on a link: they are sent in pieces, so that no other message waits for many megabytes.

The pieces of a request precede its message, in which its media are empty; the worker puts them together again. Used on
the event loop of the server, and by the worker's reader thread. Does not know what the bytes mean.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TypeVar

from attrs import evolve
from msgspec.structs import replace

from enginehouse.contract.types import Segment
from enginehouse.workers.messages import Detokenize, FromWorker, MediaBytes, Pool, Submit, Tokenize, ToWorker
from enginehouse.workers.process import Connection

_Message = TypeVar("_Message", Submit | Pool, Tokenize | Detokenize)

_PIECE_BYTES = 256 * 1024


class MediaSender:
    """Sends the media of prompts on a link. Used on the event loop.

    Args:
        connection: the link; a lost one drops the pieces.
        on_begin: called before media are sent; it may raise an error.

    Attributes:
        num_open: number of prompts whose media are being sent.
    """

    def __init__(self, connection: Connection[ToWorker, FromWorker], on_begin: Callable[[], None]) -> None:
        self._connection = connection
        self._on_begin = on_begin
        self.num_open = 0

    @asynccontextmanager
    async def sent(self, call: int, segments: Sequence[Segment]) -> AsyncIterator[tuple[Segment, ...]]:
        """Send the media of a prompt, and give the rest, which the block sends; if it does not, the worker drops them.

        Args:
            call: number of the pieces, unique on the link.
            segments: the prompt.
        """
        if all(segment.media is None for segment in segments):
            yield tuple(segments)
            return
        self._on_begin()
        self.num_open += 1
        try:
            with ExitStack() as undo:
                undo.callback(self._connection.send, MediaBytes(call, 0, b""))
                yield await self._send(call, segments)
                undo.pop_all()
        finally:
            self.num_open -= 1

    async def _send(self, call: int, segments: Sequence[Segment]) -> tuple[Segment, ...]:
        place = 0
        for segment in segments:
            if segment.media is None:
                continue
            data = segment.media.data
            for start in range(0, len(data), _PIECE_BYTES):
                self._connection.send(MediaBytes(call, place, data[start : start + _PIECE_BYTES]))
                await self._connection.drained()
            place += 1
        return tuple(one if one.media is None else replace(one, media=one.media.with_data(b"")) for one in segments)


class ArrivedMedia:
    """The pieces in a worker of which the message has not come."""

    def __init__(self) -> None:
        self._of_call: dict[int, dict[int, bytearray]] = {}

    def add(self, piece: MediaBytes) -> None:
        """Keep a piece; one without data drops all of its number."""
        if not piece.data:
            self._of_call.pop(piece.call, None)
            return
        self._of_call.setdefault(piece.call, {}).setdefault(piece.place, bytearray()).extend(piece.data)

    def complete(self, message: _Message) -> _Message:
        """Return a message with the bytes of its media, which are then forgotten."""
        if isinstance(message, Tokenize):
            return replace(message, segments=self._complete(message.segments, message.call))
        if isinstance(message, Submit):
            segments = self._complete(message.request.segments, message.media_call)
            return replace(message, request=evolve(message.request, segments=segments))
        return message

    def _complete(self, segments: Sequence[Segment], call: int) -> tuple[Segment, ...]:
        if call not in self._of_call:
            return tuple(segments)
        found, places = self._of_call.pop(call), itertools.count()
        return tuple(
            one if one.media is None else replace(one, media=one.media.with_data(bytes(found.pop(next(places), b""))))
            for one in segments
        )
