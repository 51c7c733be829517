"""``/metrics``: the table of metric families, the values counted per request, and those read from models and engines.

Nothing here runs per token, waits for an engine, or uses text of clients as a label; prometheus-client writes the
format. No decision of the server depends on it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

from attrs import define, field, frozen
from litestar import Request, Response, get
from litestar.handlers import HTTPRouteHandler
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from enginehouse.api.generation.running_answers import list_answers
from enginehouse.api.http.access import GAP_BUCKETS_S, AccessRecord
from enginehouse.api.http.admission import MemoryAccount
from enginehouse.api.http.exchange import OpenExchanges
from enginehouse.api.http.listeners import Listeners
from enginehouse.contract.engine import Engine, ReplicatedEngine
from enginehouse.contract.errors import EnginehouseError
from enginehouse.contract.inspection import BATCH_SIZES, EngineMetrics, Inspectable
from enginehouse.contract.usage import USAGE_FIELDS, Usage
from enginehouse.plugins import PluginFailures
from enginehouse.process import rss_bytes
from enginehouse.serving import ModelManager, ModelState, ModelStatus

PREFIX = "enginehouse_"

_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


@frozen(kw_only=True)
class Family:
    """A metric family.

    Attributes:
        name: without the prefix, and for counters without ``_total``.
        meaning: one sentence.
        labels: label names.
        buckets: upper bounds, for histograms; one more bucket holds larger values.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def shown_name(self) -> str:
        """Name used in queries."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def _counter(name: str, meaning: str, *labels: str) -> Family:
    return Family(name=name, kind="counter", meaning=meaning, labels=labels)


def _gauge(name: str, meaning: str, *labels: str) -> Family:
    return Family(name=name, kind="gauge", meaning=meaning, labels=labels)


def _histogram(name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> Family:
    return Family(name=name, kind="histogram", meaning=meaning, labels=labels, buckets=buckets)


_OF_REQUESTS = (
    _counter("requests", "Requests whose response has ended.", "model", "endpoint", "status", "outcome"),
    _counter("refusals", "Requests refused before their answer began, by error code.", "endpoint", "code"),
    _counter("disconnects", "Requests whose client left before the end.", "model"),
    _counter("prefix_cache_requests", "Answers by whether some of the prompt was cached.", "model", "result"),
    _histogram("time_to_first_token_seconds", "From a request's arrival to its first text.", _SHORT_S, "model"),
    _histogram("inter_token_seconds", "Between two texts of one answer; counted when it ends.", GAP_BUCKETS_S, "model"),
    _histogram("request_seconds", "From a request's arrival to its end.", _LONG_S, "model", "endpoint"),
    _histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS, "model"),
    _histogram("request_completion_tokens", "Tokens of an answer, all choices together.", _TOKENS, "model"),
    _counter("adapter_requests", "Requests by adapter (LoRA).", "model", "adapter"),
    _counter("key_requests", "Requests by API key; only with `server.key_metrics`.", "key"),
    _counter("key_tokens", "Tokens by API key; only with `server.key_metrics`.", "key", "kind"),
)


def _families_of_usage() -> Iterator[Family]:
    for shown in USAGE_FIELDS.values():
        if shown.metric is not None and shown.metric.endswith("_seconds"):
            yield _histogram(shown.metric, shown.help, _SHORT_S, "model")
        elif shown.metric is not None:
            yield _counter(shown.metric, shown.help, "model")


_OF_USAGE = tuple(_families_of_usage())

_OF_MODELS = (
    _gauge("models", "1 for the state that a model is in.", "model", "state"),
    _counter("worker_restarts", "Restarts of a model's worker after its death.", "model"),
    _gauge("open_requests", "Requests to a model that are being answered.", "model"),
    _gauge("running_sequences", "Sequences that hold a slot.", "model"),
    _gauge("waiting_requests", "Requests that wait for a slot.", "model"),
    _gauge("slots", "Sequences that can run at once.", "model"),
    _gauge("kv_cache_tokens", "KV positions in all.", "model"),
    _gauge("kv_cache_free_tokens", "Free KV positions; those of the prefix cache count as used.", "model"),
    _gauge("prefix_cache_tokens", "Tokens that the prefix cache holds.", "model"),
    _gauge("worker_memory_bytes", "Resident memory of a model's worker process.", "model"),
    _gauge("loaded_adapters", "Adapters (LoRA) that a model has loaded.", "model"),
    _gauge("embedding_cache_bytes", "Memory of the embeddings of images that a model keeps.", "model"),
    _gauge("replica_up", "1 if a server or replica of a model takes requests, else 0.", "model", "replica"),
    _gauge("replica_running_requests", "Requests that a server or replica is answering.", "model", "replica"),
    _counter(
        "replica_requests",
        "Requests sent to a server or replica, by reason: `prefix`, `balance`, `load`.",
        "model",
        "replica",
        "reason",
    ),
    _counter("preemptions", "Sequences that were preempted and computed again.", "model"),
    _counter("pooled_texts", "Texts and pairs of texts that a pooling model has computed.", "model"),
    _counter("pooled_tokens", "Tokens of the texts that a pooling model has computed.", "model"),
    _counter("cached_texts", "Texts whose rows came from the cache of their model (`pooling_cache`).", "model"),
    _counter("encoded_images", "Images and recordings, or parts of them, that a model has encoded.", "model"),
    _counter(
        "reused_images", "Images and recordings, or parts of them, whose embedding was kept from before.", "model"
    ),
    _histogram(
        "batch_sequences",
        "Sequences, or texts of a pooling model, in one step.",
        tuple(map(float, BATCH_SIZES)),
        "model",
    ),
)

_OF_THE_SERVER = (
    _gauge("server_memory_bytes", "Resident memory of the server process, without its workers."),
    _gauge("start_time_seconds", "Start time of the server, as Unix time."),
    _gauge("client_memory_bytes", "Memory for requests and for responses that clients have not read yet."),
    _counter(
        "client_memory_refusals",
        "Requests refused and connections closed (`unread`) because this memory was used up, by limit.",
        "limit",
    ),
    _counter("plugin_failures", "Exceptions and wrong results of plugins, by kind of plugin object.", "plugin", "kind"),
    _counter("dropped_events", "Events that a plugin failed to handle or was too slow for.", "plugin", "reason"),
)

_OF_DRAFTERS = tuple(
    _counter(name, USAGE_FIELDS[name].help, "model", "drafter") for name in ("drafted_tokens", "accepted_draft_tokens")
)

_OF_COMPRESSION = tuple(
    _counter(name, meaning, "model", "compressor")
    for name, meaning in (
        ("compressed_tokens_before", "Tokens of prompts before compression."),
        ("compressed_tokens_after", "Tokens of the same prompts after compression."),
        ("failed_compressions", "Prompts left uncompressed because a compressor failed."),
    )
)

REPORTED = frozenset(item.name for item in _OF_COMPRESSION)
"""Names of the counts that an optimisation reports per request (``AccessRecord.metrics``)."""

FAMILIES: tuple[Family, ...] = (
    *_OF_REQUESTS,
    *_OF_USAGE,
    *_OF_DRAFTERS,
    *_OF_MODELS,
    *_OF_THE_SERVER,
    *_OF_COMPRESSION,
)
"""All families, in output order."""

_BY_NAME = {item.name: item for item in FAMILIES}


def family(name: str) -> Family:
    """Return the family of that name."""
    return _BY_NAME[name]


_Labels = tuple[str, ...]


@define
class _Buckets:
    counts: list[int]
    total: float = 0.0


@define
class Values:
    """Values of all families that have any. Families are named without prefix; labels are in their order."""

    _numbers: dict[str, dict[_Labels, float]] = field(factory=dict)
    _buckets: dict[str, dict[_Labels, _Buckets]] = field(factory=dict)

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Increase a counter."""
        numbers = self._numbers.setdefault(name, {})
        numbers[labels] = numbers.get(labels, 0) + amount

    def set(self, name: str, *labels: str, value: float) -> None:
        """Set a value."""
        self._numbers.setdefault(name, {})[labels] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Add one value to a histogram."""
        buckets = self._histogram(name, labels)
        buckets.counts[bisect_left(family(name).buckets, value)] += 1
        buckets.total += value

    def count(self, name: str, *labels: str, amount: float) -> None:
        """Increase a counter, or add one value to a histogram."""
        if family(name).kind == "histogram":
            self.observe(name, *labels, value=amount)
        else:
            self.add(name, *labels, amount=amount)

    def observe_counts(self, name: str, *labels: str, counts: Sequence[int], total: float) -> None:
        """Add values to a histogram that are already counted per bucket."""
        buckets = self._histogram(name, labels)
        buckets.counts = [old + new for old, new in zip(buckets.counts, counts, strict=True)]
        buckets.total += total

    def get(self, name: str, *labels: str) -> float:
        """Return one value; 0 if nothing was counted."""
        return self._numbers.get(name, {}).get(labels, 0)

    def _histogram(self, name: str, labels: _Labels) -> _Buckets:
        histograms = self._buckets.setdefault(name, {})
        buckets = histograms.get(labels)
        if buckets is None:
            buckets = histograms[labels] = _Buckets([0] * (len(family(name).buckets) + 1))
        return buckets

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have values, as objects of the library."""
        for item in FAMILIES:
            if item.name in self._numbers:
                yield _numbers(item, self._numbers[item.name])
            elif item.name in self._buckets:
                yield _histograms(item, self._buckets[item.name])


def _numbers(item: Family, numbers: dict[_Labels, float]) -> Metric:
    kind = CounterMetricFamily if item.kind == "counter" else GaugeMetricFamily
    metric = kind(PREFIX + item.name, item.meaning, labels=item.labels)
    for labels, value in numbers.items():
        metric.add_metric(labels, value)
    return metric


def _histograms(item: Family, histograms: dict[_Labels, _Buckets]) -> Metric:
    metric = HistogramMetricFamily(PREFIX + item.name, item.meaning, labels=item.labels)
    bounds = [*map(str, item.buckets), "+Inf"]
    for labels, buckets in histograms.items():
        running, cumulated = 0, []
        for bound, count in zip(bounds, buckets.counts, strict=True):
            running += count
            cumulated.append((bound, running))
        metric.add_metric(labels, cumulated, buckets.total)
    return metric


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
