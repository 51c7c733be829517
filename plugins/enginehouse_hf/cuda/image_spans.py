"""Appends an image to a sequence of the pool: its embedding becomes the input of the layers. Called by the runner."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from enginehouse.contract.backend import RunnerCapabilities, Span
from enginehouse.contract.media import MediaInput
from enginehouse_hf.cuda.networks import Network
from enginehouse_hf.cuda.packing import PackedSpans, pack, pack_chunk
from enginehouse_hf.cuda.positions import PositionPool
from enginehouse_hf.cuda.step import DeviceState, EmbeddedChunk, Step
from enginehouse_hf.images.held import HeldImages
from enginehouse_hf.images.reader import ImageReader

__all__ = ["placed", "probe_logits", "run_chunk"]

_PROBE_SIDE = 64
"""Pixels on each side of the image with which networks are compared."""


def placed(packed: PackedSpans, images: HeldImages) -> PackedSpans:
    """Return packed spans of text with the model's own positions, which are fewer than the tokens after some images."""
    return packed.shifted(images.saved_positions) if images.saved_positions else packed


def run_chunk(
    network: Network,
    state: DeviceState,
    reader: ImageReader,
    images: HeldImages,
    span: Span,
    places: NDArray[np.int32],
    table: NDArray[np.int32],
    *,
    max_tokens: int,
    handles: Sequence[int] = (),
) -> torch.Tensor:
    """Launch the passes of a checked span with a chunk; return no rows, (0, vocab_size).

    Args:
        images: those before it.
        places: (num_tokens,), its places in the pool, which are in ``table`` already.
        max_tokens: largest pass; a chunk whose tokens attend to each other is not divided.
        handles: see :func:`enginehouse_hf.cuda.packing.pack`.
    """
    media = span.input
    assert isinstance(media, MediaInput)
    embedding, num_tokens = reader.check(media), len(places)
    positions = reader.positions(media.chunk, images.of(span.sequence).position(span.start))
    size = num_tokens if reader.sees_ahead else max_tokens
    for begin in range(0, num_tokens, size):
        part = slice(begin, begin + size)
        packed = pack_chunk(span, span.start + begin, places[part], table, handles, sees_ahead=reader.sees_ahead)
        grid = positions[:, part] if positions.dim() > 1 else None
        chunk = EmbeddedChunk.upload(embedding[part], grid, state.table.device)
        logits = network.run(Step.upload(state, placed(packed, images), chunk=chunk))
    return logits


def probe_logits(
    network: Network,
    state: DeviceState,
    reader: ImageReader,
    capabilities: RunnerCapabilities,
    token_ids: NDArray[np.int32],
) -> torch.Tensor | None:
    """(len(token_ids), vocab_size) float32 logits of text after an image; None if both are longer than the context.

    Args:
        state: memory of ``capabilities``; changed.
    """
    chunk = reader.sample(_PROBE_SIDE)[0]
    if chunk.num_tokens + len(token_ids) > capabilities.cache_tokens:
        return None
    positions, images = PositionPool(capabilities, int(token_ids.max()) + 1), HeldImages()
    sequence = positions.open()
    media = MediaInput(chunk, reader.encode(chunk), np.zeros(chunk.num_tokens, np.int32))
    span = Span(sequence, 0, media, "none")
    places = positions.append([span], positions.check([span]))
    run_chunk(network, state, reader, images, span, places, positions.table, max_tokens=capabilities.max_batch_tokens)
    images.append(sequence, 0, media)
    text = [Span(sequence, chunk.num_tokens, token_ids, "all")]
    sizes = positions.check(text)
    packed = pack(text, sizes, positions.append(text, sizes), positions.table)
    return network.run(Step.upload(state, placed(packed, images))).float()
