"""The figures of one server: requests as they are counted, models and engines as they are when somebody looks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.admission import MemoryAccount
from enginehouse.api.http.exchange import OpenExchanges
from enginehouse.api.http.listeners import Listeners
from enginehouse.api.metrics.request_metrics import RequestMetrics
from enginehouse.api.metrics.values import Values
from enginehouse.api.openai.open_answers import list_answers
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.inspection import BATCH_SIZES, EngineFigures, Inspectable
from enginehouse.serving import ModelManager, ModelState, ModelStatus
from enginehouse.workers.figures import rss_bytes

__all__ = ["ServerMetrics"]

_NO_STEPS = (0,) * (len(BATCH_SIZES) + 1)


class ServerMetrics(Collector):
    """Counts requests, and writes everything down when it is asked to. Outlives changes of the configuration.

    Attributes:
        values: what is counted as it happens; whoever counts something else, counts it here.
    """

    def __init__(
        self, manager: ModelManager, exchanges: OpenExchanges, listeners: Listeners, memory: MemoryAccount
    ) -> None:
        self.values = Values()
        self.requests = RequestMetrics(self.values, manager)
        self._manager = manager
        self._exchanges = exchanges
        self._listeners = listeners
        self._memory = memory
        self._engines: dict[str, Inspectable] = {}
        self._of_former_engines: dict[str, EngineFigures] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.values.set("start_time_seconds", value=time.time())

    def on_request_end(self, record: AccessRecord, *, by_key: bool) -> None:
        """Count one request; ``by_key``: by API key as well."""
        self.requests.count(record, by_key=by_key)

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Everything as text, and its content type; ``accept`` is the header of that name."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """The library asks for all families."""
        now = self._read_server()
        yield from self.values.collect()
        yield from now.collect()

    def _read_server(self) -> Values:
        """What is so now."""
        now = Values()
        if memory := rss_bytes():
            now.set("server_memory_bytes", value=memory)
        now.set("client_memory_bytes", value=self._memory.num_bytes)
        for limit, number in self._memory.refusals.items():
            now.add("client_memory_refusals", limit, amount=number)
        for (plugin, reason), number in tuple(self._listeners.dropped.items()):
            now.add("dropped_events", plugin, reason, amount=number)
        names = [answer.record.model for answer in list_answers(self._exchanges)]
        num_open = Counter(name for name in names if name is not None)
        for status in self._manager.statuses():
            self._read_model(status, now)
            now.set("open_requests", status.name, value=num_open[status.name])
        return now

    def _read_model(self, status: ModelStatus, now: Values) -> None:
        for state in get_args(ModelState):
            now.set("models", status.name, state, value=float(state == status.state))
        now.add("worker_restarts", status.name, amount=status.num_restarts)
        engine = self._engine(status.name)
        if engine is not None:
            _read_gauges(status.name, engine.figures, now)
        self._read_counters(status.name, engine, now)

    def _engine(self, model: str) -> Inspectable | None:
        try:
            engine = self._manager.get(model).engine
        except EnginehouseError:
            return None
        return engine if isinstance(engine, Inspectable) else None

    def _read_counters(self, model: str, engine: Inspectable | None, now: Values) -> None:
        """Counts of this engine and of those before it: a counter never goes back when a worker is restarted."""
        last = self._engines.get(model)
        former = self._of_former_engines.get(model, EngineFigures(steps_by_size=_NO_STEPS))
        if last is not None and last is not engine:
            former = self._of_former_engines[model] = _sum(former, last.figures)
            del self._engines[model]
        if engine is not None:
            self._engines[model] = engine
        elif last is None and model not in self._of_former_engines:
            return
        total = _sum(former, engine.figures) if engine is not None else former
        now.add("preemptions", model, amount=total.stats.num_preemptions)
        now.observe_counts("batch_sequences", model, counts=total.steps_by_size, total=total.num_batched)


def _read_gauges(model: str, figures: EngineFigures, now: Values) -> None:
    stats = figures.stats
    now.set("running_sequences", model, value=stats.num_running)
    now.set("waiting_requests", model, value=stats.num_waiting)
    now.set("slots", model, value=stats.max_sequences)
    now.set("kv_cache_tokens", model, value=figures.num_cache_tokens)
    now.set("kv_cache_free_tokens", model, value=stats.free_tokens)
    now.set("prefix_cache_tokens", model, value=stats.cached_tokens)
    if figures.rss_bytes:
        now.set("worker_memory_bytes", model, value=figures.rss_bytes)


def _sum(first: EngineFigures, second: EngineFigures) -> EngineFigures:
    """The counters of two engines together; gauges are the second's."""
    stats = second.stats
    steps = zip(first.steps_by_size or _NO_STEPS, second.steps_by_size or _NO_STEPS, strict=True)
    return EngineFigures(
        stats=msgspec.structs.replace(stats, num_preemptions=first.stats.num_preemptions + stats.num_preemptions),
        num_cache_tokens=second.num_cache_tokens,
        steps_by_size=tuple(one + other for one, other in steps),
        num_batched=first.num_batched + second.num_batched,
        rss_bytes=second.rss_bytes,
    )
