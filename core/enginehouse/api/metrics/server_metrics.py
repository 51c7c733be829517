"""Server metrics: requests counted as they end, models and engines read at scrape time; `GET /metrics`.

Replaces Litestar's Prometheus plugin, which measures HTTP handlers: a streamed response ends long after its handler,
and most counts come from engines.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from enginehouse.api.generation.running_answers import list_answers
from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.admission import MemoryAccount
from enginehouse.api.http.exchange import OpenExchanges
from enginehouse.api.http.listeners import Listeners
from enginehouse.api.metrics.families import REPORTED, Values
from enginehouse.contract.engine import Engine, ReplicatedEngine
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.inspection import BATCH_SIZES, EngineMetrics, Inspectable
from enginehouse.contract.usage import Usage
from enginehouse.plugins import PluginFailures
from enginehouse.process import rss_bytes
from enginehouse.serving import ModelManager, ModelState, ModelStatus

_OTHER = "other"
_CLIENT_LEFT = "cancelled"
_MAX_KEYS = 1000  # authenticators may recognise any number of callers, and metrics are kept until the server exits


class RequestMetrics:
    """Counts requests.

    Args:
        values: destination of the counts.
        manager: provides the served models.
    """

    def __init__(self, values: Values, manager: ModelManager) -> None:
        self._values = values
        self._manager = manager
        self._names: dict[str, str] = {}
        self._keys: set[str] = set()

    def count(self, record: AccessRecord, *, by_key: bool) -> None:
        """Count one request, by API key as well if ``by_key``."""
        values, model = self._values, self.model_label(record)
        endpoint, status = record.endpoint or _OTHER, str(record.status)
        values.add("requests", model, endpoint, status, record.outcome)
        if record.outcome == _CLIENT_LEFT:
            values.add("disconnects", model)
        elif record.status >= 400 and record.outcome != "ok":  # /health reports its state by status code
            values.add("refusals", endpoint, record.outcome)
        if by_key and record.key is not None:
            self._count_key(record, self._key_label(record.key))
        if record.model is not None:
            values.observe("request_seconds", model, endpoint, value=record.total_s)
            self._count_pace(record, model)
            self._count_usage(record, model)
            for adapter in record.adapters:
                values.add("adapter_requests", model, adapter)

    def _count_pace(self, record: AccessRecord, model: str) -> None:
        values, pace = self._values, record.pace
        if pace.first_s is not None:
            values.observe("time_to_first_token_seconds", model, value=pace.first_s)
            counts, total = pace.gaps()
            values.observe_counts("inter_token_seconds", model, counts=counts, total=total)

    def _count_usage(self, record: AccessRecord, model: str) -> None:
        values, usage = self._values, record.usage
        for (name, by), amount in record.metrics.items():
            if name in REPORTED:
                values.add(name, model, by, amount=amount)
        if usage is None:
            return
        for drafter, (num_drafted, num_accepted) in usage.drafts.items():
            values.add("drafted_tokens", model, drafter, amount=num_drafted)
            values.add("accepted_draft_tokens", model, drafter, amount=num_accepted)
        for _, shown, amount in usage.shown(is_complete=record.is_complete):
            if shown.metric is not None:
                values.count(shown.metric, model, amount=amount)
        if record.is_complete:
            values.add("prefix_cache_requests", model, "hit" if usage.cached_tokens else "miss")
            values.observe("request_prompt_tokens", model, value=usage.prompt_tokens)
            values.observe("request_completion_tokens", model, value=usage.completion_tokens)

    def _count_key(self, record: AccessRecord, key: str) -> None:
        self._values.add("key_requests", key)
        usage = record.usage or Usage()
        for kind, amount in (("prompt", usage.prompt_tokens), ("completion", usage.completion_tokens)):
            if amount:
                self._values.add("key_tokens", key, kind, amount=amount)

    def _key_label(self, key: str) -> str:
        if len(self._keys) < _MAX_KEYS:
            self._keys.add(key)
        return key if key in self._keys else _OTHER

    def model_label(self, record: AccessRecord) -> str:
        """Return the model's configured name; ``other`` if the request named an unknown one, empty if it named none."""
        asked = record.model or record.asked_model
        if asked is None:
            return ""
        if asked not in self._names:
            self._names = dict(self._known_names())
        return self._names.get(asked, _OTHER)

    def _known_names(self) -> Iterable[tuple[str, str]]:
        for status in self._manager.statuses():
            yield from ((known, status.name) for known in (status.name, *status.aliases))


_NO_STEPS = (0,) * (len(BATCH_SIZES) + 1)


class ServerMetrics(Collector):
    """Counts requests and exports all metrics on demand. Kept across configuration reloads.

    Attributes:
        values: values counted as events occur; other modules add theirs here.
    """

    def __init__(
        self,
        manager: ModelManager,
        exchanges: OpenExchanges,
        listeners: Listeners,
        memory: MemoryAccount,
        failures: PluginFailures,
    ) -> None:
        self.values = Values()
        self.requests = RequestMetrics(self.values, manager)
        self._manager = manager
        self._exchanges = exchanges
        self._listeners = listeners
        self._memory = memory
        self._failures = failures
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.values.set("start_time_seconds", value=time.time())

    def on_request_end(self, record: AccessRecord, *, by_key: bool) -> None:
        """Count one request, by API key as well if ``by_key``."""
        self.requests.count(record, by_key=by_key)

    def encode(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics as text, and the content type; ``accept`` is the Accept header."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by the library."""
        now = self._read_server()
        yield from self.values.collect()
        yield from now.collect()

    def _read_server(self) -> Values:
        """Return the current gauges and totals of the server."""
        now = Values()
        if memory := rss_bytes():
            now.set("server_memory_bytes", value=memory)
        now.set("client_memory_bytes", value=self._memory.num_bytes)
        for limit, number in self._memory.refusals.items():
            now.add("client_memory_refusals", limit, amount=number)
        for (plugin, reason), number in tuple(self._listeners.dropped.items()):
            now.add("dropped_events", plugin, reason, amount=number)
        for (plugin, kind), number in tuple(self._failures.counts.items()):
            now.add("plugin_failures", plugin, kind, amount=number)
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
        opened = self._engine(status.name)
        engine = opened if isinstance(opened, Inspectable) else None
        if engine is not None:
            _read_gauges(status.name, engine.metrics, now)
        if isinstance(opened, ReplicatedEngine):
            _read_replicas(status.name, opened, now)
        self._read_counters(status.name, engine, now)

    def _engine(self, model: str) -> Engine | None:
        try:
            return self._manager.get(model).engine
        except EnginehouseError:
            return None

    def _read_counters(self, model: str, engine: Inspectable | None, now: Values) -> None:
        """Add this engine's counts to those of its predecessors, so that no counter decreases on a worker restart."""
        total = self._manager.former_engines.get(model)
        if engine is not None:
            total = engine.metrics if total is None else total + engine.metrics
        if total is None:
            return
        for (plugin, kind), number in total.plugin_failures.items():
            now.add("plugin_failures", plugin, kind, amount=number)
        now.add("preemptions", model, amount=total.stats.num_preemptions)
        for name in ("pooled_texts", "pooled_tokens", "cached_texts"):
            if number := getattr(total, f"num_{name}"):
                now.add(name, model, amount=number)
        if total.num_encoded_chunks or total.num_reused_chunks:
            now.add("encoded_images", model, amount=total.num_encoded_chunks)
            now.add("reused_images", model, amount=total.num_reused_chunks)
        now.observe_counts("batch_sequences", model, counts=total.steps_by_size or _NO_STEPS, total=total.num_batched)


def _read_gauges(model: str, metrics: EngineMetrics, now: Values) -> None:
    stats = metrics.stats
    now.set("running_sequences", model, value=stats.num_running)
    now.set("waiting_requests", model, value=stats.num_waiting)
    now.set("slots", model, value=stats.max_sequences)
    now.set("kv_cache_tokens", model, value=metrics.num_cache_tokens)
    now.set("kv_cache_free_tokens", model, value=stats.free_tokens)
    now.set("prefix_cache_tokens", model, value=stats.cached_tokens)
    now.set("loaded_adapters", model, value=stats.num_adapters)
    if metrics.num_embedding_bytes:
        now.set("embedding_cache_bytes", model, value=metrics.num_embedding_bytes)
    if metrics.rss_bytes:
        now.set("worker_memory_bytes", model, value=metrics.rss_bytes)


def _read_replicas(model: str, engine: ReplicatedEngine, now: Values) -> None:
    for stats in engine.replicas:
        now.set("replica_up", model, stats.replica, value=float(stats.is_up))
        now.set("replica_running_requests", model, stats.replica, value=stats.num_running)
        for reason, number in stats.num_requests.items():
            now.add("replica_requests", model, stats.replica, reason, amount=number)


def metrics_route(metrics: ServerMetrics) -> HTTPRouteHandler:
    """Return the route."""

    @get("/metrics")
    async def show_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Show all metrics."""
        body, content_type = metrics.encode(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return show_metrics
