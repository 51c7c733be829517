"""Metric families, and the values counted in them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal

from attrs import define, field, frozen
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from enginehouse.api.http.access import GAP_BUCKETS_S
from enginehouse.contract.inspection import BATCH_SIZES
from enginehouse.contract.usage import USAGE_FIELDS

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
