"""Media of the fake runner: chunks whose embeddings are numbers made from all their data, which change its hash.

An image of up to 64 pixels on each side is one chunk, a larger one two, with a token between them, as models have that
divide large images. :func:`fake_image` makes one, and :func:`fake_image_file` its file, without an image library. Each
started second of a recording is a chunk; :func:`fake_audio_file` makes one.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.media import DecodedAudio, DecodedImage, MediaChunk

__all__ = [
    "AUDIO_PLACEHOLDER",
    "AUDIO_RATE",
    "IMAGE_TEMPLATE",
    "PLACEHOLDER",
    "SIDE_PIXELS",
    "encode_fake",
    "fake_audio",
    "fake_audio_file",
    "fake_image",
    "fake_image_file",
    "prepare_fake",
    "prepare_fake_audio",
]

PLACEHOLDER = "<|image|>"
"""Text that the fake model's template writes for an image; not a token of its vocabulary."""

AUDIO_PLACEHOLDER = "<|audio|>"
"""The same for recordings."""

AUDIO_RATE = 8000
"""Samples of a second that the fake runner takes."""

IMAGE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + PLACEHOLDER
    + "{% elif part['type'] == 'audio' %}"
    + AUDIO_PLACEHOLDER
    + "{% else %}"
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


def fake_audio(number: int, num_samples: int = 100) -> DecodedAudio:
    """Return a recording whose samples depend on ``number``."""
    samples = (np.arange(num_samples) * (number + 1) % 256 - 128).astype(np.float32) / 128
    file = fake_audio_file(number, num_samples)
    return DecodedAudio(hashlib.sha256(file).hexdigest(), AUDIO_RATE, samples.tobytes())


def fake_audio_file(number: int, num_samples: int = 100) -> bytes:
    """Return the same recording as a WAV file of 8-bit samples."""
    data = (np.arange(num_samples) * (number + 1) % 256).astype(np.uint8).tobytes()
    form = struct.pack("<HHIIHH", 1, 1, AUDIO_RATE, AUDIO_RATE, 1, 8)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def prepare_fake_audio(audio: DecodedAudio, num_tokens: int) -> Sequence[list[int] | MediaChunk]:
    """Return a recording between ``(`` and ``)``, a chunk of ``num_tokens`` for each started second."""
    if audio.rate != AUDIO_RATE or not audio.samples or len(audio.samples) % 4:
        raise InvalidRequest(f"it has {len(audio.samples)} bytes of samples at {audio.rate} Hz, not at {AUDIO_RATE} Hz")
    runs: list[list[int] | MediaChunk] = [[ord("(")]]
    for start in range(0, len(audio.samples), 4 * AUDIO_RATE):
        data = audio.samples[start : start + 4 * AUDIO_RATE]
        num_bytes = len(data)
        runs.append(
            MediaChunk(num_tokens=num_tokens, num_positions=num_tokens, data=data, num_bytes=num_bytes, kind="audio")
        )
    return [*runs, [ord(")")]]


def encode_fake(chunk: MediaChunk) -> NDArray[np.uint64]:
    """Return the embedding of a chunk, (num_tokens,): each number depends on all pixels."""
    digest = hashlib.shake_128(chunk.data).digest(8 * chunk.num_tokens)
    return np.frombuffer(digest, np.uint64).copy()
