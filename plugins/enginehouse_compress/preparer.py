"""Compresses the prompts of requests, after parameters are merged and before the chat template.

A compressor that fails costs only its time: the prompt is used unchanged, and the answer's statistics report it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple

from attrs import frozen

from enginehouse.contract.compressor import CompressionTask, Compressor, Range, cut
from enginehouse.contract.errors import EnginehouseError, PluginFailed
from enginehouse.contract.preparer import ModelAccess, Preparation, Report
from enginehouse.contract.types import GenerateRequest
from enginehouse_compress.choosing import Choice, choose, choose_for_room
from enginehouse_compress.explanation import explain_text
from enginehouse_compress.fields import NAME, CompressionFields, asked_compression
from enginehouse_compress.settings import CompressorSettings, read_settings
from enginehouse_compress.texts import RequestTexts, find_texts, with_texts
from enginehouse_compress.tools import EngineTools, NoEmbeddings, Note

__all__ = ["CompressionPreparer", "PromptCompressor"]

_MAX_CACHED = 256
_NUM_THREADS = 4
_TIMEOUT_S = 300.0
_SPARE_TOKENS = 8  # tokens that may be merged differently at the cuts

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


@frozen
class _Compressed:
    """Ranges of each text that a compressor keeps, and its explanations."""

    kept: tuple[tuple[Range, ...], ...]
    notes: tuple[Note, ...]


@frozen
class _Shortened:
    """A request with shorter texts, the tokens of these texts before and after, and the reasons."""

    request: GenerateRequest
    before: int = 0
    after: int = 0
    found: RequestTexts | None = None
    compressed: _Compressed | None = None

    def explain(self) -> dict[str, Any]:
        """Return which ranges of each text that may be shortened stay, and why; None for the message of a prompt."""
        explained: list[dict[str, Any]] = []
        if self.found is None:
            return {"texts": explained}
        for number, (text, place) in enumerate(zip(self.found.texts, self.found.places, strict=True)):
            kept: Sequence[Range] = ((0, len(text.text)),)
            notes: list[Note] = []
            if self.compressed is not None:
                kept = self.compressed.kept[number]
                notes = [note for note in self.compressed.notes if note.text == number]
            message = None if self.request.messages is None else place
            explained.append({"message": message, **explain_text(text, kept, notes)})
        return {"texts": explained}


class CompressionPreparer:
    """Implements :class:`enginehouse.contract.preparer.Preparer`."""

    name = NAME
    api_version = 1
    request_fields = CompressionFields

    def bind(self, settings: Mapping[str, Any], objects: Mapping[str, Mapping[str, Any]]) -> PromptCompressor:
        """See the contract."""
        compressors = objects["compressors"]
        return PromptCompressor(read_settings(settings, compressors), compressors)


class PromptCompressor:
    """Implements :class:`enginehouse.contract.preparer.BoundPreparer`; compressors run in its own threads.

    Args:
        settings: of the models that have some, by name.
        compressors: available compressors by name.
    """

    def __init__(self, settings: Mapping[str, CompressorSettings], compressors: Mapping[str, Compressor]) -> None:
        self._settings = settings
        self._compressors = compressors
        self._cache: OrderedDict[bytes, _Compressed] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="compress")
        # One compressor that hangs leaves the threads of the others free.
        self._free_threads = {name: asyncio.Semaphore(_NUM_THREADS) for name in compressors}

    def may_prepare(self, request: GenerateRequest, model: str) -> bool:
        """See the contract."""
        return model in self._settings or bool(asked_compression(request))

    async def prepare_request(
        self, request: GenerateRequest, model: ModelAccess, num_excess: int | None
    ) -> Preparation | None:
        """See the contract. Whether the result fits is for the engine to find."""
        settings = self._settings.get(model.name)
        if num_excess is None:
            choice = choose(request, settings, self._compressors)
        else:
            choice = choose_for_room(request, settings, self._compressors)
            num_excess += _SPARE_TOKENS
        return None if choice is None else await self._compress(request, model, choice, num_excess)

    async def _compress(
        self, request: GenerateRequest, model: ModelAccess, choice: Choice, num_excess: int | None
    ) -> Preparation:
        began, method, tools = time.perf_counter(), choice.compressor.name, None
        shortened, failure = _Shortened(request), ""
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._tools(request, model, choice) as tools:
                shortened = await self._shorten(request, model, choice, num_excess, tools)
        except PluginFailed as error:  # a broken compressor must not refuse requests; core has logged it
            failure = error.message
        except (EnginehouseError, TimeoutError) as error:
            _log.error("the compressor %s failed; the prompt is left unchanged", method, exc_info=error)
            failure = error.message if isinstance(error, NoEmbeddings) else type(error).__name__
        details = {
            "method": method,
            "tokens_before": shortened.before,
            "tokens_after": shortened.after,
            "scored_tokens": 0 if tools is None else tools.num_scored_tokens,
            "ms": round(1000 * (time.perf_counter() - began), 3),
            "failed": failure or None,
        }
        return Preparation(shortened.request, _report(details, shortened))

    async def _shorten(
        self,
        request: GenerateRequest,
        model: ModelAccess,
        choice: Choice,
        num_excess: int | None,
        tools: EngineTools,
    ) -> _Shortened:
        found = await self._on_thread(find_texts, request, choice.system)
        before = sum(await self._on_thread(tools.count_tokens, [text.text for text in found.texts]))
        protected = sum(await self._on_thread(tools.count_tokens, [cut(text, ()) for text in found.texts]))
        num_free = max(0, before - protected)
        if not num_free or num_free < choice.min_tokens:
            return _Shortened(request, before, before, found)
        kept_free = int(num_free * choice.ratio) if num_excess is None else num_free - num_excess
        budget = protected + max(0, kept_free)
        task = CompressionTask(texts=found.texts, question=found.question, max_tokens=budget)
        compressed = await self._compressed(task, request, model, choice, tools)
        texts = [cut(text, ranges) for text, ranges in zip(found.texts, compressed.kept, strict=True)]
        after = sum(await self._on_thread(tools.count_tokens, texts))
        if after >= before:
            return _Shortened(request, before, before, found)
        return _Shortened(with_texts(request, found, texts), before, after, found, compressed)

    async def _compressed(
        self, task: CompressionTask, request: GenerateRequest, model: ModelAccess, choice: Choice, tools: EngineTools
    ) -> _Compressed:
        """Return what the compressor keeps, from the cache if the same texts were compressed before."""
        models = (model.name, model.created, choice.scorer, choice.embedder)
        named = (choice.compressor.name, *models, request.namespace, request.caller)
        key = await self._on_thread(_key, task, named)
        compressed = self._cache.get(key)
        if compressed is None:
            free_threads = self._free_threads[choice.compressor.name]
            ranges = await _in_daemon_thread(free_threads, choice.compressor.compress, task, tools)
            compressed = _Compressed(tuple(map(tuple, ranges)), tuple(tools.notes))
            self._cache[key] = compressed
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return compressed

    @contextlib.asynccontextmanager
    async def _tools(self, request: GenerateRequest, model: ModelAccess, choice: Choice) -> AsyncIterator[EngineTools]:
        """Tools that are valid inside the ``async with`` block; leases the scorer if that is another model."""
        async with contextlib.AsyncExitStack() as stack:
            scorer = model
            if choice.compressor.needs_scores and choice.scorer not in (None, model.name):
                scorer = await stack.enter_async_context(model.other(choice.scorer))
            tools = EngineTools(model, scorer, choice.embedder, request)
            try:
                yield tools
            finally:
                tools.stop()

    async def _on_thread(self, work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
        context = contextvars.copy_context()  # in which core finds the request
        return await asyncio.get_running_loop().run_in_executor(self._threads, context.run, work, *arguments)


async def _in_daemon_thread(free_threads: asyncio.Semaphore, work: Callable[[*_Ts], _T], *arguments: *_Ts) -> _T:
    """Return ``work(*arguments)``, run in a thread that the process does not wait for when it exits.

    A cancellation does not end the thread, which counts until it has returned.
    """
    await free_threads.acquire()
    context, outcome = contextvars.copy_context(), Future[_T]()

    def run() -> None:
        try:
            outcome.set_result(context.run(work, *arguments))
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name="compressor", daemon=True).start()
    ended = asyncio.wrap_future(outcome)
    ended.add_done_callback(lambda _: free_threads.release())
    return await asyncio.shield(ended)


def _report(details: Mapping[str, Any], shortened: _Shortened) -> Report:
    num_saved = details["tokens_before"] - details["tokens_after"]
    return Report(
        has_changed=num_saved > 0,
        num_read_tokens=details["scored_tokens"],
        details=details,
        done_by=details["method"],
        metrics={"failed_compressions": 1} if details["failed"] else {},
        prompt_metrics={"compressed_tokens_before": num_saved, "compressed_tokens_after": 0} if num_saved > 0 else {},
        explain=shortened.explain,
    )


def _key(task: CompressionTask, named: Sequence[object]) -> bytes:
    """Cache key of the task, as a digest that does not contain its texts."""
    texts = [(text.text, text.protected) for text in task.texts]
    said = repr((named, task.max_tokens, task.question, texts))
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=32).digest()
