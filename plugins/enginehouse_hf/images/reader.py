"""Reads images for one model: its image processor, its vision tower, and the positions of an image's tokens.

:meth:`ImageReader.prepare` runs on several threads; everything else on the engine's.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from enginehouse.contract.errors import InvalidRequest, InvalidSpan, RunnerError
from enginehouse.contract.media import DecodedImage, MediaChunk, MediaInput
from enginehouse_backendkit.fast_tokenizer import ModelText
from enginehouse_backendkit.model_folder import describe_failure
from enginehouse_hf.attention import ForwardAborted
from enginehouse_hf.images.families import CannotRead, Family, Part, Tile
from enginehouse_hf.images.tiles import PreparedImage, TilePlace, WaitingTiles

__all__ = ["ImageReader"]

_MAX_ASPECT_RATIO = 200
"""Of the sides of an image: Qwen-VL's processor takes no more, and LLaVA's makes the shorter side a fixed number of
pixels, whatever becomes of the longer one."""

_PROBE_SIDE = 64
"""Pixels on each side of the image that is read when a model is loaded."""


class ImageReader:
    """The parts of a model that read images.

    Args:
        model: a transformers model with ``get_image_features``.
        processor: the image processor of its files.
        text: its tokenizer.

    Attributes:
        processor: as given.
        aborted: checked in each layer of the vision tower.
        sees_ahead: the tokens of a chunk attend to each other, so it is computed at once.
        identity: text that another image processor, or other settings of it, do not have.

    Raises:
        CannotRead: an image would not have as many tokens as the model has numbers for.
    """

    def __init__(self, model: Any, family: Family, processor: Any, text: ModelText) -> None:
        self._model, self._family, self.processor = model, family, processor
        self._tokenizer = text.tokenizer
        self._tiles = WaitingTiles(partial(_tiles_of, self.processor, family, model.config))
        self._width = int(model.get_input_embeddings().weight.shape[1])
        self.sees_ahead = family.sees_ahead
        self.aborted = threading.Event()
        _check_in_layers(model, self.aborted)
        settings = hashlib.sha256(processor.to_json_string().encode()).hexdigest()
        self.identity = f"{type(processor).__name__} {settings}"
        self._check()

    def _check(self) -> None:
        for name in self._family.names:
            if len(self._tokenizer.encode(name, True)) != 1:
                raise CannotRead(f"its tokenizer lacks the control token {name}")
        try:
            chunks = self.sample(_PROBE_SIDE)
            for chunk in dict.fromkeys((chunks[0], chunks[-1])):
                self.encode(chunk)
        except Exception as error:
            raise CannotRead(f"a small image cannot be read: {describe_failure(error)}") from error

    def sample(self, side: int) -> Sequence[MediaChunk]:
        """Return the chunks of a square image of random pixels, the same ones each time."""
        rgb = np.random.default_rng(0).integers(0, 256, 3 * side**2, np.uint8).tobytes()
        return [part for part in self.prepare(DecodedImage("", side, side, rgb)) if isinstance(part, MediaChunk)]

    def prepare(self, image: DecodedImage) -> Sequence[Sequence[int] | MediaChunk]:
        """Return the tokens and chunks of an image; see :class:`enginehouse.contract.media.MediaRunner`."""
        if min(image.width, image.height) < 1 or len(image.rgb) != 3 * image.width * image.height:
            raise InvalidRequest(
                f"the image has {len(image.rgb)} bytes, not {image.width} x {image.height} x 3", image.param or None
            )
        if max(image.width, image.height) > _MAX_ASPECT_RATIO * min(image.width, image.height):
            raise InvalidRequest(
                f"the image is {image.width} x {image.height}; no side may be over {_MAX_ASPECT_RATIO} times the other",
                image.param or None,
            )
        prepared = PreparedImage(image, self._family.settings)
        found = self._runs(prepared)
        fewer = self._family.fewer_tokens
        if image.max_tokens is not None and fewer is not None and _num_tokens(found) > image.max_tokens:
            # The tokens around it count as well.
            others = _num_tokens(found) - sum(part.num_tokens for part in found if isinstance(part, MediaChunk))
            settings = fewer(self._model.config, self.processor, image.max_tokens - others)
            found = self._runs(PreparedImage(image, {**self._family.settings, **settings}))
        return found

    def _runs(self, prepared: PreparedImage) -> list[list[int] | MediaChunk]:
        parts = _parts_of(self.processor, self._family, self._model.config, prepared)
        runs: list[list[int] | MediaChunk] = [[]]
        tiles: list[Tile] = []
        for part in parts:
            if isinstance(part, Tile):
                chunk = MediaChunk(
                    num_tokens=part.num_tokens,
                    num_positions=part.num_positions,
                    data=TilePlace(prepared, len(tiles), part.num_tokens, part.grid),
                    num_bytes=0 if tiles else len(prepared.image.rgb),
                )
                runs += [chunk, []]
                tiles.append(part)
            else:
                last = runs[-1]
                assert isinstance(last, list)
                last += [part] if isinstance(part, int) else self._tokenizer.encode(part, True)
        self._tiles.keep(prepared, tiles)
        return [run for run in runs if run]

    def encode(self, chunk: MediaChunk) -> Tensor:
        """Return the embedding of a chunk, (num_tokens, hidden_size) in the model's dtype, in host memory.

        Raises:
            ForwardAborted: ``aborted`` was set meanwhile.
        """
        self.aborted.clear()
        tile, model = self._tiles.take(_place(chunk)), self._model
        inputs = {
            name: tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
            for name, tensor in tile.inputs.items()
        }
        with torch.inference_mode():
            found = model.get_image_features(**inputs).pooler_output
            states: Tensor = found if isinstance(found, Tensor) else torch.cat(list(found))
        states = states.reshape(-1, states.shape[-1])
        if states.shape != (chunk.num_tokens, self._width):
            raise RunnerError(f"an image gave {list(states.shape)} numbers, not {[chunk.num_tokens, self._width]}")
        return states.cpu()  # kept ones take no memory of a GPU

    def check(self, media: MediaInput) -> Tensor:
        """Return the embedding of a span's input. Raises InvalidSpan if it is not one of :meth:`encode`."""
        embedding, shape = media.embedding, (_place(media.chunk).num_tokens, self._width)
        if not isinstance(embedding, Tensor) or embedding.shape != shape or media.chunk.num_tokens != shape[0]:
            raise InvalidSpan(f"the embedding of a chunk must be a tensor of shape {shape}")
        return embedding

    def positions(self, chunk: MediaChunk, start: int) -> Tensor:
        """Positions of a chunk's tokens if its first one has ``start``: (n,), or (3, n) for time, row and column."""
        grid = _place(chunk).grid
        if grid is None:
            return torch.arange(start, start + chunk.num_tokens)
        rows, columns = grid
        time = np.zeros(rows * columns, np.int64)
        places = np.stack([time, np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)])
        return torch.from_numpy(places + start)


def _check_in_layers(model: Any, aborted: threading.Event) -> None:
    """Make each layer of the parts that are not text raise ForwardAborted if ``aborted`` is set."""

    def check(_module: nn.Module, _inputs: Any) -> None:
        if aborted.is_set():
            raise ForwardAborted

    text = set(model.get_decoder().modules())
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList) and layers not in text:
            for layer in layers:
                layer.register_forward_pre_hook(check)


def _place(chunk: MediaChunk) -> TilePlace:
    if not isinstance(chunk.data, TilePlace):
        raise InvalidSpan("the chunk was made by another runner")
    return chunk.data


def _parts_of(processor: Any, family: Family, config: Any, prepared: PreparedImage) -> Sequence[Part]:
    from PIL import Image  # noqa: PLC0415 - an optional library

    image = prepared.image
    pixels = Image.frombytes("RGB", (image.width, image.height), image.rgb)
    try:
        processed = processor(pixels, return_tensors="pt", **prepared.settings)
    except ValueError as error:
        raise InvalidRequest(f"the model cannot read the image: {error}", image.param or None) from error
    return family.parts(config, processed)


def _tiles_of(processor: Any, family: Family, config: Any, prepared: PreparedImage) -> Sequence[Tile]:
    return [part for part in _parts_of(processor, family, config, prepared) if isinstance(part, Tile)]


def _num_tokens(parts: Sequence[Sequence[int] | MediaChunk]) -> int:
    return sum(part.num_tokens if isinstance(part, MediaChunk) else len(part) for part in parts)
