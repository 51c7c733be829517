"""Converts a finished request to attributes of OpenTelemetry's conventions for HTTP and generative AI.

Names follow the conventions for generative AI of 2026 (``gen_ai.provider.name``, not ``gen_ai.system``). Attributes
outside the conventions have the prefix ``enginehouse``. Prompts and answers are never attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from enginehouse.contract.server_events import RequestEnded

__all__ = ["OPERATIONS", "error_type", "metric_attributes", "span_attributes", "span_name"]

_Attributes = dict[str, str | bool | int | float | list[str]]

OPERATIONS: Mapping[str, str] = MappingProxyType({"/chat/completions": "chat", "/completions": "text_completion"})
"""Maps endpoints to ``gen_ai.operation.name``; requests to others create no span."""

_USAGE: Mapping[str, str] = MappingProxyType(
    {
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    }
)
"""Maps counts to the names of the conventions."""

_PARAMETERS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty")


def span_name(event: RequestEnded) -> str:
    """Return operation and model."""
    operation = OPERATIONS[event.endpoint or ""]
    return f"{operation} {event.model}" if event.model is not None else operation


def span_attributes(event: RequestEnded) -> _Attributes:
    """Return all known attributes."""
    attributes: Mapping[str, object] = {
        **metric_attributes(event),
        "http.request.method": event.method,
        "http.route": event.endpoint,
        "url.path": event.path,
        "gen_ai.response.id": event.answer_id,
        "gen_ai.response.finish_reasons": list(event.finish_reasons) or None,
        "gen_ai.response.time_to_first_chunk": event.first_token_s if event.stream else None,
        "gen_ai.request.stream": event.stream,
        "gen_ai.request.choice.count": event.num_choices if event.num_choices != 1 else None,
        **{f"gen_ai.request.{name}": event.parameters.get(name) for name in _PARAMETERS},
        **{_USAGE.get(name, f"enginehouse.{name}"): value for name, value in event.usage.items()},
        "enginehouse.request_id": event.request_id,
        "enginehouse.key": event.key,
        "enginehouse.outcome": event.outcome,
    }
    return _known(attributes)


def metric_attributes(event: RequestEnded) -> _Attributes:
    """Return the attributes of metrics: of bounded cardinality, so unverified client input is excluded."""
    return _known(
        {
            "gen_ai.operation.name": OPERATIONS[event.endpoint or ""],
            "gen_ai.provider.name": "enginehouse",
            "gen_ai.request.model": event.model,
            "gen_ai.response.model": event.model,
            "http.response.status_code": event.status or None,
            "error.type": error_type(event),
        }
    )


def error_type(event: RequestEnded) -> str | None:
    """Return the error code of a failed or refused request; None if it was answered."""
    return None if event.finish_reasons and event.status < 400 else event.outcome


def _known(attributes: Mapping[str, object]) -> _Attributes:
    return {name: value for name, value in attributes.items() if value is not None}  # type: ignore[misc]
