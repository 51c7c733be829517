"""The loop of a pooling model: ``PoolEngine`` answers requests with a pooler, driven by calls of ``step``.

The counterpart of :class:`enginehouse.engine.loop.StepEngine`, with the same threads: one thread calls ``add``,
``cancel``, ``step`` and ``close``; ``make`` and ``interrupt`` may be called from any thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from attrs import evolve

from enginehouse.contract.errors import (
    EngineDead,
    EnginehouseError,
    GenerationFailed,
    PluginFailed,
    QueueTimeout,
    StepAborted,
    UnsupportedTask,
)
from enginehouse.contract.inspection import EngineMetrics, EngineView, Phase, RequestView, SequenceView
from enginehouse.contract.pooler import Pooler, PoolerCapabilities
from enginehouse.contract.types import (
    EngineCapabilities,
    EngineRequest,
    EngineStats,
    PoolingInfo,
    PoolingRequest,
    PoolingResult,
)
from enginehouse.contract.usage import Usage
from enginehouse.engine.outputs import StepCounts
from enginehouse.engine.pooling.inputs import Arrangement, InputMaker, LayoutArrangement, PoolInputs
from enginehouse.engine.pooling.queue import Pass, PoolJob, PoolQueue, empty_rows
from enginehouse.engine.pooling.rows import RowCache, Rows, result_of
from enginehouse.plugins import guard_of, guarded

PoolOutput = tuple[int, PoolingResult | EnginehouseError]
"""A call number with its result or error."""


class PoolEngine:
    """Passes over the inputs of waiting requests.

    Args:
        pooler: an opened model; closed by ``close``.
        cache_bytes: memory for the rows of earlier requests; 0 keeps none.
        compares: a model for ``embed`` answers the task ``rerank`` by the cosine of embeddings.
        arrangement: makes the input of a text or pair; None is the layout of the pooler.
        on_turn: called with a call and True before the pooler works on it, which may end the process, and with False
            when the pooler goes on to others first.
        clock: seconds, monotonic.

    Attributes:
        guard: the guard of ``pooler``, which names its backend.
        info: information about the model, with what its rows are.
    """

    def __init__(
        self,
        pooler: Pooler,
        *,
        cache_bytes: int = 0,
        compares: bool = False,
        arrangement: Arrangement | None = None,
        on_turn: Callable[[int, bool], None] = lambda call, is_computing: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.guard = guard_of(pooler, "backend")
        self._pooler = guarded(pooler, Pooler, self.guard)
        self._capabilities = limits = pooler.capabilities
        self.info = msgspec.structs.replace(pooler.info, pooling=_shown(limits))
        self.layout = limits.text
        self._maker = InputMaker(
            pooler.tokenizer,
            limits,
            self.info,
            arrangement or LayoutArrangement(pooler.tokenizer, limits),
            compares=compares,
        )
        self._cache = RowCache(cache_bytes, limits.dimensions)
        self._on_turn = on_turn
        self._clock = clock
        self._queue = PoolQueue(limits)
        self._computing: tuple[int, ...] = ()  # the calls of the running pass
        self._leaving: set[int] = set()
        self._outputs: list[PoolOutput] = []
        self._counts = StepCounts()
        self._num_texts = self._num_tokens = 0

    # -- the loop ----------------------------------------------------------------------------------

    def step(self) -> list[PoolOutput]:
        """Compute at most one pass, and return what is complete."""
        now = self._clock()
        for job in self._queue:
            if job.is_overdue(now):
                self._fail(job, _overdue(job))
        if (chosen := self._queue.next_pass()) is not None:
            self._compute(chosen)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _compute(self, chosen: Pass) -> None:
        self._begin(chosen)
        try:
            rows = self._pool(chosen)
        except StepAborted:
            return
        except EnginehouseError as error:
            self._compute_one_by_one(chosen, error)
            return
        finally:
            self._computing = ()
        self._take(chosen, rows)

    def _begin(self, chosen: Pass) -> None:
        """Report the requests of a pass, and those that were in the last one and are not in this one."""
        calls = tuple(dict.fromkeys(job.call for job in chosen.jobs))
        for job in self._queue:
            is_computing = job.call in calls
            if is_computing != job.is_computing:
                job.is_computing = is_computing
                self._on_turn(job.call, is_computing)
            job.is_begun |= is_computing
        self._computing = calls

    def _pool(self, chosen: Pass) -> Rows:
        """Return the rows of a pass, checked.

        Raises:
            StepAborted: it was aborted.
            PluginFailed: the pooler raised an exception, or gave something else than rows.
        """
        if self._leaving.issuperset(self._computing):  # cancelled when no pass could be aborted
            raise StepAborted({})
        began_s = self._clock()
        rows = self._pooler.pool(chosen.inputs)
        self._queue.length.record(chosen.num_tokens, self._clock() - began_s)
        expected = (len(chosen.jobs), self._capabilities.dimensions)
        if rows.shape != expected or rows.dtype != np.float32:
            what = f"gave {rows.dtype} of shape {rows.shape}, float32 of shape {expected} was expected"
            raise self.guard.mistake("pool", what)
        self._counts.add(len(chosen.jobs))
        self._num_texts += len(chosen.jobs)
        self._num_tokens += chosen.num_tokens
        return rows

    def _compute_one_by_one(self, chosen: Pass, error: EnginehouseError) -> None:
        """Compute a failed pass again, each request by itself, so that only those fail that cannot be computed."""
        parts = [(job, chosen.part(positions)) for job, positions in chosen.by_job()]
        for job, part in parts:
            found: Rows | EnginehouseError = error
            if len(parts) > 1:
                self._computing = (job.call,)
                try:
                    found = self._pool(part)
                except StepAborted:
                    continue
                except EnginehouseError as own:
                    found = own
                finally:
                    self._computing = ()
            if isinstance(found, EnginehouseError):
                self._fail(job, found)
            else:
                self._take(part, found)

    def _take(self, chosen: Pass, rows: Rows) -> None:
        """Take the rows of a pass; numbers that are not finite fail their request."""
        if not np.isfinite(rows).all():
            for job, positions in chosen.by_job():
                if not np.isfinite(rows[positions]).all():
                    self._fail(job, GenerationFailed("The model gave numbers that are not finite.", self.guard.plugin))
        if self._cache.is_on:
            for job, index, row in zip(chosen.jobs, chosen.indices, rows, strict=True):
                if job.call in self._queue:
                    self._cache.keep(job.made.request.namespace, job.made.keys[index], row)
        for job in self._queue.computed(chosen, rows):
            self._answer(job)

    def _answer(self, job: PoolJob) -> None:
        self._leaving.discard(job.call)
        self._outputs.append((job.call, result_of(job.made, job.rows, self._capabilities)))

    # -- requests ----------------------------------------------------------------------------------

    @property
    def capabilities(self) -> EngineCapabilities:
        """Request features of generations: none."""
        return EngineCapabilities()

    def make(self, request: PoolingRequest) -> PoolInputs:
        """Return the inputs of a request; see :meth:`InputMaker.make`. Any thread."""
        return evolve(self._maker.make(request), accepted_s=self._clock())

    def check_length(self, num_prompt_tokens: int, is_lower_bound: bool = False) -> None:
        """Refuse a generation. Any thread."""
        raise UnsupportedTask(self.info.backend, self.info.task, "generate")

    def check(self, request: EngineRequest, num_prompt_tokens: int) -> None:
        """Refuse a generation. Any thread."""
        self.check_length(num_prompt_tokens)

    def add(self, call: int, made: PoolInputs) -> None:
        """Queue a request; rows that the cache holds are not computed again."""
        rows, missing = empty_rows(made, self._capabilities.dimensions), []
        for index, key in enumerate(made.keys):
            kept = self._cache.find(made.request.namespace, key)
            if kept is None:
                missing.append(index)
            else:
                rows[index] = kept
        job = self._queue.add(call, made, rows, missing)
        if not missing:
            self._queue.remove(call)
            self._answer(job)

    def cancel(self, call: int) -> None:
        """Drop a request; unknown calls are ignored."""
        self._queue.remove(call)
        self._leaving.discard(call)

    def interrupt(self, call: int) -> None:
        """Abort the pass that runs or is about to begin if all of its requests are being cancelled. Any thread.

        Called before a cancellation: :meth:`cancel` follows on the engine thread, and forgets the call.
        """
        self._leaving.add(call)
        computing = self._computing
        if computing and self._leaving.issuperset(computing):
            with contextlib.suppress(PluginFailed):
                self._pooler.abort()

    def _fail(self, job: PoolJob, error: EnginehouseError) -> None:
        if self._queue.remove(job.call) is not None:
            self._leaving.discard(job.call)
            self._outputs.append((job.call, error))

    def has_work(self) -> bool:
        """Return True if ``step`` would do anything."""
        return bool(self._queue or self._outputs)

    # -- inspection --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Return the current state as counts."""
        num_begun = self._queue.num_begun
        return EngineStats(
            num_waiting=len(self._queue) - num_begun,
            num_running=num_begun,
            max_sequences=self._capabilities.max_batch_texts,
            num_steps=self._counts.num_steps,
        )

    def metrics(self) -> EngineMetrics:
        """Return the statistics since the start."""
        metrics = self._counts.metrics(self.stats(), 0)
        return msgspec.structs.replace(
            metrics,
            num_pooled_texts=self._num_texts,
            num_pooled_tokens=self._num_tokens,
            num_cached_texts=self._cache.num_hits,
        )

    def view(self) -> EngineView:
        """Return a snapshot: a request has one sequence, without positions in a cache."""
        now = self._clock()
        requests = tuple(
            RequestView(
                job.made.request.request_id,
                now - job.made.accepted_s,
                Usage(prompt_tokens=sum(job.made.num_tokens)),
                (SequenceView(0, _phase(job), 0, 0, False),),
            )
            for job in self._queue
        )
        return EngineView(self._capabilities.max_batch_texts, 0, 0, requests, ())

    def cached_tokens(self, token_ids: Iterable[int], namespace: str) -> int:
        """Return 0: there is no prefix cache."""
        return 0

    def stop_thinking(self, request_id: str) -> int:
        """Return 0: nothing is generated."""
        return 0

    def close(self) -> list[PoolOutput]:
        """End every request with EngineDead and close the pooler."""
        for job in self._queue:
            self._fail(job, EngineDead("The server is shutting down."))
        with contextlib.suppress(PluginFailed):
            self._pooler.close()
        outputs, self._outputs = self._outputs, []
        return outputs


def _phase(job: PoolJob) -> Phase:
    if job.is_computing:
        return "prefill"
    return "paused" if job.is_begun else "queued"


def _overdue(job: PoolJob) -> QueueTimeout:
    waited = f"The request waited {job.made.request.queue_timeout_s:g} s for its first pass (queue_timeout_s)"
    return QueueTimeout(f"{waited}; try again later.")


def _shown(limits: PoolerCapabilities) -> PoolingInfo:
    """Return what is shown of a model's rows."""
    return PoolingInfo(
        max_tokens=limits.max_tokens,
        dimensions=limits.dimensions,
        pooling=limits.pooling,
        is_normalized=limits.is_normalized,
        dimension_choices=limits.dimension_choices,
        prompts=dict(limits.prompts),
        default_prompt=limits.default_prompt,
        labels=limits.labels,
        activation=limits.activation,
    )
