"""Opens the store when the server starts, so that a file that cannot be used is reported at once, and closes it."""

from __future__ import annotations

from enginehouse import hookimpl
from enginehouse.contract.server_events import ServerEvent, ServerStarted, ServerStopped
from enginehouse_responses.store import ResponseStore

__all__ = ["StoreLifetime"]


class StoreLifetime:
    """A plugin that hears of start and stop. Worker processes register surfaces too, but have no such events."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    @hookimpl
    def on_event(self, event: ServerEvent) -> None:
        """Open or close the store."""
        if isinstance(event, ServerStarted):
            self._store.open()
        elif isinstance(event, ServerStopped):
            self._store.close()
