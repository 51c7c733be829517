"""Counts every request when its response has ended. Costs some tens of microseconds per request, nothing per token."""

from __future__ import annotations

from collections.abc import Iterable

from enginehouse.api.http.access import AccessRecord
from enginehouse.api.metrics.families import FIGURES
from enginehouse.api.metrics.values import Values
from enginehouse.serving import ModelManager

__all__ = ["RequestMetrics"]

_OTHER = "other"
_CLIENT_LEFT = "cancelled"
_MAX_KEYS = 1000  # authenticators may know any number of callers, and figures are kept as long as the server runs


class RequestMetrics:
    """Counts requests.

    Args:
        values: where to.
        manager: knows which models there are.
    """

    def __init__(self, values: Values, manager: ModelManager) -> None:
        self._values = values
        self._manager = manager
        self._names: dict[str, str] = {}
        self._keys: set[str] = set()

    def count(self, record: AccessRecord, *, by_key: bool) -> None:
        """Count one request; ``by_key``: by API key as well."""
        values, model = self._values, self.model_label(record)
        endpoint, status = record.endpoint or _OTHER, str(record.status)
        values.add("requests", model, endpoint, status, record.outcome)
        if record.outcome == _CLIENT_LEFT:
            values.add("disconnects", model)
        elif record.status >= 400 and record.outcome != "ok":  # /health tells its state by a status
            values.add("refusals", endpoint, record.outcome)
        if by_key and record.key is not None:
            self._count_key(record, self._key_label(record.key))
        if record.model is not None:
            values.observe("request_seconds", model, endpoint, value=record.total_s)
            self._count_times(record, model)
            self._count_tokens(record, model)

    def _count_times(self, record: AccessRecord, model: str) -> None:
        values, pace = self._values, record.pace
        if pace.first_s is not None:
            values.observe("time_to_first_token_seconds", model, value=pace.first_s)
            counts, total = pace.gaps()
            values.observe_counts("inter_token_seconds", model, counts=counts, total=total)
        if record.queue_s is not None:
            values.observe("queue_seconds", model, value=record.queue_s)
        if record.prefill_s is not None:
            values.observe("prefill_seconds", model, value=record.prefill_s)

    def _count_tokens(self, record: AccessRecord, model: str) -> None:
        values = self._values
        if record.replays:
            values.add("replays", model, amount=record.replays)
        for name, amount in record.figures.items():
            if name in FIGURES:
                values.add(name, model, amount=amount)
        if record.prompt_tokens is None or record.completion_tokens is None:
            return
        values.add("prompt_tokens", model, amount=record.prompt_tokens)
        values.add("completion_tokens", model, amount=record.completion_tokens)
        if record.cached_tokens is None:
            return  # it was broken off: these counts are of what had come until then
        values.add("cached_prompt_tokens", model, amount=record.cached_tokens)
        values.add("prefix_cache_requests", model, "hit" if record.cached_tokens else "miss")
        values.observe("request_prompt_tokens", model, value=record.prompt_tokens)
        values.observe("request_completion_tokens", model, value=record.completion_tokens)

    def _count_key(self, record: AccessRecord, key: str) -> None:
        self._values.add("key_requests", key)
        for kind, amount in (("prompt", record.prompt_tokens), ("completion", record.completion_tokens)):
            if amount:
                self._values.add("key_tokens", key, kind, amount=amount)

    def _key_label(self, key: str) -> str:
        if len(self._keys) < _MAX_KEYS:
            self._keys.add(key)
        return key if key in self._keys else _OTHER

    def model_label(self, record: AccessRecord) -> str:
        """The model's configured name; ``other`` where the request named another one, nothing where it named none."""
        asked = record.model or record.asked_model
        if asked is None:
            return ""
        if asked not in self._names:
            self._names = dict(self._known_names())
        return self._names.get(asked, _OTHER)

    def _known_names(self) -> Iterable[tuple[str, str]]:
        for status in self._manager.statuses():
            yield from ((known, status.name) for known in (status.name, *status.aliases))
