"""Encoding of rendered segments with images as token ids and chunks.

Called in the worker, on its intake threads, for every prompt. Text between images is encoded as without them (see
``engine.text.segments``); the runner makes tokens and chunks of an image. Does not know templates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.media import DecodedImage, MediaChunk, pseudo_tokens
from enginehouse.contract.types import Segment
from enginehouse.engine.text.segments import encode_segments
from enginehouse.plugins import Guard

Prepare = Callable[[DecodedImage], Sequence[Sequence[int] | MediaChunk]]
"""Makes tokens and chunks of an image, see :meth:`enginehouse.contract.media.MediaRunner.prepare_image`."""


@frozen(eq=False)
class PlacedChunk:
    """A chunk in a prompt.

    Attributes:
        start: index of its first token.
        token_ids: (num_tokens,) int32, its pseudo-tokens.
    """

    start: int
    chunk: MediaChunk
    token_ids: NDArray[np.int32] = field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "token_ids", pseudo_tokens(self.chunk.key, self.chunk.num_tokens))

    @property
    def end(self) -> int:
        """Index of the token after it."""
        return self.start + self.chunk.num_tokens


@frozen(eq=False)
class EncodedPrompt:
    """Token ids, those of chunks negative, and the chunks in their order."""

    token_ids: list[int]
    chunks: tuple[PlacedChunk, ...] = ()


def without_media(token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the ids of text, in order, for penalties and processors."""
    return token_ids[token_ids >= 0]


def encode_prompt(
    tokenizer: Tokenizer, segments: Sequence[Segment], add_special: bool, prepare: Prepare | None, guard: Guard
) -> EncodedPrompt:
    """Return the ids and chunks of a prompt.

    Args:
        tokenizer: tokenizer of the model.
        segments: the rendered prompt.
        add_special: as for :func:`enginehouse.engine.text.segments.encode_segments`.
        prepare: ``prepare_image`` of the model's runner; None if it takes no images.
        guard: guard of the backend.

    Raises:
        InvalidRequest: the model cannot take an image; the message names it.
        PluginFailed: the runner gave other parts than token ids and chunks.
    """
    if all(segment.image is None for segment in segments):
        return EncodedPrompt(encode_segments(tokenizer, segments, add_special))
    token_ids: list[int] = []
    chunks: list[PlacedChunk] = []
    for number, run in enumerate(_runs(segments)):
        if not isinstance(run, DecodedImage):
            token_ids += encode_segments(tokenizer, run, add_special and number == 0)
            continue
        for part in _prepared(run, prepare, tokenizer.vocab_size, guard):
            if isinstance(part, MediaChunk):
                chunks.append(PlacedChunk(len(token_ids), part))
                token_ids += chunks[-1].token_ids.tolist()
            else:
                token_ids += part
    return EncodedPrompt(token_ids, tuple(chunks))


def _runs(segments: Sequence[Segment]) -> Iterator[Sequence[Segment] | DecodedImage]:
    """Yield text and images in turn; a prompt begins with text, possibly empty."""
    text: list[Segment] = []
    for segment in segments:
        if segment.image is None:
            text.append(segment)
        else:
            yield text
            yield segment.image
            text = []
    yield text


def _prepared(
    image: DecodedImage, prepare: Prepare | None, vocab_size: int, guard: Guard
) -> list[list[int] | MediaChunk]:
    """Return the tokens and chunks of an image, the chunks with their keys."""
    if prepare is None:
        raise InvalidRequest(f"{image.param}: this model takes text only, not images", image.param)
    try:
        parts = prepare(image)
    except InvalidRequest as error:
        raise InvalidRequest(f"{image.param}: {error.message}", image.param) from error
    content = f"{image.digest} {image.width}x{image.height} {image.max_tokens}"
    found: list[list[int] | MediaChunk] = []
    for number, part in enumerate(parts):
        if isinstance(part, MediaChunk):
            found.append(evolve(part, key=f"{part.kind} {content} {number}"))
        else:
            found.append([int(token_id) for token_id in part])
    chunks = [part for part in found if isinstance(part, MediaChunk)]
    text = [token_id for part in found if not isinstance(part, MediaChunk) for token_id in part]
    if not chunks or any(chunk.num_tokens < 1 or chunk.num_positions < 1 for chunk in chunks):
        raise guard.mistake("prepare_image", "gave no chunk, or one without tokens or positions", prepare)
    if not all(0 <= token_id < vocab_size for token_id in text):
        raise guard.mistake("prepare_image", "gave token ids outside the vocabulary", prepare)
    return found
