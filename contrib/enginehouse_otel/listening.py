"""Selects the exporter of an event: the one of the server whose thread delivers it.

A process may run several servers, as in tests; each has its own thread for this plugin, so the exporter is stored in
thread-local storage.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from enginehouse.contract.server_events import RequestEnded, ServerEvent, ServerStarted, ServerStopped
from enginehouse_otel.options import OtelOptions

if TYPE_CHECKING:
    from enginehouse_otel.exporter import Exporter

__all__ = ["take"]


class _Server(threading.local):
    exporter: Exporter | None = None


_server = _Server()


def take(event: ServerEvent, options: OtelOptions) -> bool:
    """Process an event; False for the first one unsubscribes from further events."""
    if not options.enabled:
        return False
    if isinstance(event, ServerStarted):
        # Imported here: a server with exporting disabled needs none of these packages.
        from enginehouse_otel.exporter import Exporter  # noqa: PLC0415

        _server.exporter = Exporter.of(options, event.version)
    elif _server.exporter is not None and isinstance(event, RequestEnded):
        _server.exporter.export(event)
    elif _server.exporter is not None and isinstance(event, ServerStopped):
        _server.exporter.close()
        _server.exporter = None
    return True
