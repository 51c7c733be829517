"""Reading of media: turns between requests, their time, and the account of memory."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from numpy.typing import NDArray

from enginehouse.contract.errors import InvalidRequest, ServerOverloaded
from enginehouse.contract.types import EngineCapabilities, MediaPart, Message
from enginehouse.pipeline.media import MediaReader, reading
from enginehouse.pipeline.media.audio import WavFile, read_wav, samples_of
from enginehouse.pipeline.prompt.render_messages import Decoded
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.settings.config import MediaSettings
from enginehouse_testkit.fake_media import fake_audio_file, fake_image_file

_HEARS = EngineCapabilities(media=("audio",), audio_rate=16000)
_ENGINE = EngineCapabilities(media=("image",), max_image_pixels=2**16)


def asking(*numbers: int) -> list[Message]:
    """A message with images."""
    urls = ["data:image/png;base64," + base64.b64encode(fake_image_file(number)).decode() for number in numbers]
    parts = [MediaPart(kind="image_url", value={"url": url}, param=f"[{at}]") for at, url in enumerate(urls)]
    return [Message(role="user", content="", parts=tuple(parts))]


def playing(*numbers: int) -> list[Message]:
    """A message with recordings."""
    files = [base64.b64encode(fake_audio_file(number)).decode() for number in numbers]
    values = [{"data": data, "format": "wav"} for data in files]
    parts = [MediaPart(kind="input_audio", value=value, param=f"[{at}]") for at, value in enumerate(values)]
    return [Message(role="user", content="", parts=tuple(parts))]


class Watched(Renderer):
    """Notes the images in the order of their decoding, and the time that each has."""

    def __init__(self, timeout_s: float, min_s: float = 0.0) -> None:
        super().__init__(timeout_s, 10_000)
        self.seen: list[bytes] = []
        self.times: list[float] = []
        self.has_begun, self.may_go = asyncio.Event(), asyncio.Event()
        self._min_s = min_s

    async def decode(self, data: bytes, target_pixels: int, timeout_s: float) -> Decoded:
        self.seen.append(data)
        self.times.append(timeout_s)
        self.has_begun.set()
        await self.may_go.wait()
        await asyncio.sleep(self._min_s)
        return await super().decode(data, target_pixels, 60)


@pytest.fixture
async def renderer() -> AsyncIterator[Watched]:
    pytest.importorskip("PIL")
    renderer = Watched(60)
    await renderer.start()
    yield renderer
    await renderer.close()


async def test_a_request_with_many_images_lets_others_go_on(renderer: Watched) -> None:
    reader = MediaReader(MediaSettings(), renderer)
    many = asyncio.create_task(reader.read(asking(*range(5)), _ENGINE))
    await renderer.has_begun.wait()
    one = asyncio.create_task(reader.read(asking(9), _ENGINE, lambda num_bytes: renderer.may_go.set()))
    await asyncio.gather(many, one)

    assert renderer.seen.index(fake_image_file(9)) == 1
    assert renderer.times[0] == 60 and sorted(renderer.times[2:], reverse=True) == renderer.times[2:]


async def test_all_images_of_a_request_have_one_time_limit() -> None:
    pytest.importorskip("PIL")
    renderer = Watched(0.05, min_s=0.1)
    renderer.may_go.set()
    await renderer.start()
    try:
        with pytest.raises(InvalidRequest, match=r"\[1\]\.image_url\.url: the images before it took longer .* 0\.05 s"):
            await MediaReader(MediaSettings(), renderer).read(asking(1, 2), _ENGINE)
    finally:
        await renderer.close()

    assert len(renderer.seen) == 1


async def test_memory_is_held_before_anything_is_decoded() -> None:
    held: list[int] = []

    def hold(num_bytes: int) -> None:
        held.append(num_bytes)
        raise ServerOverloaded("full")

    not_started = Renderer(20, 10_000)
    with pytest.raises(ServerOverloaded, match="full"):
        await MediaReader(MediaSettings(), not_started).read(asking(1, 2), _ENGINE, hold)

    assert held == [2 * 4 * 4 * 3]


async def test_files_of_recordings_are_not_parsed_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def parse(data: bytes) -> WavFile:
        threads.append(threading.get_ident())
        return read_wav(data)

    monkeypatch.setattr(reading, "read_wav", parse)
    await MediaReader(MediaSettings(), Renderer(20, 10_000)).read(playing(1, 2), _HEARS)

    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_one_recording_is_decoded_at_a_time_also_after_the_end_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has_begun, may_go = threading.Event(), threading.Event()
    running: list[int] = []
    most: list[int] = []

    def decode(file: WavFile, rate: int) -> NDArray[np.float32]:
        running.append(rate)
        most.append(len(running))
        has_begun.set()
        may_go.wait(60)
        samples = samples_of(file, rate)
        running.pop()
        return samples

    monkeypatch.setattr(reading, "samples_of", decode)
    reader = MediaReader(MediaSettings(), Renderer(20, 10_000))
    left = asyncio.create_task(reader.read(playing(1), _HEARS))
    await asyncio.to_thread(has_begun.wait, 60)
    left.cancel()
    others = [asyncio.create_task(reader.read(playing(number), _HEARS)) for number in (2, 3)]
    await asyncio.wait(others, timeout=0.2)
    may_go.set()
    await asyncio.gather(*others)

    assert left.cancelled() and most == [1, 1, 1]
