"""What an engine shows of its inside: to whoever operates it, and to metrics. Values that cross the worker link.

An engine need not show anything: ``isinstance`` tells which are :class:`Inspectable`. Tokens and texts are not shown.
"""

# Annotations are resolved by msgspec when a message is encoded, so no name may hide in TYPE_CHECKING.
from typing import Literal, Protocol, runtime_checkable

import msgspec

from enginehouse.contract.types import EngineStats

__all__ = [
    "BATCH_SIZES",
    "EngineFigures",
    "EngineView",
    "Inspectable",
    "Phase",
    "PrefixView",
    "RequestView",
    "SequenceView",
    "batch_size_bucket",
]

Phase = Literal["queued", "prefill", "decode", "paused"]
"""Where a request or a choice is. *Paused* is one that ran, lost its place, and will go on."""

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds of the buckets that steps are counted in by their number of sequences; one more holds the rest."""


def batch_size_bucket(num_sequences: int) -> int:
    """Which bucket a step of ``num_sequences`` (at least 1) belongs to."""
    return min((num_sequences - 1).bit_length(), len(BATCH_SIZES))


class SequenceView(msgspec.Struct, frozen=True, array_like=True):
    """One choice of a request.

    Attributes:
        num_kv_tokens: positions that it holds in the KV cache; shared beginnings count for each.
        is_thinking: its next token belongs to its reasoning.
    """

    choice: int
    phase: Phase
    num_kv_tokens: int
    num_completion_tokens: int
    is_thinking: bool


class RequestView(msgspec.Struct, frozen=True, array_like=True):
    """A request that the engine holds; of its choices those that have not ended. Times in seconds."""

    request_id: str
    age_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    sequences: tuple[SequenceView, ...]


class PrefixView(msgspec.Struct, frozen=True, array_like=True):
    """A finished sequence that the prefix cache keeps. ``num_hits``: how often a prompt has reused some of it."""

    namespace: str
    num_tokens: int
    num_hits: int


class EngineView(msgspec.Struct, frozen=True, array_like=True):
    """A picture of an engine between two steps.

    Attributes:
        num_cache_tokens: KV positions in all.
        num_free_tokens: of these, how many are free; the prefix cache's count as taken.
        prefixes: entries of the prefix cache, the last used first.
    """

    num_slots: int
    num_cache_tokens: int
    num_free_tokens: int
    requests: tuple[RequestView, ...]
    prefixes: tuple[PrefixView, ...]


class EngineFigures(msgspec.Struct, frozen=True, array_like=True):
    """What an engine has counted since it was opened. A worker sends this about once a second while it works.

    Attributes:
        num_cache_tokens: KV positions in all.
        steps_by_size: number of steps in each bucket of :data:`BATCH_SIZES`, and in one above.
        num_batched: sequences over all steps.
        rss_bytes: memory of the worker process; 0 where it is not known or the worker is a thread.
    """

    stats: EngineStats = EngineStats()
    num_cache_tokens: int = 0
    steps_by_size: tuple[int, ...] = ()
    num_batched: int = 0
    rss_bytes: int = 0


@runtime_checkable
class Inspectable(Protocol):
    """An engine that shows its inside. Used from the server's event loop only."""

    figures: EngineFigures
    """The last that were heard; never waits."""

    async def view(self) -> EngineView:
        """A picture, after the running step."""
        ...

    async def stop_thinking(self, request_id: str) -> int:
        """Close the reasoning of a request's choices by force; returns of how many, 0 when none is thinking."""
        ...
