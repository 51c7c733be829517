"""From what happens in the server to the events that plugins hear."""

from __future__ import annotations

from typing import Any

import attrs

from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.listeners import Listeners
from enginehouse.contract.server_events import ModelChanged, RequestEnded
from enginehouse.serving import ModelManager

__all__ = ["forward_model_events", "request_ended"]

_NAMES = tuple(attribute.name for attribute in attrs.fields(RequestEnded))
_OWN = ("first_token_s", "parameters", "figures", "finish_reasons")


def request_ended(record: AccessRecord) -> RequestEnded:
    """The event of a request."""
    copied: dict[str, Any] = {name: getattr(record, name) for name in _NAMES if name not in _OWN}
    return RequestEnded(
        **copied,
        first_token_s=record.pace.first_s,
        figures=dict(record.figures),
        finish_reasons=tuple(record.finish_reasons),
        parameters=_parameters(record),
    )


def _parameters(record: AccessRecord) -> dict[str, Any]:
    """Of several prompts, the seed is the first one's."""
    if record.parameters is None:
        return {}
    sampling = record.parameters.sampling
    values = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "seed")}
    values |= {name: getattr(sampling, name) for name in ("frequency_penalty", "presence_penalty")}
    return {**values, "max_tokens": record.parameters.stopping.max_tokens}


async def forward_model_events(manager: ModelManager, listeners: Listeners) -> None:
    """Tell those who listen what happens to models; runs until it is cancelled. Progress of loads is left out."""
    with manager.events.subscribe() as subscription:
        async for event in subscription:
            if event.kind != "loading" or event.progress == 0.0:
                changed = ModelChanged(model=event.model, kind=event.kind, text=event.text, instance=event.instance)
                listeners.publish(changed)
