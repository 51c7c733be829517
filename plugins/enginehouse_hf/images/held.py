"""The images of all open sequences of a runner. Both runners keep one."""

from __future__ import annotations

from enginehouse.contract.media import MediaInput
from enginehouse_backendkit.media_chunks import NO_CHUNKS, ChunkPlace, Chunks

__all__ = ["HeldImages"]


class HeldImages:
    """Chunks by sequence.

    Attributes:
        saved_positions: by how much the position of a sequence's next token is less than its length, where it is
            (M-RoPE).
    """

    def __init__(self) -> None:
        self._chunks: dict[int, Chunks] = {}
        self.saved_positions: dict[int, int] = {}

    def of(self, sequence: int) -> Chunks:
        """Return the chunks of a sequence."""
        return self._chunks.get(sequence, NO_CHUNKS)

    def put(self, sequence: int, chunks: Chunks) -> None:
        """Set the chunks of a sequence."""
        self._chunks.pop(sequence, None)
        self.saved_positions.pop(sequence, None)
        if chunks.places:
            self._chunks[sequence] = chunks
        if saved := sum(place.saved_positions for place in chunks.places):
            self.saved_positions[sequence] = saved

    def append(self, sequence: int, start: int, media: MediaInput) -> None:
        """Add the chunk that was appended to a sequence of ``start`` tokens."""
        place = ChunkPlace(start, media.chunk.num_tokens, media.chunk.num_positions)
        self.put(sequence, self.of(sequence).adding(place))
