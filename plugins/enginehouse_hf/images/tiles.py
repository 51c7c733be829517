"""The tiles of images that wait to be encoded.

In the form in which a model takes them, the pixels of an image have up to 24 bytes each, and Idefics3 enlarges small
images to 55 MB. So the tiles of waiting requests are kept up to a limit; beyond it they are made again from the image
when their turn comes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from attrs import define, frozen

from enginehouse.contract.media import DecodedImage
from enginehouse_hf.images.families import Tile

__all__ = ["MAX_WAITING_BYTES", "PreparedImage", "TilePlace", "WaitingTiles"]

MAX_WAITING_BYTES = 2**28
"""Bytes of the tiles that are kept for a model."""


@define(eq=False)
class PreparedImage:
    """An image of a request.

    Attributes:
        image: its pixels.
        settings: of the image processor.
        tiles: empty if they are not kept.
    """

    image: DecodedImage
    settings: Mapping[str, Any]
    tiles: Sequence[Tile] = ()


@frozen(eq=False)
class TilePlace:
    """Value of ``MediaChunk.data``: a tile of an image, by its number, with what is known of it without its pixels."""

    prepared: PreparedImage
    number: int
    num_tokens: int
    grid: tuple[int, int] | None


class WaitingTiles:
    """Tiles by image, up to ``max_bytes`` and those of one image more.

    Args:
        make: makes the tiles of an image; thread-safe, and the same ones each time.
    """

    def __init__(self, make: Callable[[PreparedImage], Sequence[Tile]], max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._make, self._max_bytes = make, max_bytes
        self._lock = threading.Lock()
        self._keepers: WeakSet[PreparedImage] = WeakSet()  # an image leaves with its request
        self._last: tuple[PreparedImage, Sequence[Tile]] | None = None

    def keep(self, prepared: PreparedImage, tiles: Sequence[Tile]) -> None:
        """Keep the tiles of an image if there is room; called on any thread."""
        with self._lock:
            if _num_bytes(tiles) + sum(_num_bytes(one.tiles) for one in self._keepers) <= self._max_bytes:
                prepared.tiles = tiles
                self._keepers.add(prepared)

    def take(self, place: TilePlace) -> Tile:
        """Return a tile; with the last one of an image they are all dropped. Called on one thread."""
        prepared = place.prepared
        tiles = prepared.tiles or self._made_again(prepared)
        if place.number == len(tiles) - 1:
            with self._lock:
                prepared.tiles = ()
                self._keepers.discard(prepared)
            self._last = None
        return tiles[place.number]

    def _made_again(self, prepared: PreparedImage) -> Sequence[Tile]:
        if self._last is None or self._last[0] is not prepared:
            self._last = prepared, self._make(prepared)
        return self._last[1]


def _num_bytes(tiles: Sequence[Tile]) -> int:
    return sum(tensor.nbytes for tile in tiles for tensor in tile.inputs.values())
