"""Chunks of images in a sequence: where they are, and the positions of the tokens after them.

For backend authors: a runner that takes images keeps the :class:`Chunks` of each sequence. Lengths in the contract are
in tokens, and a chunk is cut off as a whole. A token's position is its number, except after an image under M-RoPE: this
numbers an image in two dimensions, and the next token moves on by the image's longer side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

from attrs import frozen

from enginehouse.contract.errors import StateRefused

__all__ = ["NO_CHUNKS", "ChunkPlace", "Chunks"]

_COUNT, _PLACE = struct.Struct("<I"), struct.Struct("<III")


@frozen
class ChunkPlace:
    """An image, or a part of one, in a sequence.

    Attributes:
        start: number of tokens before it.
        num_tokens: its tokens.
        num_positions: positions by which the token after it moves on.
    """

    start: int
    num_tokens: int
    num_positions: int

    @property
    def end(self) -> int:
        """Number of tokens up to its end."""
        return self.start + self.num_tokens

    @property
    def saved_positions(self) -> int:
        """Positions that the tokens after it have less than their number."""
        return self.num_tokens - self.num_positions


@frozen
class Chunks:
    """The chunks of one sequence, in order; a value, so that forks share it."""

    places: tuple[ChunkPlace, ...] = ()

    def position(self, length: int) -> int:
        """Position of the token after the first ``length`` tokens, which must not end inside a chunk."""
        if not self.places:
            return length
        return length - sum(place.saved_positions for place in self.places if place.end <= length)

    def num_tokens(self, position: int) -> int:
        """Number of tokens before ``position``, if a chunk is complete when its first position is there.

        For libraries that give all tokens of an image the position of its first one.
        """
        length = position
        for place in self.places:
            if self.position(place.start) < position:
                length = max(length + place.saved_positions, place.end)
        return length

    def whole(self, length: int) -> int:
        """The largest length up to ``length`` that is not inside a chunk."""
        for place in self.places:
            if place.start < length < place.end:
                return place.start
        return length

    def cut(self, length: int) -> Chunks:
        """Return the chunks of the first ``length`` tokens."""
        if not self.places or self.places[-1].end <= length:
            return self
        return Chunks(tuple(place for place in self.places if place.end <= length))

    def adding(self, place: ChunkPlace) -> Chunks:
        """Return these chunks and one at the end."""
        return Chunks((*self.places, place))

    def to_bytes(self) -> bytes:
        """Return the chunks as bytes, for a saved sequence."""
        return _COUNT.pack(len(self.places)) + b"".join(
            _PLACE.pack(place.start, place.num_tokens, place.num_positions) for place in self.places
        )

    @classmethod
    def from_bytes(cls, data: memoryview, num_tokens: int) -> tuple[Chunks, int]:
        """Read the chunks at the beginning of ``data``; return them, and the number of bytes.

        Raises:
            StateRefused: they do not fit a sequence of ``num_tokens`` tokens.
        """
        if data.nbytes < _COUNT.size:
            raise StateRefused("the data ends before the list of its images")
        (count,) = _COUNT.unpack_from(data)
        end = _COUNT.size + count * _PLACE.size
        if end > data.nbytes:
            raise StateRefused(f"the data ends in the list of its {count} images")
        chunks = cls(tuple(ChunkPlace(*item) for item in _PLACE.iter_unpack(data[_COUNT.size : end])))
        if not all(_is_possible(chunks.places, num_tokens)):
            raise StateRefused("the list of its images does not fit the sequence")
        return chunks, end


def _is_possible(places: tuple[ChunkPlace, ...], num_tokens: int) -> Iterator[bool]:
    for place in places:
        yield 1 <= place.num_positions <= place.num_tokens and place.end <= num_tokens
    for before, after in pairwise(places):
        yield before.end <= after.start


NO_CHUNKS = Chunks()
"""Of a sequence without images."""
