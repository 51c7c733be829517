"""Embeddings of chunks that are kept for later requests; the least recently used one is dropped first.

Used by the scheduler on the engine thread. A chat whose KV positions were evicted, or another one about the same image,
then needs no encoding. Embeddings are known by the content of an image only, never by its address, and shared within a
namespace only, as cached prefixes are: otherwise the time of an answer would tell which images others have sent.
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
        max_bytes: maximum number of bytes that are kept; a larger embedding is not kept.
        num_bytes: bytes that are kept.
        num_encoded: chunks that were encoded.
        num_reused: chunks that were not encoded, because their embedding was kept.
    """

    max_bytes: int
    num_bytes: int = 0
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
        if embedding.nbytes > self.max_bytes:
            return
        while self.num_bytes + embedding.nbytes > self.max_bytes:
            oldest = next(iter(self._kept))
            self.num_bytes -= self._kept.pop(oldest).nbytes
        self._kept[namespace, key] = embedding
        self.num_bytes += embedding.nbytes

    def add_to(self, metrics: EngineMetrics) -> EngineMetrics:
        """Return the statistics of an engine with those of its images."""
        return replace(
            metrics,
            num_encoded_chunks=self.num_encoded,
            num_reused_chunks=self.num_reused,
            num_embedding_bytes=self.num_bytes,
        )
