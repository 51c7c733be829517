"""Headers of image files: type and size, read without decoding. Declared types are not trusted."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

from attrs import frozen


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
