"""Bytes of media on a link: in pieces that let others pass, put together again, and dropped with their request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from enginehouse.contract.types import DecodedImage, EngineRequest, Segment
from enginehouse.workers.ipc import Link, socket_pair
from enginehouse.workers.media_bytes import ArrivedMedia, MediaSender
from enginehouse.workers.messages import (
    Detokenize,
    FromWorker,
    MediaBytes,
    Submit,
    Tokenize,
    ToWorker,
    decode_from_worker,
    decode_to_worker,
    pack,
)
from enginehouse.workers.process import Connection

_SIDE = 1024


def picture(number: int) -> DecodedImage:
    return DecodedImage("", _SIDE, _SIDE, bytes([number, 1, 2]) * _SIDE * _SIDE, param=str(number))


PROMPT = (
    Segment("a", True),
    Segment("", True, picture(1)),
    Segment("b"),
    *(Segment("", True, picture(number)) for number in (2, 3)),
)


def received(link: Link) -> list[ToWorker]:
    """Read until the message with the prompt, as a worker does."""
    messages: list[ToWorker] = []
    while not messages or not isinstance(messages[-1], Tokenize):
        payload = link.receive()
        assert payload is not None
        messages.append(decode_to_worker(payload))
    return messages


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Connection[ToWorker, FromWorker], Link]]:
    """The two ends of a link."""
    ours, theirs = socket_pair()
    lost = asyncio.Event()
    connection: Connection[ToWorker, FromWorker] = Connection(
        pack, decode_from_worker, lambda message: None, lambda reason: lost.set()
    )
    await connection.open(ours)
    link = Link(theirs)
    try:
        yield connection, link
    finally:
        connection.abort()
        link.close()
        await lost.wait()


async def send(connection: Connection[ToWorker, FromWorker]) -> None:
    """Send the prompt, as a server does."""
    async with MediaSender(connection, lambda: None).sent(7, PROMPT) as rest:
        connection.send(Tokenize(7, rest, False))


async def test_images_are_sent_in_pieces_between_which_others_pass() -> None:
    async with linked() as (connection, link):
        sending = asyncio.create_task(send(connection))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not sending.done() and connection.num_unsent_bytes < 2**20

        connection.send(Detokenize(8, ()))
        reading = asyncio.create_task(asyncio.to_thread(received, link))
        await sending
        *pieces, last = await reading

    arrived = ArrivedMedia()
    for piece in pieces:
        if isinstance(piece, MediaBytes):
            assert piece.call == 7 and len(piece.data) < 2**20
            arrived.add(piece)
    others = [number for number, piece in enumerate(pieces) if isinstance(piece, Detokenize)]
    assert others and others[0] < len(pieces) - 1
    assert arrived.complete(last) == Tokenize(7, PROMPT, False)
    assert arrived.complete(last) == last  # they are not kept


async def test_a_lost_link_ends_the_sending() -> None:
    async with linked() as (connection, link):
        sending = asyncio.create_task(send(connection))
        await asyncio.sleep(0)
        link.close()
        async with asyncio.timeout(60):
            await sending


@pytest.mark.parametrize("call", [7, 8])
def test_dropped_pieces_are_forgotten(call: int) -> None:
    arrived = ArrivedMedia()
    arrived.add(MediaBytes(7, 0, b"abc"))
    arrived.add(MediaBytes(call, 0, b""))
    request = EngineRequest(request_id="r", segments=(Segment("", True, DecodedImage("", 1, 1, b"")),))
    (found,) = arrived.complete(Submit(request, None, 7)).request.segments

    assert found.media is not None and found.media.rgb == (b"" if call == 7 else b"abc")
