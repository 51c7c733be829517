"""Which exporter an event belongs to: that of the server on whose thread it is told.

A process may run several servers, as tests do; each has a thread for this plugin, so a thread's own storage is the
server's.
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
    """Take an event; False for the first one means that no other is wanted."""
    if not options.enabled:
        return False
    if isinstance(event, ServerStarted):
        # Imported here: a server that sends nothing needs none of these packages.
        from enginehouse_otel.exporter import Exporter  # noqa: PLC0415

        _server.exporter = Exporter.of(options, event.version)
    elif _server.exporter is not None and isinstance(event, RequestEnded):
        _server.exporter.export(event)
    elif _server.exporter is not None and isinstance(event, ServerStopped):
        _server.exporter.close()
        _server.exporter = None
    return True
