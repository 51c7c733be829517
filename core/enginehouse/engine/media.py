"""Images and recordings in sequences: the chunks of a prompt, and the embeddings that are kept.

Segments with media are encoded in the worker, on its intake threads, for every prompt. Text between media is encoded as
without them (see ``engine.text.segments``); the runner makes tokens and chunks of each. Does not know templates.

Embeddings of chunks are kept for later requests by the scheduler, on the engine thread; the least recently used one is
dropped first. A chat whose KV positions were evicted, or another one about the same image, then needs no encoding. They
are known by the content of an image only, never by its address, and shared within a namespace only, as cached prefixes
are: otherwise the time of an answer would tell which images others have sent. The chunks of requests take memory too.
It is counted against the same limit, and embeddings make room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, evolve, field, frozen
from msgspec.structs import replace
from numpy.typing import NDArray

from enginehouse.contract.backend import Runner, Tokenizer
from enginehouse.contract.errors import InvalidRequest
from enginehouse.contract.inspection import EngineMetrics
from enginehouse.contract.media import AudioRunner, Embedding, MediaChunk, MediaKind, MediaRunner, pseudo_tokens
from enginehouse.contract.types import DecodedAudio, DecodedImage, DecodedMedia, Segment
from enginehouse.engine.text.segments import encode_segments
from enginehouse.plugins import Guard

ChunkMaker = Callable[[Any], Sequence[Sequence[int] | MediaChunk]]
"""Makes tokens and chunks of an image or a recording, see :class:`enginehouse.contract.media.MediaRunner`."""

ChunkMakers = Mapping[MediaKind, ChunkMaker]
"""The methods of a runner, by the kinds of media that it takes."""

_NAMES: Mapping[MediaKind, str] = {"image": "images", "audio": "recordings"}


def chunk_makers_of(runner: Runner) -> ChunkMakers:
    """Return the methods that make parts of a prompt of media, for any thread; empty for a model of text."""
    kinds, found = runner.capabilities.media, dict[MediaKind, ChunkMaker]()
    if "image" in kinds and isinstance(runner, MediaRunner):
        found["image"] = runner.prepare_image
    if "audio" in kinds and isinstance(runner, AudioRunner):
        found["audio"] = runner.prepare_audio
    return found


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
        ids = pseudo_tokens(self.chunk.key, self.chunk.num_tokens, self.chunk.kind)
        object.__setattr__(self, "token_ids", ids)

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
    tokenizer: Tokenizer, segments: Sequence[Segment], add_special: bool, chunk_makers: ChunkMakers, guard: Guard
) -> EncodedPrompt:
    """Return the ids and chunks of a prompt.

    Args:
        tokenizer: tokenizer of the model.
        segments: the rendered prompt.
        add_special: as for :func:`enginehouse.engine.text.segments.encode_segments`.
        chunk_makers: see :func:`chunk_makers_of`.
        guard: guard of the backend.

    Raises:
        InvalidRequest: the model cannot take an image or a recording; the message names it.
        PluginFailed: the runner gave other parts than token ids and chunks.
    """
    if all(segment.media is None for segment in segments):
        return EncodedPrompt(encode_segments(tokenizer, segments, add_special))
    token_ids: list[int] = []
    chunks: list[PlacedChunk] = []
    for number, run in enumerate(_runs(segments)):
        if not isinstance(run, DecodedImage | DecodedAudio):
            token_ids += encode_segments(tokenizer, run, add_special and number == 0)
            continue
        for part in _prepared(run, chunk_makers, tokenizer.vocab_size, guard):
            if isinstance(part, MediaChunk):
                chunks.append(PlacedChunk(len(token_ids), part))
                token_ids += chunks[-1].token_ids.tolist()
            else:
                token_ids += part
    return EncodedPrompt(token_ids, tuple(chunks))


def _runs(segments: Sequence[Segment]) -> Iterator[Sequence[Segment] | DecodedMedia]:
    """Yield text and media in turn; a prompt begins with text, possibly empty."""
    text: list[Segment] = []
    for segment in segments:
        if segment.media is None:
            text.append(segment)
        else:
            yield text
            yield segment.media
            text = []
    yield text


def _prepared(
    media: DecodedMedia, chunk_makers: ChunkMakers, vocab_size: int, guard: Guard
) -> list[list[int] | MediaChunk]:
    """Return the tokens and chunks of an image or a recording, the chunks with their keys."""
    prepare, param = chunk_makers.get(media.kind), media.param
    if prepare is None:
        taken = " and ".join(("text", *(_NAMES[kind] for kind in chunk_makers))) if chunk_makers else "text only"
        raise InvalidRequest(f"{param}: this model takes {taken}, not {_NAMES[media.kind]}", param)
    try:
        parts = prepare(media)
    except InvalidRequest as error:
        raise InvalidRequest(f"{param}: {error.message}", param) from error
    found: list[list[int] | MediaChunk] = []
    for number, part in enumerate(parts):
        if isinstance(part, MediaChunk):
            found.append(evolve(part, kind=media.kind, key=f"{media.kind} {_content(media)} {number}"))
        else:
            found.append([int(token_id) for token_id in part])
    chunks = [part for part in found if isinstance(part, MediaChunk)]
    text = [token_id for part in found if not isinstance(part, MediaChunk) for token_id in part]
    if not chunks or any(chunk.num_tokens < 1 or chunk.num_positions < 1 for chunk in chunks):
        raise guard.mistake(f"prepare_{media.kind}", "gave no chunk, or one without tokens or positions", prepare)
    if not all(0 <= token_id < vocab_size for token_id in text):
        raise guard.mistake(f"prepare_{media.kind}", "gave token ids outside the vocabulary", prepare)
    return found


def _content(media: DecodedMedia) -> str:
    """Return a text that is equal for equal content only."""
    if isinstance(media, DecodedAudio):
        return f"{media.digest} {media.rate}"
    return f"{media.digest} {media.width}x{media.height} {media.max_tokens}"


@define
class Embeddings:
    """Embeddings by namespace and the key of their chunk.

    Attributes:
        max_bytes: maximum number of bytes of kept embeddings and of chunks; an embedding without room is not kept.
        num_bytes: bytes of the embeddings that are kept.
        num_held: bytes of the chunks of requests that have not ended.
        num_encoded: chunks that were encoded.
        num_reused: chunks that were not encoded, because their embedding was kept.
    """

    max_bytes: int
    num_bytes: int = 0
    num_held: int = 0
    num_encoded: int = 0
    num_reused: int = 0
    _kept: dict[tuple[str, str], Embedding] = field(factory=dict, init=False)  # least recently used first

    def get(self, namespace: str, key: str) -> Embedding | None:
        """Return the embedding of a chunk, and count its use; None if it is not kept."""
        found = self._kept.pop((namespace, key), None)
        if found is not None:
            self._kept[namespace, key] = found
            self.num_reused += 1
        return found

    def put(self, namespace: str, key: str, embedding: Embedding) -> None:
        """Keep an embedding that was just computed, and drop others until it fits."""
        self.num_encoded += 1
        if embedding.nbytes + self.num_held > self.max_bytes:
            return
        self._make_room(embedding.nbytes)
        self._kept[namespace, key] = embedding
        self.num_bytes += embedding.nbytes

    def hold(self, num_bytes: int) -> None:
        """Count the chunks of a request."""
        self.num_held += num_bytes
        self._make_room(0)

    def release(self, num_bytes: int) -> None:
        """Count the chunks of a request no longer."""
        self.num_held -= num_bytes

    def _make_room(self, num_bytes: int) -> None:
        while self._kept and self.num_bytes + self.num_held + num_bytes > self.max_bytes:
            oldest = next(iter(self._kept))
            self.num_bytes -= self._kept.pop(oldest).nbytes

    def add_to(self, metrics: EngineMetrics) -> EngineMetrics:
        """Return the statistics of an engine with those of its images."""
        return replace(
            metrics,
            num_encoded_chunks=self.num_encoded,
            num_reused_chunks=self.num_reused,
            num_embedding_bytes=self.num_bytes,
        )
