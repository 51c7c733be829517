"""Images and recordings of messages: read within limits, and decoded for engines that get prompts, not messages.

Types and sizes are read from the headers, without decoding; decoding of images itself is done in a rendering process.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, cast

from attrs import evolve, frozen

from enginehouse.contract.errors import InvalidRequest, RenderError, UnsupportedParameter
from enginehouse.contract.media import LOW_DETAIL_TOKENS
from enginehouse.contract.types import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    EngineCapabilities,
    Image,
    MediaPart,
    Message,
)
from enginehouse.pipeline.media.audio import NoAudio, WavFile, num_samples, read_wav, samples_of
from enginehouse.pipeline.media.fetching import AddressRefused, FetchFailed, ImageFetcher, Resolve, resolve_host
from enginehouse.pipeline.prompt.pixels import MAX_DECODED_PIXELS, MISSING
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.settings.config import MediaSettings

Hold = Callable[[int], None]
"""Counts the memory of decoded media; it may raise an error, which refuses the request."""

_DETAILS = ("auto", "low", "high")

_MAX_PIXEL_BYTES = 48 * 2**20
"""Pixels of one request."""

_KINDS = {"image_url": "image", "input_audio": "audio"}
"""Kinds of media by the types of parts."""

_AUDIO_FORMATS = ("wav", "mp3")
"""Values of ``format`` of OpenAI's API."""


@frozen(eq=False)
class _File:
    """An image of a message; reading its header may take a second, so it is kept."""

    part: MediaPart
    header: ImageHeader
    image: Image

    @property
    def num_pixels(self) -> int:
        return self.header.width * self.header.height


@frozen(eq=False)
class _Recording:
    """A recording of a message, and the bytes of its file."""

    part: MediaPart
    file: WavFile
    data: bytes


@contextmanager
def _explaining(part: MediaPart) -> Iterator[None]:
    """Name the part of the request in errors."""
    where = f"{part.param}.{'image_url.url' if part.kind == 'image_url' else 'input_audio.data'}"
    try:
        yield
    except (AddressRefused, FetchFailed, NoImage, NoAudio) as error:
        raise InvalidRequest(f"{where}: {error}", where) from error


class MediaReader:
    """Reads media that messages link to or embed.

    Args:
        settings: limits, and hosts that may be fetched from.
        renderer: decodes images.
        resolve: resolves host names.
    """

    def __init__(self, settings: MediaSettings, renderer: Renderer, resolve: Resolve = resolve_host) -> None:
        self._settings = settings
        self._renderer = renderer
        # Images are decoded in turn, one of each request, and the wait for a turn does not use up their time.
        self._turn = asyncio.Lock()
        # Recordings are decoded in turn too. A thread goes on when its request is cancelled; the next waits for it.
        self._audio_thread = ThreadPoolExecutor(1, "read-audio")
        self._fetcher = ImageFetcher(settings, resolve)

    async def read(
        self, messages: Sequence[Message], engine: EngineCapabilities, hold: Hold = lambda num_bytes: None
    ) -> tuple[Message, ...]:
        """Return the messages with images and recordings in place of the client's links and data.

        Args:
            messages: the messages of a request.
            engine: what the model takes.
            hold: called with the memory of the decoded media before any is decoded.

        Raises:
            UnsupportedParameter: the engine does not accept such parts.
            InvalidRequest: a part is wrong, or its link cannot be read.
            EnginehouseError: raised by ``hold``.
        """
        check_media(messages, engine)
        parts = list(_media(messages))
        if len(parts) > self._settings.max_images:
            message = f"more than {self._settings.max_images} images and recordings in one request (media.max_images)"
            raise InvalidRequest(f"messages: {message}", "messages")
        for role, part in parts:
            if role != "user" and (role != "tool" or engine.takes_messages):
                raise InvalidRequest(f"{part.param}: only {_holders(engine)} may contain media", part.param)
        files = await _all(self._file(part) for _, part in parts if part.kind == "image_url")
        recordings = await self._recordings([part for _, part in parts if part.kind == "input_audio"])
        if engine.takes_messages:
            return _with_media(messages, {file.part.param: file.image for file in files})
        pixel_bytes = _pixel_bytes(files, engine.max_image_pixels)
        if files or recordings:
            hold(pixel_bytes + 4 * sum(num_samples(one.file, engine.audio_rate) for one in recordings))
        found = await self._decode_all(files, engine.max_image_pixels)
        loop = asyncio.get_running_loop()
        for one in recordings:
            decoding = loop.run_in_executor(self._audio_thread, _decoded_audio, one, engine.audio_rate)
            found[one.part.param] = await decoding
        return _with_media(messages, found)

    async def _recordings(self, parts: Sequence[MediaPart]) -> list[_Recording]:
        """Return the recordings of a request, not decoded."""
        found, most_s = list[_Recording](), self._settings.max_audio_s
        for part in parts:
            where = f"{part.param}.input_audio"
            encoded = _read_audio(part.value, where)
            with _explaining(part):
                found.append(await asyncio.to_thread(_recording, part, encoded, self._settings.max_bytes))
                if (seconds := sum(one.file.seconds for one in found)) > most_s:
                    raise NoAudio(
                        f"the recordings of one request take {seconds:.1f} s, more than {most_s:g} s "
                        "(media.max_audio_s)"
                    )
        return found

    async def _file(self, part: MediaPart) -> _File:
        where = f"{part.param}.image_url"
        url, detail = _read_link(part.value, where)
        with _explaining(part):
            if url[:5].lower() == "data:":
                data = await asyncio.to_thread(_decode, url, self._settings.max_bytes)
            else:
                data = await self._fetcher.fetch(url)
            return await asyncio.to_thread(self._checked, part, data, detail)

    async def _decode_all(self, files: Sequence[_File], target_pixels: int) -> dict[str, Image | DecodedMedia]:
        """Return the pixels of one request, all decoded within the time limit of one chat."""
        loop, found, left_s = asyncio.get_running_loop(), dict[str, Image | DecodedMedia](), self._renderer.timeout_s
        for file in files:
            async with self._turn:
                began = loop.time()
                found[file.part.param] = await self._decoded(file, target_pixels, left_s)
                left_s -= loop.time() - began
        return found

    async def _decoded(self, file: _File, target_pixels: int, timeout_s: float) -> DecodedImage:
        image, param = file.image, file.part.param
        with _explaining(file.part):
            if timeout_s <= 0:
                limit = f"{self._renderer.timeout_s:g} s (limits.render_timeout_s)"
                raise NoImage(f"the images before it took longer to decode than the {limit} that a request has")
            try:
                decoded = await self._renderer.decode(image.data, target_pixels, timeout_s)
            except RenderError as error:
                if error.message == MISSING:
                    raise UnsupportedParameter(f"{param}: {MISSING}", param) from error
                raise NoImage(error.message) from error
            # A process that a file has taken over could say anything, and runners hand the pixels to libraries in C.
            num_pixels = decoded.width * decoded.height
            if decoded.width < 1 or not 0 < num_pixels <= max(1, target_pixels) or len(decoded.rgb) != 3 * num_pixels:
                raise NoImage("its decoded size is wrong")
        digest = await asyncio.to_thread(lambda: hashlib.sha256(image.data).hexdigest())
        max_tokens = LOW_DETAIL_TOKENS if image.detail == "low" else None
        return DecodedImage(digest, decoded.width, decoded.height, decoded.rgb, max_tokens, param)

    def _checked(self, part: MediaPart, data: bytes, detail: Literal["auto", "low", "high"] | None) -> _File:
        header, most = read_image_header(data), self._settings.max_pixels
        if header.width * header.height > most:
            size = f"{header.width} x {header.height}"
            raise NoImage(f"it has {size} pixels, more than {most} (media.max_pixels)")
        return _File(part, header, Image(media_type=f"image/{header.format}", data=data, detail=detail))


def _pixel_bytes(files: Sequence[_File], target_pixels: int) -> int:
    """Return the memory of the decoded images of a request.

    Raises:
        InvalidRequest: one, or all together, are too large.
    """
    for file in files:
        if file.num_pixels > MAX_DECODED_PIXELS:
            size = f"{file.header.width} x {file.header.height}"
            with _explaining(file.part):
                raise NoImage(f"it has {size} pixels, more than the {MAX_DECODED_PIXELS} that are decoded")
    num_bytes = 3 * sum(min(file.num_pixels, target_pixels) for file in files)
    if num_bytes > _MAX_PIXEL_BYTES:
        message = f"messages: the images have more than {_MAX_PIXEL_BYTES // 3} pixels together; send smaller ones"
        raise InvalidRequest(message, "messages")
    return num_bytes


def _recording(part: MediaPart, encoded: str, max_bytes: int) -> _Recording:
    data = _base64(encoded, max_bytes, NoAudio)
    return _Recording(part, read_wav(data), data)


def _decoded_audio(recording: _Recording, rate: int) -> DecodedAudio:
    digest = hashlib.sha256(recording.data).hexdigest()
    return DecodedAudio(digest, rate, samples_of(recording.file, rate).tobytes(), recording.part.param)


def _holders(engine: EngineCapabilities) -> str:
    """Return whose messages may contain media; other servers' APIs take none in results of tools."""
    return "user messages" if engine.takes_messages else "user messages and results of tools"


def check_media(messages: Sequence[Message], engine: EngineCapabilities) -> None:
    """Refuse non-text parts that an engine does not accept; reads nothing.

    Raises:
        UnsupportedParameter: names the part.
    """
    for _, part in _media(messages):
        _check_kind(part, engine)


def _media(messages: Sequence[Message]) -> Iterator[tuple[str, MediaPart]]:
    """Yield the non-text parts, each with the role of its message."""
    for message in messages:
        yield from ((message.role, part) for part in message.parts if isinstance(part, MediaPart))


def _check_kind(part: MediaPart, engine: EngineCapabilities) -> None:
    taken = [name for name, kind in _KINDS.items() if kind in engine.media]
    if part.kind not in taken:
        what = " and ".join(("text", *taken)) if taken else "text only"
        raise UnsupportedParameter(f"{part.param}: this model takes {what}, not {part.kind}", part.param)


def _read_audio(value: Any, where: str) -> str:
    """Return the data of ``input_audio``, an object with ``data`` in base64 and ``format``."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be an object with 'data' and 'format'", where)
    data, form = value.get("data"), value.get("format")
    if not isinstance(data, str):
        raise InvalidRequest(f"{where}.data: must be a string in base64", f"{where}.data")
    if form not in _AUDIO_FORMATS:
        raise InvalidRequest(f"{where}.format: must be 'wav'", f"{where}.format")
    if form != "wav":
        convert = "convert it first, as with ffmpeg -i FILE -ac 1 -ar 16000 out.wav"
        message = f"{where}.format: this server takes recordings as 'wav', not as {form!r}; {convert}"
        raise UnsupportedParameter(message, f"{where}.format")
    return data


def _read_link(value: Any, where: str) -> tuple[str, Literal["auto", "low", "high"] | None]:
    """Parse ``image_url``: an object with ``url`` and an optional ``detail``, or the URL alone."""
    if isinstance(value, str):
        return value, None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}: must be an object with 'url'", where)
    url, detail = value.get("url"), value.get("detail")
    if not isinstance(url, str):
        raise InvalidRequest(f"{where}.url: must be a string", f"{where}.url")
    if detail is not None and detail not in _DETAILS:
        raise InvalidRequest(f"{where}.detail: must be 'auto', 'low' or 'high'", f"{where}.detail")
    return url, cast(Literal["auto", "low", "high"] | None, detail)


def _decode(url: str, max_bytes: int) -> bytes:
    """Return the content of a ``data:`` URL. Its media type is checked, but not trusted."""
    head, comma, text = url[5:].partition(",")
    kind, *parameters = head.split(";")
    if not comma:
        raise NoImage("a data URL needs a comma")
    if not kind.strip().lower().startswith("image/"):
        raise NoImage("a data URL must say that it is an image, as in data:image/png;base64,...")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise NoImage("a data URL must be in base64, as in data:image/png;base64,...")
    return _base64(text, max_bytes, NoImage)


def _base64(text: str, max_bytes: int, refusal: type[NoImage | NoAudio]) -> bytes:
    if len(text) // 4 * 3 > max_bytes + 3:
        raise refusal(f"it has more than {max_bytes} bytes (media.max_bytes)")
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise refusal("its base64 is damaged") from error


async def _all(readings: Iterator[Coroutine[Any, Any, _File]]) -> list[_File]:
    """Read all concurrently; if one fails, the others are cancelled."""
    tasks: list[asyncio.Task[_File]] = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(reading) for reading in readings]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _with_media(messages: Sequence[Message], found: Mapping[str, Image | DecodedMedia]) -> tuple[Message, ...]:
    """Return the messages with what was read in place of their parts."""
    return tuple(
        evolve(one, parts=tuple(found[part.param] if isinstance(part, MediaPart) else part for part in one.parts))
        for one in messages
    )


class NoImage(ValueError):
    """The bytes are not a usable image; the message gives the reason."""


@frozen
class ImageHeader:
    """Image format by its media type name (``png``), and sides in pixels."""

    format: str
    width: int
    height: int


def read_image_header(data: bytes) -> ImageHeader:
    """Parse the header of a PNG, JPEG, GIF or WebP file.

    Raises:
        NoImage: the data is of another type, damaged or truncated.
    """
    if not data:
        raise NoImage("it is empty")
    for magic, read in _READERS.items():
        if data.startswith(magic):
            try:
                header = read(data)
            except (struct.error, IndexError) as error:
                raise NoImage("it ends too early") from error
            if header.width < 1 or header.height < 1:
                raise NoImage("it has no pixels")
            return header
    raise NoImage("it is not a PNG, JPEG, GIF or WebP image")


def _read_png(data: bytes) -> ImageHeader:
    """Read chunks of length, name, data and checksum; the first one holds the size, the last one is empty."""
    length, name, width, height = struct.unpack_from(">I4sII", data, 8)
    if name != b"IHDR" or length != 13:
        raise NoImage("its first chunk is not the header")
    position, has_data = 8, False
    while name != b"IEND":
        length, name = struct.unpack_from(">I4s", data, position)
        has_data = has_data or name == b"IDAT"
        position += 12 + length
    if position > len(data):
        raise NoImage("it ends too early")
    if not has_data:
        raise NoImage("it holds no pixels")
    return ImageHeader("png", width, height)


_SOF = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # start of frame, by kind of compression
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length
_SOS, _EOI = 0xDA, 0xD9


def _read_jpeg(data: bytes) -> ImageHeader:
    """Read segments up to the compressed data, which ends with a marker of its own."""
    position, size = 2, None
    while True:
        while data[position] == 0xFF and data[position + 1] == 0xFF:  # fill bytes
            position += 1
        if data[position] != 0xFF:
            raise NoImage("it is damaged")
        marker = data[position + 1]
        if marker == _EOI:
            break
        if marker in _ALONE:
            position += 2
            continue
        (length,) = struct.unpack_from(">H", data, position + 2)
        if length < 2:
            raise NoImage("it is damaged")
        if marker in _SOF:
            height, width = struct.unpack_from(">HH", data, position + 5)
            size = width, height
        if marker == _SOS:
            if data.rfind(b"\xff\xd9", position) < 0:
                raise NoImage("it ends too early")
            break
        position += 2 + length
    if size is None:
        raise NoImage("it says no size")
    return ImageHeader("jpeg", *size)


def _read_gif(data: bytes) -> ImageHeader:
    width, height = struct.unpack_from("<HH", data, 6)
    if not data.rstrip(b"\0").endswith(b";"):
        raise NoImage("it ends too early")
    return ImageHeader("gif", width, height)


def _read_webp(data: bytes) -> ImageHeader:
    length, form, kind = struct.unpack_from("<I4s4s", data, 4)
    if form != b"WEBP":
        raise NoImage("it is not a PNG, JPEG, GIF or WebP image")
    if length + 8 > len(data):
        raise NoImage("it ends too early")
    if kind == b"VP8X":
        sides = [1 + int.from_bytes(data[at : at + 3], "little") for at in (24, 27)]
    elif kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        sides = [1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)]
    elif kind == b"VP8 ":
        sides = [side & 0x3FFF for side in struct.unpack_from("<HH", data, 26)]
    else:
        raise NoImage("it is damaged")
    if len(data) < 30:
        raise NoImage("it ends too early")
    return ImageHeader("webp", *sides)


_READERS: Mapping[bytes, Callable[[bytes], ImageHeader]] = {
    b"\x89PNG\r\n\x1a\n": _read_png,
    b"\xff\xd8\xff": _read_jpeg,
    b"GIF87a": _read_gif,
    b"GIF89a": _read_gif,
    b"RIFF": _read_webp,
}
