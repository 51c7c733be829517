"""Engine snapshots and statistics, for operators and metrics. These values cross the worker link.

Support is optional: ``isinstance`` tells which engines are :class:`Inspectable`. Tokens and texts are not included.
"""

# msgspec resolves annotations when a message is encoded, so no name may be imported under TYPE_CHECKING.
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, Protocol, runtime_checkable

import msgspec

from enginehouse.contract.types import EngineStats
from enginehouse.contract.usage import Usage

__all__ = [
    "BATCH_SIZES",
    "EngineMetrics",
    "EngineView",
    "Inspectable",
    "Phase",
    "PrefixView",
    "RequestView",
    "SequenceView",
    "batch_size_bucket",
]

Phase = Literal["queued", "prefill", "decode", "paused"]
"""State of a request or a choice. *Paused* is one that was preempted and will continue."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the batch size buckets, in sequences per step; one more bucket holds larger steps."""


def batch_size_bucket(num_sequences: int) -> int:
    """Return the bucket index of a step of ``num_sequences`` (at least 1)."""
    return min((num_sequences - 1).bit_length(), len(BATCH_SIZES))


class SequenceView(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a request.

    Attributes:
        num_kv_tokens: positions that it holds in the KV cache; shared prefixes count for each sequence.
        is_thinking: its next token belongs to its reasoning.
    """

    choice: int
    phase: Phase
    num_kv_tokens: int
    num_completion_tokens: int
    is_thinking: bool


class RequestView(msgspec.Struct, frozen=True, array_like=True):
    """A request in the engine, with those of its choices that have not ended. ``usage`` has its counts so far."""

    request_id: str
    age_s: float
    usage: Usage
    sequences: tuple[SequenceView, ...]


class PrefixView(msgspec.Struct, frozen=True, array_like=True):
    """A finished sequence in the prefix cache. ``num_hits`` counts the prompts that have reused some of it."""

    namespace: str
    num_tokens: int
    num_hits: int


class EngineView(msgspec.Struct, frozen=True, array_like=True):
    """Snapshot of an engine between two steps.

    Attributes:
        num_cache_tokens: KV positions in total.
        num_free_tokens: free KV positions; those of the prefix cache count as taken.
        prefixes: entries of the prefix cache, most recently used first.
    """

    num_slots: int
    num_cache_tokens: int
    num_free_tokens: int
    requests: tuple[RequestView, ...]
    prefixes: tuple[PrefixView, ...]


class EngineMetrics(msgspec.Struct, frozen=True, array_like=True):
    """Counters of an engine since it was opened. A worker sends them about once a second while it works.

    Attributes:
        num_cache_tokens: KV positions in total.
        steps_by_size: number of steps per bucket of :data:`BATCH_SIZES`, and of larger steps.
        num_batched: sum over all steps of their sequences.
        rss_bytes: memory of the worker process; 0 if unknown or if the worker is a thread.
        plugin_failures: number of failures of plugins, by plugin and kind of object.
        num_pooled_texts: texts that a pooling model has computed, and ``num_pooled_tokens`` their tokens.
        num_cached_texts: texts whose rows came from its cache.
        num_encoded_chunks: chunks of images that were encoded; ``num_reused_chunks`` those whose embedding was kept.
        num_embedding_bytes: bytes of the embeddings that are kept.
    """

    stats: EngineStats = EngineStats()
    num_cache_tokens: int = 0
    steps_by_size: tuple[int, ...] = ()
    num_batched: int = 0
    rss_bytes: int = 0
    plugin_failures: dict[tuple[str, str], int] = {}
    num_pooled_texts: int = 0
    num_pooled_tokens: int = 0
    num_cached_texts: int = 0
    num_encoded_chunks: int = 0
    num_reused_chunks: int = 0
    num_embedding_bytes: int = 0

    def __add__(self, later: "EngineMetrics") -> "EngineMetrics":
        """Return the sum of the counters of two engines; gauges are those of the later one."""
        steps = zip_longest(self.steps_by_size, later.steps_by_size, fillvalue=0)
        preemptions = self.stats.num_preemptions + later.stats.num_preemptions
        return EngineMetrics(
            stats=msgspec.structs.replace(later.stats, num_preemptions=preemptions),
            num_cache_tokens=later.num_cache_tokens,
            steps_by_size=tuple(map(sum, steps)),
            num_batched=self.num_batched + later.num_batched,
            rss_bytes=later.rss_bytes,
            plugin_failures=dict(Counter(self.plugin_failures) + Counter(later.plugin_failures)),
            num_pooled_texts=self.num_pooled_texts + later.num_pooled_texts,
            num_pooled_tokens=self.num_pooled_tokens + later.num_pooled_tokens,
            num_cached_texts=self.num_cached_texts + later.num_cached_texts,
            num_encoded_chunks=self.num_encoded_chunks + later.num_encoded_chunks,
            num_reused_chunks=self.num_reused_chunks + later.num_reused_chunks,
            num_embedding_bytes=later.num_embedding_bytes,
        )


@runtime_checkable
class Inspectable(Protocol):
    """An engine that supports inspection. Its methods are called where those of the engine are."""

    metrics: EngineMetrics
    """The last counters received; reading them never blocks."""

    async def view(self) -> EngineView:
        """Take a snapshot, after the running step."""
        ...

    async def cached_tokens(self, token_ids: Sequence[int], namespace: str) -> int:
        """Return the number of leading tokens of a prompt that the prefix cache holds for requests of a namespace."""
        ...

    async def stop_thinking(self, request_id: str) -> int:
        """Force the end of reasoning of a request's choices. Returns the number of choices, 0 if none is reasoning."""
        ...
