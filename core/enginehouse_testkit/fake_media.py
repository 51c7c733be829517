"""Images of the fake runner: chunks whose embeddings are numbers made from all pixels, which change the model's hash.

An image of up to 64 pixels on each side is one chunk, a larger one two, with a token between them, as models have that
divide large images. :func:`fake_image` makes one, and :func:`fake_image_file` its file, without an image library.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.media import DecodedImage, MediaChunk

__all__ = [
    "IMAGE_TEMPLATE",
    "PLACEHOLDER",
    "SIDE_PIXELS",
    "encode_fake",
    "fake_image",
    "fake_image_file",
    "prepare_fake",
]

PLACEHOLDER = "<|image|>"
"""Text that the fake model's template writes for an image; not a token of its vocabulary."""

IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + PLACEHOLDER + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SIDE_PIXELS = 64
_POSITIONS = 2


def fake_image(number: int, width: int = 4, height: int = 4, *, max_tokens: int | None = None) -> DecodedImage:
    """Return an image whose pixels depend on ``number``."""
    rgb = bytes((number * 7 + place * 13) % 256 for place in range(width * height * 3))
    digest = hashlib.sha256(rgb + f"{width} {height}".encode()).hexdigest()
    return DecodedImage(digest, width, height, rgb, max_tokens)


def fake_image_file(number: int, width: int = 4, height: int = 4) -> bytes:
    """Return the same image as a PNG file."""
    rgb = fake_image(number, width, height).rgb
    rows = b"".join(b"\0" + rgb[row * width * 3 : (row + 1) * width * 3] for row in range(height))
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


def prepare_fake(image: DecodedImage, num_tokens: int) -> Sequence[list[int] | MediaChunk]:
    """Return an image between ``[`` and ``]``; ``num_tokens`` is the size of a chunk without a budget."""
    if image.width * image.height * 3 != len(image.rgb):
        raise InvalidRequest(f"it has {len(image.rgb)} bytes of pixels, not {image.width} x {image.height} x 3")
    num_tokens = min(num_tokens, image.max_tokens or num_tokens)
    num_chunks = 1 if max(image.width, image.height) <= SIDE_PIXELS else 2
    runs: list[list[int] | MediaChunk] = [[ord("[")]]
    for number in range(num_chunks):
        pixels = image.rgb[number::num_chunks]
        num_positions = min(_POSITIONS, num_tokens)
        chunk = MediaChunk(num_tokens=num_tokens, num_positions=num_positions, data=pixels, num_bytes=len(pixels))
        runs += [chunk, [ord("|" if number < num_chunks - 1 else "]")]]
    return runs


def encode_fake(chunk: MediaChunk) -> NDArray[np.uint64]:
    """Return the embedding of a chunk, (num_tokens,): each number depends on all pixels."""
    digest = hashlib.shake_128(chunk.data).digest(8 * chunk.num_tokens)
    return np.frombuffer(digest, np.uint64).copy()
