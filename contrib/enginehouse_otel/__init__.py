"""Plugin ``otel``: spans and metrics in OpenTelemetry's conventions, sent to a collector. Hook implementations only."""

from __future__ import annotations

from enginehouse import hookimpl
from enginehouse.contract.server_events import ServerEvent
from enginehouse_otel.listening import take
from enginehouse_otel.options import OtelOptions

__all__ = ["on_event", "options"]

options = OtelOptions


@hookimpl
def on_event(event: ServerEvent, options: OtelOptions) -> bool:
    """Pass the event on if the settings enable this plugin."""
    return take(event, options)
