"""Compresses the prompts of requests, after parameters are merged and before the chat template. Called by the pipeline.

A compressor that fails costs only its time: the prompt is used unchanged, and the answer's statistics report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from attrs import frozen

from enginehouse.contract.compressor import CompressionTask, Compressor, Range, cut
from enginehouse.contract.errors import ModelNotReady
from enginehouse.contract.types import GenerateRequest
from enginehouse.pipeline.compressing.choosing import Choice, check_settings, choose, choose_for_room
from enginehouse.pipeline.compressing.texts import find_texts, with_texts
from enginehouse.pipeline.compressing.tools import EngineTools
from enginehouse.replay import Replays
from enginehouse.serving import LoadedModel, ModelManager
from enginehouse.settings.config import ModelSettings

__all__ = ["Compressed", "PromptCompressor"]

_MAX_CACHED = 256
_NUM_THREADS = 4
_TIMEOUT_S = 300.0
_SPARE_TOKENS = 8  # tokens that may be merged differently at the cuts

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Kept = tuple[tuple[Range, ...], ...]


@frozen(kw_only=True)
class Compressed:
    """Result of compressing a prompt.

    Attributes:
        method: the compressor's name.
        tokens_before: tokens of the texts that could be shortened, counted by the model's tokenizer.
        tokens_after: tokens of the same texts after compression.
        scored_tokens: tokens that a model read to score the texts.
        seconds: duration; close to zero for a cached result.
        error: the reason why the prompt is unchanged; "" without an error.
    """

    method: str
    tokens_before: int = 0
    tokens_after: int = 0
    scored_tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def num_saved(self) -> int:
        """Number of tokens removed from the prompt."""
        return self.tokens_before - self.tokens_after


class PromptCompressor:
    """Compresses prompts for all models of a server. Used on the event loop; compressors run in its own threads.

    Args:
        models: model settings by name.
        compressors: available compressors by name.
        manager: leases scorers.
        replays: runs tokenization and scoring.

    Raises:
        ConfigError: the settings of a model cannot be applied.
    """

    def __init__(
        self,
        models: Mapping[str, ModelSettings],
        compressors: Mapping[str, Compressor],
        manager: ModelManager,
        replays: Replays,
    ) -> None:
        check_settings(models, compressors)
        self._models = models
        self._compressors = compressors
        self._manager = manager
        self._replays = replays
        self._cache: OrderedDict[bytes, _Kept] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="compress")

    async def compress(self, request: GenerateRequest, model: LoadedModel) -> tuple[GenerateRequest, Compressed | None]:
        """Return the request with a compressed prompt if the request or its model's settings ask for it.

        Raises:
            InvalidRequest: the request asks for something that does not exist.
        """
        choice = choose(request, self._models[model.name].compressor, self._compressors)
        if choice is None:
            return request, None
        return await self._compress(request, model, choice, None)

    async def make_room(
        self, request: GenerateRequest, model: LoadedModel, num_excess: int
    ) -> tuple[GenerateRequest, Compressed | None]:
        """Return the request with a prompt at least ``num_excess`` tokens shorter, if its model's settings allow it.

        Does not check that the result fits; the engine reports that.
        """
        choice = choose_for_room(request, self._models[model.name].compressor, self._compressors)
        if choice is None:
            return request, None
        return await self._compress(request, model, choice, num_excess + _SPARE_TOKENS)

    async def _compress(
        self, request: GenerateRequest, model: LoadedModel, choice: Choice, num_excess: int | None
    ) -> tuple[GenerateRequest, Compressed | None]:
        began, method, tools = time.perf_counter(), choice.compressor.name, None
        before, after, failure = 0, 0, ""
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._tools(request, model, choice) as tools:
                request, before, after = await self._shorten(request, model, choice, num_excess, tools)
        except Exception as error:  # noqa: BLE001 - plugin boundary: a broken compressor must not refuse requests
            _log.error("the compressor %s failed; the prompt stays as it is", method, exc_info=error)
            failure = type(error).__name__
        return request, Compressed(
            method=method,
            tokens_before=before,
            tokens_after=after,
            scored_tokens=0 if tools is None else tools.num_scored_tokens,
            seconds=time.perf_counter() - began,
            error=failure,
        )

    async def _shorten(
        self,
        request: GenerateRequest,
        model: LoadedModel,
        choice: Choice,
        num_excess: int | None,
        tools: EngineTools,
    ) -> tuple[GenerateRequest, int, int]:
        """Return the request, possibly with shorter texts, and the token counts of these texts before and after."""
        found = await self._on_thread(find_texts, request, choice.system)
        before = sum(await self._on_thread(tools.count_tokens, [text.text for text in found.texts]))
        protected = sum(await self._on_thread(tools.count_tokens, [cut(text, ()) for text in found.texts]))
        num_free = max(0, before - protected)
        if not num_free or num_free < choice.min_tokens:
            return request, before, before
        kept_free = int(num_free * choice.ratio) if num_excess is None else num_free - num_excess
        budget = protected + max(0, kept_free)
        task = CompressionTask(texts=found.texts, question=found.question, max_tokens=budget)
        kept = await self._kept(task, request, model, choice, tools)
        texts = [cut(text, ranges) for text, ranges in zip(found.texts, kept, strict=True)]
        after = sum(await self._on_thread(tools.count_tokens, texts))
        return (with_texts(request, found, texts), before, after) if after < before else (request, before, before)

    async def _kept(
        self, task: CompressionTask, request: GenerateRequest, model: LoadedModel, choice: Choice, tools: EngineTools
    ) -> _Kept:
        """Return the ranges that the compressor keeps, from the cache if the same texts were compressed before."""
        named = (choice.compressor.name, model.name, model.created, choice.scorer, request.namespace, request.caller)
        key = await self._on_thread(_key, task, named)
        kept = self._cache.get(key)
        if kept is None:
            ranges = await self._on_thread(choice.compressor.compress, task, tools)
            kept = tuple(tuple(of_text) for of_text in ranges)
            if len(kept) != len(task.texts):
                raise ValueError(f"it says what to keep of {len(kept)} texts, not of {len(task.texts)}")
            self._cache[key] = kept
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return kept

    @contextlib.asynccontextmanager
    async def _tools(self, request: GenerateRequest, model: LoadedModel, choice: Choice) -> AsyncIterator[EngineTools]:
        """Tools that are valid inside the ``async with`` block; leases the scorer if that is another model."""
        lease, scorer = None, choice.scorer if choice.compressor.needs_scores else None
        if scorer is not None and scorer != model.name:
            # Loading it could need the memory of the model that waits for it.
            if self._manager.find(scorer).loaded is None:
                raise ModelNotReady(f"the scorer {scorer!r} is not loaded")
            lease = await self._manager.lease(scorer)
        tools = EngineTools(model, model if lease is None else lease.model, self._replays, request)
        try:
            yield tools
        finally:
            tools.stop()
            if lease is not None:
                lease.release()

    async def _on_thread(self, work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _key(task: CompressionTask, named: Sequence[object]) -> bytes:
    """Cache key of the task, as a digest that does not contain its texts."""
    texts = [(text.text, text.protected) for text in task.texts]
    said = repr((named, task.max_tokens, task.question, texts))
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=32).digest()
