"""Similarities of requests to the examples of a router, computed by a model for embeddings.

Called by the planner. The examples are embedded once, with the first request; if that takes longer than a request may
wait, it goes on, and later requests find them done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.errors import UnsupportedParameter
from enginehouse.contract.router import ComparesTexts
from enginehouse.contract.surface import new_id
from enginehouse.contract.types import GenerateRequest, PoolingRequest, PoolingResult, PoolText

Pool = Callable[[PoolingRequest], Awaitable[PoolingResult]]
"""Function that returns the rows of a pooling request, after loading its model if necessary."""

_PROMPTS = ("query", "search_query")
"""Names that models give to the prompt before short texts."""


class Similarities:
    """Compares requests with the examples of one router.

    Args:
        pool: embeds texts.
    """

    def __init__(self, router: ComparesTexts, pool: Pool) -> None:
        self._router = router
        self._pool = pool
        self._examples: asyncio.Task[NDArray[np.float32]] | None = None

    async def of(self, text: str, request: GenerateRequest) -> Sequence[float]:
        """Return the similarities of a request's text to the examples, -1 to 1; none for a text without words.

        Raises:
            EnginehouseError: the embedder cannot be used.
        """
        if not text.strip():
            return ()
        if self._examples is None or (self._examples.done() and _has_failed(self._examples)):
            self._examples = asyncio.ensure_future(self._embed(self._router.examples()))
        row, rows = await asyncio.gather(self._embed([text], request), asyncio.shield(self._examples))
        similarities: Sequence[float] = (rows @ row[0]).tolist()
        return similarities

    async def _embed(self, texts: Sequence[str], request: GenerateRequest | None = None) -> NDArray[np.float32]:
        asked = PoolingRequest(
            request_id=new_id("route-"),
            model=self._router.embedder,
            task="embed",
            inputs=tuple(map(PoolText, texts)),
            truncate="end",
            prompt_hints=_PROMPTS,
            priority=0 if request is None else request.priority,
            caller="" if request is None else request.caller,
            namespace="" if request is None else request.namespace,
        )
        try:
            return (await self._pool(asked)).array
        except UnsupportedParameter as error:
            if error.param != "truncate":
                raise
            # Of a server that cannot be asked to shorten: it may still take the text.
            return (await self._pool(msgspec.structs.replace(asked, truncate="none"))).array


def _has_failed(task: asyncio.Task[NDArray[np.float32]]) -> bool:
    return task.cancelled() or task.exception() is not None
