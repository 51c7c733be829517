"""Headers of images: sizes, whole files, and damage of every kind."""

from __future__ import annotations

import base64
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.types import EngineCapabilities, MediaPart, Message
from enginehouse.pipeline.media import MediaReader
from enginehouse.pipeline.media.reading import ImageHeader, NoImage, read_image_header
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.settings.config import MediaSettings


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


PNG = (
    b"\x89PNG\r\n\x1a\n"
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 3, 2, 8, 2, 0, 0, 0))
    + chunk(b"IDAT", zlib.compress(b"\0" * 20))
    + chunk(b"IEND", b"")
)
JPEG = (
    b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00"
    + b"\xff\xff\xc0\x00\x0b\x08"
    + struct.pack(">HH", 2, 3)
    + b"\x01\x01\x11\x00\xff\xda\x00\x08\x01\x01\x00\x00?\x00\xaa\xbb\xff\xd9"
)
GIF = b"GIF89a" + struct.pack("<HH", 3, 2) + b"\x00\x00\x00,\x00\x00\x00\x00\x03\x00\x02\x00\x00\x02\x02\x44\x01\x00;"
WEBP_LOSSY = base64.b64decode("UklGRiIAAABXRUJQVlA4IBYAAAAwAQCdASoBAAEADsD+JaQAA3AAAAAA")
WEBP_LOSSLESS = base64.b64decode("UklGRhoAAABXRUJQVlA4TA0AAAAvAAAAEAcQERGIiP4HAA==")
WEBP_EXTENDED = b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + b"\0\0\0\0\2\0\0\1\0\0"

WHOLE = {
    "png": (PNG, ImageHeader("png", 3, 2)),
    "jpeg": (JPEG, ImageHeader("jpeg", 3, 2)),
    "gif": (GIF, ImageHeader("gif", 3, 2)),
    "webp": (WEBP_LOSSY, ImageHeader("webp", 1, 1)),
    "webp_lossless": (WEBP_LOSSLESS, ImageHeader("webp", 1, 1)),
    "webp_extended": (WEBP_EXTENDED, ImageHeader("webp", 3, 2)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_size_and_format(name: str) -> None:
    data, header = WHOLE[name]

    assert read_image_header(data) == header


@pytest.mark.parametrize("name", WHOLE)
def test_every_cut_is_noticed(name: str) -> None:
    data, _ = WHOLE[name]
    for length in range(len(data)):
        with pytest.raises(NoImage):
            read_image_header(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%PDF-1.7",
        b"RIFF\x10\0\0\0WAVEfmt " + b"\0" * 40,
        PNG[:8] + chunk(b"IDAT", b"") + PNG[8:],
        PNG[:8]
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 2, 8, 2, 0, 0, 0))
        + chunk(b"IDAT", b"x")
        + chunk(b"IEND", b""),
        PNG[:33] + chunk(b"IEND", b""),
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8\xff\xe0\x00\x01" + JPEG[6:],
    ],
)
def test_what_is_no_image(data: bytes) -> None:
    with pytest.raises(NoImage):
        read_image_header(data)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(name=st.sampled_from(sorted(WHOLE)), at=st.integers(0, 60), patch=st.binary(min_size=1, max_size=8))
def test_damage_never_raises_anything_else(name: str, at: int, patch: bytes) -> None:
    data, _ = WHOLE[name]
    damaged = data[:at] + patch + data[at + len(patch) :]
    try:
        header = read_image_header(damaged)
    except NoImage:
        return
    assert header.width > 0 and header.height > 0


async def test_too_many_pixels_together_are_refused_before_any_is_decoded() -> None:
    """The pixels of several images of a few bytes would take more memory than a request may have."""
    url = "data:image/gif;base64," + base64.b64encode(b"GIF89a" + struct.pack("<HH", 4096, 1024) + b"\0\0\0;").decode()
    parts = tuple(MediaPart(kind="image_url", value={"url": url}, param=f"[{number}]") for number in range(5))
    message = Message(role="user", content="", parts=parts)
    not_started = Renderer(20, 10_000)
    engine = EngineCapabilities(media=("image",), max_image_pixels=2**22)

    with pytest.raises(InvalidRequest, match="16777216 pixels together"):
        await MediaReader(MediaSettings(), not_started).read([message], engine)
