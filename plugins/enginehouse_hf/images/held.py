"""The images of all open sequences of a runner. Both runners keep one."""

from __future__ import annotations

from collections.abc import Sequence

from enginehouse.contract.media import MediaInput
from enginehouse_backendkit.media_chunks import NO_CHUNKS, ChunkPlace, Chunks

__all__ = ["HeldImages"]


class HeldImages:
    """Chunks by sequence; false if no sequence has one."""

    def __init__(self) -> None:
        self._chunks: dict[int, Chunks] = {}

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def of(self, sequence: int) -> Chunks:
        """Return the chunks of a sequence."""
        return self._chunks.get(sequence, NO_CHUNKS)

    def put(self, sequence: int, chunks: Chunks) -> None:
        """Set the chunks of a sequence."""
        if chunks.places:
            self._chunks[sequence] = chunks
        else:
            self._chunks.pop(sequence, None)

    def append(self, sequence: int, start: int, media: MediaInput) -> None:
        """Add the chunk that was appended to a sequence of ``start`` tokens."""
        place = ChunkPlace(start, media.chunk.num_tokens, media.chunk.num_positions)
        self.put(sequence, self.of(sequence).adding(place))

    def saved_positions(self, sequences: Sequence[int]) -> list[int]:
        """Return for each sequence by how much the position of its next token is less than its length (M-RoPE)."""
        return [sum(place.saved_positions for place in self.of(sequence).places) for sequence in sequences]
