"""Model access for compressors: a bridge from the compressor's thread to the event loop, where engines run."""

from __future__ import annotations

import asyncio
import concurrent.futures
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse.contract.compressor import Range, ScoredToken
from enginehouse.contract.errors import (
    EnginehouseError,
    GenerationFailed,
    ModelNotReady,
    UnsupportedParameter,
    UnsupportedTask,
)
from enginehouse.contract.preparer import ModelAccess
from enginehouse.contract.types import (
    EngineRequest,
    GenerateRequest,
    PoolingRequest,
    PoolText,
    PromptLogprobs,
    SamplingParams,
    Segment,
    StopParams,
)

__all__ = ["EngineTools", "NoEmbeddings", "Note"]

_T = TypeVar("_T")
_ANSWER_S = 600.0  # safety timeout that only frees the thread; an engine that does not respond has its own limits
_MAX_AT_ONCE = 8  # prompts scored concurrently; leaves room in the queue for requests
_MAX_REMEMBERED = 4096
_PROMPTS = MappingProxyType(
    {"query": ("query", "search_query"), "document": ("document", "passage", "search_document")},
)
"""Names that models give to their prompts."""


class NoEmbeddings(EnginehouseError):
    """The embedder cannot be used. The message does not name it, as its caller may not know it."""


@frozen
class Note:
    """Why a part of a text is kept or not; see :meth:`CompressionTools.explain`."""

    text: int
    part: Range
    reason: str
    score: float | None


class EngineTools:
    """Implements :class:`enginehouse.contract.compressor.CompressionTools` for one compression.

    Args:
        model: the model whose tokens are counted.
        scorer: the model that scores texts.
        embedder: name of the model that embeds them; None if there is none.
        request: source of caller, priority and caching rules only.

    Attributes:
        num_scored_tokens: tokens that the scorer and the embedder have read.
        notes: what the compressor explained.
    """

    def __init__(self, model: ModelAccess, scorer: ModelAccess, embedder: str | None, request: GenerateRequest) -> None:
        self._model, self._scorer, self._embedder, self._request = model, scorer, embedder, request
        self._loop = asyncio.get_running_loop()
        self.num_scored_tokens = 0
        self.notes: list[Note] = []
        self._counts: dict[str, int] = {}
        self._asked: concurrent.futures.Future[Any] | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Cancel the pending call and reject later ones: the request has ended."""
        self._is_stopped = True
        if self._asked is not None:
            self._asked.cancel()

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """See the contract. Counts are cached, since the same text is often counted more than once."""
        unknown = [text for text in dict.fromkeys(texts) if text not in self._counts]
        if len(self._counts) + len(unknown) > _MAX_REMEMBERED:
            self._counts.clear()
            unknown = list(dict.fromkeys(texts))
        counted = self._wait(self._tokenize_all(unknown)) if unknown else []
        self._counts.update(zip(unknown, map(len, counted), strict=True))
        return [self._counts[text] for text in texts]

    def token_ends(self, text: str) -> list[int]:
        """See the contract."""
        return self._wait(self._token_ends(text))

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[list[ScoredToken]]:
        """See the contract."""
        return self._wait(self._score_all(pairs))

    def embed(self, texts: Sequence[str], role: Literal["query", "document"] = "document") -> NDArray[np.float32]:
        """See the contract."""
        return self._wait(self._embed(texts, role))

    def explain(self, text: int, part: Range, reason: str, score: float | None = None) -> None:
        """See the contract."""
        self.notes.append(Note(text, part, reason, score))

    def _wait(self, question: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine on the event loop and return its result."""
        if self._is_stopped:
            question.close()
            raise GenerationFailed("the request has gone")
        self._asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        return self._asked.result(_ANSWER_S)  # type: ignore[no-any-return]

    async def _tokenize_all(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [await self._tokenize(text) for text in texts]

    async def _tokenize(self, text: str) -> Sequence[int]:
        return await self._model.tokenize(text) if text else ()

    async def _token_ends(self, text: str) -> list[int]:
        token_ids = await self._tokenize(text)
        pieces = await self._model.pieces(token_ids)
        return list(_char_ends(text, [len(piece) for piece in pieces]))

    async def _embed(self, texts: Sequence[str], role: Literal["query", "document"]) -> NDArray[np.float32]:
        if self._embedder is None:
            raise NoEmbeddings("the settings of this model name no embedder")
        request = PoolingRequest(
            request_id=f"compress-{uuid.uuid4().hex}",
            task="embed",
            inputs=tuple(map(PoolText, texts)),
            truncate="end",
            prompt_hints=_PROMPTS[role],
            priority=self._request.priority,
            caller=self._request.caller,
            namespace=self._request.namespace,
        )
        try:
            async with self._model.other(self._embedder) as embedder:
                try:
                    result = await embedder.pool(request)
                except UnsupportedParameter as error:
                    if error.param != "truncate":
                        raise
                    # Of a server that cannot be asked to shorten: sentences are rarely too long.
                    result = await embedder.pool(msgspec.structs.replace(request, truncate="none"))
        except ModelNotReady as error:
            raise NoEmbeddings("the embedder is not loaded") from error
        except UnsupportedTask as error:
            raise NoEmbeddings("the embedder is a model for another task") from error
        self.num_scored_tokens += sum(result.num_tokens)
        return result.array

    async def _score_all(self, pairs: Sequence[tuple[str, str]]) -> list[list[ScoredToken]]:
        gate = asyncio.Semaphore(_MAX_AT_ONCE)

        async def score(before: str, text: str) -> list[ScoredToken]:
            async with gate:
                return await self._score(before, text)

        tasks = [asyncio.create_task(score(before, text)) for before, text in pairs]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _score(self, before: str, text: str) -> list[ScoredToken]:
        request = EngineRequest(
            request_id=f"compress-{uuid.uuid4().hex}",
            segments=(Segment(before + text),),
            num_prompt_logprobs=0,
            sampling=SamplingParams(temperature=0.0, seed=0),
            stopping=StopParams(max_tokens=1),
            namespace=self._request.namespace,
            caller=self._request.caller,
            **self._request.options(),
        )
        generation = await self._scorer.generate(request)
        self.num_scored_tokens += generation.num_prompt_tokens
        sizes: list[int] = []
        logprobs: list[float] = []
        try:
            async for batch in generation:
                for event in batch:
                    if isinstance(event, PromptLogprobs):
                        sizes += [len(entry.token) for entry in event.entries]
                        logprobs += [entry.logprob for entry in event.entries]
        finally:
            generation.cancel()
        if len(logprobs) < generation.num_prompt_tokens - 1:
            raise GenerationFailed("the engine ended the scoring of a text before it was complete")
        whole = before + text
        first = len(whole.encode("utf-8", "replace")) - sum(sizes)  # bytes of the token that has no probability
        ends = list(_char_ends(whole, [max(0, first), *sizes]))[1:]
        return [
            ScoredToken(end - len(before), logprob)
            for end, logprob in zip(ends, logprobs, strict=True)
            if end > len(before)
        ]


def _char_ends(text: str, sizes: Sequence[int]) -> Iterator[int]:
    """Yield the end positions in ``text`` of tokens of these byte sizes; approximate if the text has other bytes."""
    if text.isascii():
        yield from (min(end, len(text)) for end in accumulate(sizes))
        return
    char, byte = 0, 0
    encoded = [len(one.encode("utf-8", "replace")) for one in text]
    for end in accumulate(sizes):
        while char < len(encoded) and byte < end:
            byte += encoded[char]
            char += 1
        yield char
