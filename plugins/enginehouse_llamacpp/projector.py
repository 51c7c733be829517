"""Images and recordings through llama.cpp's ``mtmd``: their tokens and embeddings.

The only module that calls ``mtmd``, whose interface changes often. It is given pixels and samples, never a file: mtmd
would decode files in this process. Computing an embedding and giving it to the text model are separate; the second is
:class:`enginehouse_llamacpp.batch.EmbeddingBatch`.

Source: mtmd.h of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.errors import InvalidRequest, InvalidSpan, ModelLoadError, RunnerError
from enginehouse.contract.media import DecodedAudio, DecodedImage, MediaChunk, MediaKind
from enginehouse_llamacpp.library import Library
from enginehouse_llamacpp.model import ProgressWatch
from enginehouse_llamacpp.options import LlamaCppOptions
from enginehouse_llamacpp.projector_files import (
    TURN_OFF,
    has_audio,
    identity_of,
    read_projector,
    recording_bytes,
    token_bytes,
)

__all__ = ["Projector"]

_log = logging.getLogger(__name__)

_TEXT = 0
_AUDIO = 2
_PROBE_SIDE = 224
_SHRINK_STEP = 0.9
_LEAST_SIDE = 16
"""Images are not made smaller than this, in pixels."""

_LEAST_SECONDS = 0.5
"""Recordings are filled up with silence to this: mtmd ends the process for some that are shorter than a few frames."""


@frozen(eq=False)
class _Chunk:
    """Value of ``MediaChunk.data``: mtmd's chunk with its pixels or spectrum, freed with this object.

    Attributes:
        is_causal: False if its tokens attend to each other, so that they are computed at once.
    """

    address: int
    is_causal: bool


class Projector:
    """One ``mtmd_context``. :meth:`prepare` is thread-safe; :meth:`encode` is called on one thread.

    Args:
        model: address of the ``llama_model``.
        threads: CPU threads that encode.
        batch_tokens: tokens that the text model computes at once, for images that may not be divided.

    Attributes:
        batch_tokens: as given.
        width: numbers of a token's embedding.
        path: its file.
        identity: text that another projector, or another setting of its images, does not have.
        kinds: kinds of media that it takes.
        audio_rate: samples of a second of recordings; 0 if it takes none.

    Raises:
        ModelLoadError: the file is damaged, of another model, or of a kind that is not supported.
    """

    def __init__(
        self,
        library: Library,
        model: int,
        path: Path,
        options: LlamaCppOptions,
        *,
        threads: int,
        batch_tokens: int,
        progress: Callable[[float], None],
    ) -> None:
        header = read_projector(path)
        self._header, self._token_bytes = header, token_bytes(header)
        self.path = path
        limits = f"{options.image_min_tokens} {options.image_max_tokens}"
        self.identity = f"{identity_of(path)}, image tokens {limits}"
        self._library, self._mtmd = library, library.mtmd
        self.batch_tokens = batch_tokens
        vocab = library.bindings.llama_model_get_vocab(model)
        self._vocab_size = library.bindings.llama_vocab_n_tokens(vocab)
        self.width = library.bindings.llama_model_n_embd_inp(model)
        self._context = self._open(model, options, threads, progress)
        try:
            vision: tuple[MediaKind, ...] = ("image",) if self._mtmd.mtmd_support_vision(self._context) else ()
            hears = has_audio(header) and self._mtmd.mtmd_support_audio(self._context)
            self.kinds: tuple[MediaKind, ...] = (*vision, "audio") if hears else vision
            self.audio_rate = int(self._mtmd.mtmd_get_audio_sample_rate(self._context)) if hears else 0
            self._is_mrope = bool(self._mtmd.mtmd_decode_use_mrope(self._context))
            self._check()
        except BaseException:
            self.close()
            raise

    def _open(self, model: int, options: LlamaCppOptions, threads: int, progress: Callable[[float], None]) -> int:
        mtmd, library = self._mtmd, self._library
        watch = ProgressWatch(progress)
        params = mtmd.mtmd_context_params_default()
        params.use_gpu = library.has_gpu and options.n_gpu_layers != 0
        params.print_timings = False
        params.n_threads = threads
        params.image_min_tokens = options.image_min_tokens or -1
        params.image_max_tokens = options.image_max_tokens or -1
        if options.flash_attn is not None:
            params.flash_attn_type = int(options.flash_attn)
        params.progress_callback = mtmd.mtmd_progress_callback(watch)
        library.log.clear()
        context = mtmd.mtmd_init_from_file(str(self.path).encode(), model, params)
        if watch.error is not None:
            if context:
                mtmd.mtmd_free(context)
            raise watch.error
        if not context:
            raise ModelLoadError(
                f"{self.path}: llama.cpp cannot use this projector: {library.log.reason()}; {TURN_OFF}"
            )
        return int(context)

    def _check(self) -> None:
        """Raise ModelLoadError if a plain image, or a second of silence, cannot be read.

        A projector of both kinds is used for images alone if it cannot read recordings.
        """
        side, rate = _PROBE_SIDE, self.audio_rate
        try:
            if "image" in self.kinds:
                self.prepare(DecodedImage(digest="", width=side, height=side, rgb=bytes(3 * side * side)))
        except InvalidRequest as error:
            raise ModelLoadError(f"{self.path}: {error.message}; {TURN_OFF}") from error
        try:
            if "audio" in self.kinds:
                self.prepare_audio(DecodedAudio(digest="", rate=rate, samples=bytes(4 * rate)))
        except InvalidRequest as error:
            if self.kinds == ("audio",):
                raise ModelLoadError(f"{self.path}: {error.message}; {TURN_OFF}") from error
            _log.warning("%s: takes images only: %s", self.path, error.message)
            self.kinds, self.audio_rate = ("image",), 0

    def prepare(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of an image; see :class:`enginehouse.contract.media.MediaRunner`."""
        if min(image.width, image.height) < 1 or len(image.rgb) != 3 * image.width * image.height:
            raise InvalidRequest(
                f"the image has {len(image.rgb)} bytes, not {image.width} x {image.height} x 3", image.param or None
            )
        pixels = np.frombuffer(image.rgb, np.uint8).reshape(image.height, image.width, 3)
        if image.max_tokens is not None:
            pixels = self._shrunk(pixels, image.max_tokens, image.param)
        height, width, _ = pixels.shape
        address = pixels.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        with self._chunks(self._mtmd.mtmd_bitmap_init(width, height, address), image.param) as chunks:
            return self._parts(chunks, image.param)

    def prepare_audio(self, audio: DecodedAudio) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of a recording; see :class:`enginehouse.contract.media.AudioRunner`."""
        if audio.rate != self.audio_rate or not audio.samples or len(audio.samples) % 4:
            found = f"{len(audio.samples)} bytes at {audio.rate} samples a second"
            raise InvalidRequest(f"the recording has {found}, not float32 at {self.audio_rate}", audio.param or None)
        samples = np.frombuffer(audio.samples, np.float32)
        if (missing := int(_LEAST_SECONDS * audio.rate) - len(samples)) > 0:
            samples = np.pad(samples, (0, missing))
        address = samples.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        with self._chunks(self._mtmd.mtmd_bitmap_init_from_audio(len(samples), address), audio.param) as chunks:
            return self._parts(chunks, audio.param, len(samples) / audio.rate)

    def _parts(self, chunks: int, param: str, seconds: float = 0.0) -> list[list[int] | MediaChunk]:
        """Return token ids and chunks of ``mtmd_input_chunks``; ``seconds`` of a recording."""
        mtmd = self._mtmd
        addresses = [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]
        num_audio = sum(mtmd.mtmd_input_chunk_get_type(address) == _AUDIO for address in addresses)
        audio_bytes = recording_bytes(self._header, seconds, num_audio) if num_audio else 0
        found = [self._read(address, param, audio_bytes) for address in addresses]
        if not any(isinstance(item, MediaChunk) for item in found):
            raise InvalidRequest("llama.cpp made no tokens of it", param or None)
        return found

    @contextmanager
    def _chunks(self, bitmap: Any, param: str) -> Iterator[int]:
        """Give the ``mtmd_input_chunks`` of a bitmap, which is then freed."""
        mtmd = self._mtmd
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            if code := mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False):
                reason = self._library.log.reason()
                raise InvalidRequest(f"llama.cpp cannot read it (code {code}): {reason}", param or None)
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _count(self, width: int, height: int, param: str) -> int:
        """Return the tokens of an image of that size, those around it included; mtmd needs no pixels for it."""
        with self._chunks(self._mtmd.mtmd_bitmap_init(width, height, None), param) as chunks:
            return int(self._mtmd.mtmd_helper_get_n_tokens(chunks))

    def _shrunk(self, pixels: NDArray[np.uint8], max_tokens: int, param: str) -> NDArray[np.uint8]:
        """Return the image made so small that it has at most ``max_tokens``; the same one if its size plays no part."""
        height, width, _ = pixels.shape
        count = self._count(width, height, param)
        if count <= max_tokens or self._count(_LEAST_SIDE, _LEAST_SIDE, param) >= count:
            return pixels
        while count > max_tokens and min(width, height) > _LEAST_SIDE:
            factor = min(math.sqrt(max_tokens / count), _SHRINK_STEP)
            width, height = int(width * factor), int(height * factor)
            count = self._count(width, height, param)
        return _averaged(pixels, width, height)

    def _read(self, address: int, param: str, audio_bytes: int) -> list[int] | MediaChunk:
        """Return the token ids of a chunk, or the chunk itself; ``audio_bytes`` is its memory if it is a recording."""
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(address) == _TEXT:
            count = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(address, ctypes.byref(count))
            ids = [int(tokens[index]) for index in range(count.value)]
            if any(not 0 <= token_id < self._vocab_size for token_id in ids):
                raise InvalidRequest(
                    f"the projector {self.path.name} marks media with tokens that the model's vocabulary lacks; "
                    "it belongs to another model",
                    param or None,
                )
            return ids
        num_tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(address))
        kind: MediaKind = "audio" if mtmd.mtmd_input_chunk_get_type(address) == _AUDIO else "image"
        is_causal = not mtmd.mtmd_decode_use_non_causal(self._context, address)
        if not is_causal and num_tokens > self.batch_tokens:
            what = "recording" if kind == "audio" else "image"
            raise InvalidRequest(
                f"the {what} has {num_tokens} tokens, which this model computes at once, but only {self.batch_tokens} "
                f"fit: set n_batch, and n_ubatch if it is set, to at least {num_tokens}",
                param or None,
            )
        copied = mtmd.mtmd_input_chunk_copy(address)
        data = _Chunk(int(copied), is_causal)
        weakref.finalize(data, mtmd.mtmd_input_chunk_free, copied)
        return MediaChunk(
            num_tokens=num_tokens,
            num_positions=int(mtmd.mtmd_input_chunk_get_n_pos(address)),
            data=data,
            num_bytes=audio_bytes if kind == "audio" else num_tokens * self._token_bytes,
            kind=kind,
        )

    def positions(self, chunk: MediaChunk, start: int) -> NDArray[np.int32]:
        """Positions of a chunk's tokens if the token before it has ``start - 1``, (1 or 4, num_tokens) int32."""
        count = chunk.num_tokens
        in_order = np.arange(start, start + count, dtype=np.int32)[np.newaxis]
        if not self._is_mrope:
            return in_order
        if chunk.kind == "audio":
            return np.repeat(in_order, 4, axis=0)
        found = (self._mtmd.mtmd_decoder_pos * count)()  # time, x, y and a fourth one, for each token
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_image(_data(chunk).address)
        self._mtmd.mtmd_helper_image_get_decoder_pos(tokens, start, found)
        return np.frombuffer(found, np.uint32).astype(np.int32).reshape(count, 4).T[[0, 2, 1, 3]]

    def is_causal(self, chunk: MediaChunk) -> bool:
        """False if the tokens of a chunk attend to each other, so that they are computed at once."""
        return _data(chunk).is_causal

    def encode(self, chunk: MediaChunk) -> NDArray[np.float32]:
        """Compute an embedding, (num_tokens, width) float32, a copy."""
        self._library.log.clear()
        if code := self._mtmd.mtmd_encode_chunk(self._context, _data(chunk).address):
            raise RunnerError(
                f"llama.cpp cannot encode an image or a recording (code {code}): {self._library.log.reason()}"
            )
        embedding = np.empty((chunk.num_tokens, self.width), np.float32)
        ctypes.memmove(embedding.ctypes.data, self._mtmd.mtmd_get_output_embd(self._context), embedding.nbytes)
        return embedding

    def close(self) -> None:
        """Free the context; before the model is freed."""
        self._mtmd.mtmd_free(self._context)


def _data(chunk: MediaChunk) -> _Chunk:
    data = chunk.data
    if not isinstance(data, _Chunk):
        raise InvalidSpan("the chunk was made by another runner")
    return data


def _averaged(pixels: NDArray[np.uint8], width: int, height: int) -> NDArray[np.uint8]:
    """Return a smaller image whose pixels are averages, (height, width, 3) uint8."""
    rows, columns = (np.arange(new) * old // new for new, old in zip((height, width), pixels.shape[:2], strict=True))
    sums = np.add.reduceat(np.add.reduceat(pixels, rows, axis=0, dtype=np.uint32), columns, axis=1)
    areas = np.outer(np.diff(rows, append=pixels.shape[0]), np.diff(columns, append=pixels.shape[1]))
    return (sums // areas[:, :, np.newaxis]).astype(np.uint8)
