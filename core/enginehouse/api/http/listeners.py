"""Server events for listener plugins: each listener runs in its own thread.

Replaces Litestar's event emitter, which runs listeners on the event loop: a slow plugin would delay requests.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from queue import Full, Queue
from typing import Any

import attrs

from enginehouse.api.http.access import AccessRecord
from enginehouse.contract.errors import PluginFailed
from enginehouse.contract.server_events import ModelChanged, RequestEnded, ServerEvent, ServerStarted, ServerStopped
from enginehouse.plugins import Guard, PluginFailures
from enginehouse.serving import ModelManager

Listener = Callable[..., object]
"""Called with each event, as ``event=``. Returning a list that contains False for the first event ends the calls."""

_MAX_WAITING = 10_000
_CLOSE_S = 5.0


class Listeners:
    """All listener plugins. ``publish`` may be called from one thread only, and does not block.

    Args:
        listeners: by the name of their plugin.
        failures: where their failures are counted and logged.

    Attributes:
        dropped: number of lost events, by plugin and reason (``failed`` or ``queue_full``).
    """

    def __init__(
        self,
        listeners: Mapping[str, Listener] | None = None,
        max_waiting: int = _MAX_WAITING,
        failures: PluginFailures | None = None,
    ) -> None:
        self.dropped: Counter[tuple[str, str]] = Counter()
        failures = failures if failures is not None else PluginFailures()
        self._threads = [
            _Thread(Guard(name, "listener", name, failures), call, max_waiting, self.dropped)
            for name, call in (listeners or {}).items()
        ]

    def __bool__(self) -> bool:
        """True if any listener is active."""
        return any(thread.is_listening for thread in self._threads)

    def start(self, version: str) -> None:
        """Start delivering events; ``version`` is Enginehouse's."""
        self.publish(ServerStarted(version=version))
        for thread in self._threads:
            thread.start()

    def publish(self, event: ServerEvent) -> None:
        """Send an event to all listeners."""
        for thread in self._threads:
            if thread.is_listening:
                thread.push(event)

    def close(self) -> None:
        """Send the final event to all listeners, and give them a few seconds to process their queues."""
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread.is_listening:
                thread.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Thread(threading.Thread):
    """One plugin's thread; a daemon, so that a plugin that hangs does not block the server's exit."""

    def __init__(self, guard: Guard, call: Listener, max_waiting: int, dropped: Counter[tuple[str, str]]) -> None:
        super().__init__(name=f"listener {guard.plugin}", daemon=True)
        self._plugin = guard.plugin
        self._guard = guard
        self._call = call
        self._dropped = dropped
        self._waiting: Queue[ServerEvent] = Queue(max_waiting)
        self.is_listening = True

    def push(self, event: ServerEvent) -> None:
        """Queue an event, or drop it if the queue is full."""
        try:
            self._waiting.put_nowait(event)
        except Full:
            self._dropped[self._plugin, "queue_full"] += 1

    def end(self) -> None:
        """Queue the final event, dropping the oldest one if necessary."""
        while True:
            try:
                self._waiting.put_nowait(ServerStopped())
                return
            except Full:
                self._waiting.get()
                self._dropped[self._plugin, "queue_full"] += 1

    def run(self) -> None:
        """Deliver the events in order."""
        while True:
            event = self._waiting.get()
            try:
                with self._guard.calling("on_event", passes=(PluginFailed,)):
                    answer = self._call(event=event)
                if isinstance(event, ServerStarted) and isinstance(answer, list) and False in answer:
                    self.is_listening = False
                    return
            except PluginFailed:  # only its events are lost
                self._dropped[self._plugin, "failed"] += 1
            if isinstance(event, ServerStopped):
                return


_NAMES = tuple(attribute.name for attribute in attrs.fields(RequestEnded))
_OWN = ("first_token_s", "parameters", "usage", "finish_reasons")


def request_ended(record: AccessRecord) -> RequestEnded:
    """Return the event for a finished request."""
    copied: dict[str, Any] = {name: getattr(record, name) for name in _NAMES if name not in _OWN}
    return RequestEnded(
        **copied,
        first_token_s=record.pace.first_s,
        usage=record.counts(),
        finish_reasons=tuple(record.finish_reasons),
        parameters=_parameters(record),
    )


def _parameters(record: AccessRecord) -> dict[str, Any]:
    """Return the main parameters; with several prompts, the seed is that of the first one."""
    if record.parameters is None:
        return {}
    sampling = record.parameters.sampling
    values = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "seed")}
    values |= {name: getattr(sampling, name) for name in ("frequency_penalty", "presence_penalty")}
    return {**values, "max_tokens": record.parameters.stopping.max_tokens}


async def forward_model_events(manager: ModelManager, listeners: Listeners) -> None:
    """Publish model events until cancelled. Progress of loads and downloads is left out."""
    with manager.events.subscribe() as subscription:
        async for event in subscription:
            if event.kind not in ("loading", "downloading") or event.progress == 0.0:
                changed = ModelChanged(model=event.model, kind=event.kind, text=event.text, instance=event.instance)
                listeners.publish(changed)
