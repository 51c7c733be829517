"""Tiles of waiting images: kept up to a limit, and made again beyond it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from enginehouse_hf.images.families import Tile
from enginehouse_hf.images.tiles import PreparedImage, TilePlace, WaitingTiles
from enginehouse_testkit.fake_media import fake_image

pytestmark = pytest.mark.hf

_NUM_TILES = 3
_IMAGE_BYTES = _NUM_TILES * 4 * 10


def make(prepared: PreparedImage) -> Sequence[Tile]:
    pixels = torch.full((_NUM_TILES, 10), float(prepared.image.rgb[0]))
    return [Tile({"pixel_values": pixels[number : number + 1]}, 4) for number in range(_NUM_TILES)]


def test_tiles_are_kept_up_to_a_limit() -> None:
    """There is room for two images; the tiles of others are made once more, all at once."""
    made: list[PreparedImage] = []

    def make_again(prepared: PreparedImage) -> Sequence[Tile]:
        made.append(prepared)
        return make(prepared)

    waiting = WaitingTiles(make_again, 2 * _IMAGE_BYTES)

    def prepare(number: int) -> PreparedImage:
        prepared = PreparedImage(fake_image(number), {})
        waiting.keep(prepared, make(prepared))
        return prepared

    def take_all(prepared: PreparedImage) -> None:
        for number in range(_NUM_TILES):
            tile = waiting.take(TilePlace(prepared, number, 4, None))
            assert float(tile.inputs["pixel_values"][0, 0]) == prepared.image.rgb[0]

    first, second, third = (prepare(number) for number in range(3))
    for prepared in (third, first, second):
        take_all(prepared)
    assert made == [third]

    fourth, fifth = prepare(4), prepare(5)  # the room of those that were taken
    del fourth
    sixth = prepare(6)  # that of a request that has left
    for prepared in (fifth, sixth):
        take_all(prepared)
    assert made == [third]

    take_all(first)  # encoded once more, after it was preempted
    assert made == [third, first]
