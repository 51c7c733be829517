"""The contract of engines, which serve whole requests: core's own for runners, and those that backends open.

Used from one event loop. Users of an engine cannot distinguish the two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from attrs import field, frozen

from enginehouse.contract.types import (
    EngineRequest,
    EngineStats,
    Event,
    ModelInfo,
    PoolingRequest,
    PoolingResult,
    Segment,
)

__all__ = [
    "Engine",
    "EngineStream",
    "PlacedStream",
    "Placement",
    "PoolingEngine",
    "ReplicaStats",
    "ReplicatedEngine",
    "placement_of",
]


@frozen(kw_only=True)
class Placement:
    """The replica that answers a request, of an engine with several; shown to clients.

    Attributes:
        replica: its name, printable ASCII; without credentials.
        reason: why it was chosen, in one word: ``prefix``, ``balance``, ``load``.
        matched: share of the prompt that it was sent before, 0 to 1; an estimate.
        num_tried: replicas that were tried before.
    """

    replica: str
    reason: str
    matched: float = 0.0
    num_tried: int = 0


@frozen(kw_only=True)
class ReplicaStats:
    """Current statistics of one replica.

    Attributes:
        is_up: it takes requests.
        num_running: requests of this engine that it is answering.
        num_requests: requests sent to it so far, by the reason of their :class:`Placement`.
    """

    replica: str
    is_up: bool
    num_running: int
    num_requests: Mapping[str, int] = field(factory=dict)


class EngineStream(Protocol):
    """The events of a request that an engine has accepted.

    Iterating yields non-empty batches of events as they happen, and ends after
    :class:`.RequestFinished`; it raises an EnginehouseError if the request fails.

    Calls:
        __aiter__: once per request; server, event loop of the engine; must not block.
        cancel: when the client disconnects, and after the end; server, event loop of the engine; must not block.
    """

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens; some engines learn it only at the end."""

    @property
    def prompt_token_ids(self) -> Sequence[int] | None:
        """The prompt of a request with ``return_token_ids``; None for others, and if the engine does not know it."""

    @property
    def num_waiting_events(self) -> int:
        """Number of events that have arrived and are not read yet; 0 for engines that produce them on demand."""

    def __aiter__(self) -> AsyncIterator[Sequence[Event]]:
        """Batches of events; may be iterated once."""

    def cancel(self) -> None:
        """Stop generating and free the slot; idempotent, also after the end. Iteration then ends without an error."""


class Engine(Protocol):
    """An engine that serves whole requests. Its methods are called on one event loop.

    It is a loop of this engine alone, in a thread of its own: a call that blocks delays the engine's own requests only.
    If the loop is blocked for longer than ``limits.plugin_timeout_s``, these requests fail with the plugin's name, and
    the model is opened again. What is awaited is not limited. Engines of the distribution ``enginehouse`` run on the
    server's event loop.

    Calls:
        submit: for each request; server, event loop of the engine; must not block.
        tokenize: for ``/tokenize``, and to count prompts; server, event loop of the engine; must not block.
        detokenize: for ``/detokenize``; server, event loop of the engine; must not block.
        pieces: for token texts in responses; server, event loop of the engine; must not block.
        stats: when metrics are read; server, event loop of the engine; must not block.
        close: once; server, event loop of the engine; must not block.
    """

    info: ModelInfo

    async def submit(self, request: EngineRequest) -> EngineStream:
        """Queue a request; returns when it is accepted, before any token is generated.

        Raises:
            RequestError: the request cannot be served (too long, bad ids, unsupported field).
            Overloaded: the queue is full.
            EngineDead: the engine has stopped.
        """

    async def tokenize(self, segments: Sequence[Segment], add_special: bool) -> list[int]:
        """Return the token ids of a prompt, exactly as ``submit`` would encode it."""

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of the ids, control tokens by name. Raises InvalidRequest for ids outside the vocabulary."""

    async def pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each id, as in ``Tokenizer.token_bytes``. Raises like ``detokenize``."""

    async def stats(self) -> EngineStats:
        """Return current statistics of the engine."""

    async def close(self) -> None:
        """Stop the engine; running requests end with EngineDead."""


@runtime_checkable
class PoolingEngine(Protocol):
    """An engine that also answers pooling requests, such as one over another server; its ``info`` has the task.

    Calls:
        pool: for each request to a pooling model; server, event loop of the engine; must not block.
    """

    async def pool(self, request: PoolingRequest) -> PoolingResult:
        """Return the rows of a request; cancelled if its client disconnects.

        Raises:
            RequestError: the request cannot be served: a text is too long, or the model does not offer what is asked.
            Overloaded: the queue is full.
            EngineDead: the engine has stopped.
        """


@runtime_checkable
class PlacedStream(Protocol):
    """Optional interface of the streams of an engine with several replicas.

    Calls:
        placement: with the response's head and at its end; server, event loop of the engine; must not block.
    """

    @property
    def placement(self) -> Placement | None:
        """The replica that answers; another one if it failed before the first token. None with a single replica."""


@runtime_checkable
class ReplicatedEngine(Protocol):
    """Optional interface of engines with several replicas, for metrics; only for those of this distribution.

    Calls:
        replicas: when metrics are read; server, event loop; must not block.
    """

    @property
    def replicas(self) -> Sequence[ReplicaStats]:
        """Statistics of all replicas; empty with a single one."""


def placement_of(stream: EngineStream) -> Placement | None:
    """Return the placement of a stream that has one."""
    placement: Placement | None = getattr(stream, "placement", None)  # a check of the protocol costs more
    return placement
