"""Images and recordings in prompts: chunks of a prompt whose input is an embedding that the runner computes.

A prompt is a list of runs: token ids, and media chunks. A runner that takes images implements :class:`MediaRunner`, one
that takes recordings :class:`AudioRunner`, and both name the kinds in ``capabilities.media``. Core decodes the files,
places the chunks, and keeps embeddings for later requests; a runner never sees a file.

In a sequence's history a chunk is a run of **pseudo-tokens**: negative ids that are a hash of its content. So all code
that compares token ids (the prefix cache, forks, saved states) also compares images, and a sequence is still its token
ids. A chunk is in a sequence as a whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.types.chats import DecodedAudio, DecodedImage

__all__ = [
    "LOW_DETAIL_TOKENS",
    "MAX_IMAGE_PIXELS",
    "AudioRunner",
    "DecodedAudio",
    "DecodedImage",
    "Embedding",
    "MediaChunk",
    "MediaInput",
    "MediaKind",
    "MediaRunner",
    "find_chunks",
    "pseudo_tokens",
    "whole_chunks",
]

MediaKind = Literal["image", "audio"]
"""Kinds of media that a runner may take."""

MAX_IMAGE_PIXELS = 2**22
"""Pixels of the largest image that a runner can get; larger ones are shrunk when they are decoded."""

LOW_DETAIL_TOKENS = 256
"""Tokens that an image with ``"detail": "low"`` may have."""


class Embedding(Protocol):
    """Result of :meth:`MediaRunner.encode`: an array of the runner's library, which core only keeps."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, counted against the limit of the cache."""
        ...


@frozen(eq=False, kw_only=True)
class MediaChunk:
    """A part of an image or of a recording that is one run of positions.

    Attributes:
        num_tokens: KV positions, by which the length of the sequence grows.
        num_positions: positions by which the next token moves on; fewer than ``num_tokens`` in models that number an
            image in two dimensions (M-RoPE).
        data: the runner's own, for ``encode`` and ``forward``; kept until the request has ended.
        num_bytes: memory of ``data``, counted against ``models.<name>.embedding_cache``.
        kind: kind of media.
        key: equal for equal content of equal size only; set by core.
    """

    num_tokens: int
    num_positions: int
    data: Any
    num_bytes: int = 0
    kind: MediaKind = "image"
    key: str = ""


@frozen(eq=False)
class MediaInput:
    """A chunk as the input of a span (the field ``input`` of :class:`enginehouse.contract.backend.Span`).

    Attributes:
        chunk: from ``prepare_image`` or ``prepare_audio``, with its ``key``.
        embedding: from ``encode``, of this chunk or of an equal one.
        token_ids: (num_tokens,) int32, its pseudo-tokens, for runners that keep the history of a sequence.
    """

    chunk: MediaChunk
    embedding: Embedding
    token_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return self.chunk.num_tokens


@runtime_checkable
class MediaRunner(Protocol):
    """A runner that takes images.

    A forward pass with a chunk has only this span, and its ``outputs`` are ``none``: a prompt ends with text. The chunk
    may have more tokens than ``max_batch_tokens``; the runner divides it as the model requires. ``length``, ``start``,
    ``truncate``, ``fork`` and ``free_tokens`` count tokens; the runner keeps the positions of the model. A
    cut inside a chunk drops the chunk: ``truncate``, ``fork`` and ``kept_length`` return its start. If a pass fails or
    is aborted, nothing of its chunk remains.

    Attributes:
        max_image_pixels: number of pixels above which an image is shrunk, at most :data:`MAX_IMAGE_PIXELS`.

    Calls:
        prepare_image: for each image of a request; worker, intake threads, several at once; ``step_timeout_s`` at
            most.
        encode: for each chunk that is neither in the KV cache nor among the kept embeddings; worker, engine thread, a
            step of its own; ``step_timeout_s`` at most.
    """

    max_image_pixels: int

    def prepare_image(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """Return an image as parts of a prompt: runs of token ids, and at least one chunk, in their order.

        They replace the text that the chat template writes for an image, so the tokens around it are included. The
        same image always gives the same parts.

        Raises:
            InvalidRequest: the model cannot take this image; the message gives the reason.
        """

    def encode(self, chunk: MediaChunk) -> Embedding:
        """Return the embedding of a chunk; it must stay valid while it is referenced.

        Raises:
            StepAborted: ``abort()`` was called; ``lengths`` of the error is empty.
        """


@runtime_checkable
class AudioRunner(MediaRunner, Protocol):
    """A runner that takes recordings. Its chunks are encoded and computed as those of images.

    Attributes:
        audio_rate: samples of a second that recordings must have.

    Calls:
        prepare_audio: for each recording of a request; worker, intake threads, several at once; ``step_timeout_s`` at
            most.
    """

    audio_rate: int

    def prepare_audio(self, audio: DecodedAudio) -> Sequence[Sequence[int] | MediaChunk]:
        """Return a recording as parts of a prompt, as ``prepare_image`` does for an image; chunks have its kind.

        Raises:
            InvalidRequest: the model cannot take this recording; the message gives the reason.
        """


_FIRST = 1 << 30
"""Number of ids for the first pseudo-token of a chunk; lower ids are those of the others."""

_IMAGE = _FIRST // 2
"""Number of the highest of these that begin an image; the lower half begin recordings."""


def pseudo_tokens(key: str, num_tokens: int, kind: MediaKind = "image") -> NDArray[np.int32]:
    """Return the ids of a chunk in a sequence, (num_tokens,) int32: negative, 29 or 30 bits of a hash each.

    The first one is at least -2**30, the others are lower, so that the start of a chunk is known from the ids. For a
    recording the first one is below -2**29.
    """
    digest = hashlib.shake_128(key.encode()).digest(4 * num_tokens)
    ids = -1 - (np.frombuffer(digest, "<u4").astype(np.int64) % _FIRST)
    ids[0] = -1 - (-1 - ids[0]) % _IMAGE - (_IMAGE if kind == "audio" else 0)
    ids[1:] -= _FIRST
    return ids.astype(np.int32)


def whole_chunks(token_ids: NDArray[np.int32], length: int) -> int:
    """Return the largest length up to ``length`` that divides no chunk of ``token_ids``."""
    while 0 < length < len(token_ids) and token_ids[length] < -_FIRST:
        length -= 1
    return length


def find_chunks(token_ids: Sequence[int]) -> Iterator[tuple[MediaKind, int, int]]:
    """Yield the kind, the start and the number of tokens of each chunk in a prompt."""
    start = None
    for index, token_id in enumerate((*token_ids, 0)):
        if start is not None and token_id >= -_FIRST:
            yield "image" if token_ids[start] >= -_IMAGE else "audio", start, index - start
            start = None
        if -_FIRST <= token_id < 0:
            start = index
