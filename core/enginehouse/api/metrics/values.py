"""What has been counted: one number, or one histogram, per family and labels. One writer at a time; no locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from attrs import define, field
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from enginehouse.api.metrics.families import FAMILIES, PREFIX, Family, family

__all__ = ["Values"]

_Labels = tuple[str, ...]


@define
class _Buckets:
    counts: list[int]
    total: float = 0.0


@define
class Values:
    """Figures of all families that have any. Families are named without prefix; labels come in their order."""

    _numbers: dict[str, dict[_Labels, float]] = field(factory=dict)
    _buckets: dict[str, dict[_Labels, _Buckets]] = field(factory=dict)

    def add(self, name: str, *labels: str, amount: float = 1) -> None:
        """Count up."""
        numbers = self._numbers.setdefault(name, {})
        numbers[labels] = numbers.get(labels, 0) + amount

    def set(self, name: str, *labels: str, value: float) -> None:
        """Replace a number."""
        self._numbers.setdefault(name, {})[labels] = value

    def observe(self, name: str, *labels: str, value: float) -> None:
        """Put one value into a histogram."""
        buckets = self._histogram(name, labels)
        buckets.counts[bisect_left(family(name).buckets, value)] += 1
        buckets.total += value

    def observe_counts(self, name: str, *labels: str, counts: Sequence[int], total: float) -> None:
        """Put values into a histogram that were counted in its buckets before."""
        buckets = self._histogram(name, labels)
        buckets.counts = [old + new for old, new in zip(buckets.counts, counts, strict=True)]
        buckets.total += total

    def get(self, name: str, *labels: str) -> float:
        """One number; 0 where nothing was counted."""
        return self._numbers.get(name, {}).get(labels, 0)

    def _histogram(self, name: str, labels: _Labels) -> _Buckets:
        histograms = self._buckets.setdefault(name, {})
        buckets = histograms.get(labels)
        if buckets is None:
            buckets = histograms[labels] = _Buckets([0] * (len(family(name).buckets) + 1))
        return buckets

    def collect(self) -> Iterator[Metric]:
        """The families that have figures, as the library writes them."""
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
