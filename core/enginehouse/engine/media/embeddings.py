"""Embeddings of chunks that are kept for later requests; the least recently used one is dropped first.

Used by the scheduler on the engine thread. A chat whose KV positions were evicted, or another one about the same image,
then needs no encoding. Embeddings are known by the content of an image only, never by its address, and shared within a
namespace only, as cached prefixes are: otherwise the time of an answer would tell which images others have sent.

The chunks of requests take memory too. It is counted against the same limit, and embeddings make room for it.
"""

from __future__ import annotations

from attrs import define, field
from msgspec.structs import replace

from enginehouse.contract.inspection import EngineMetrics
from enginehouse.contract.media import Embedding


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
