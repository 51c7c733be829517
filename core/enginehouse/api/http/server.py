"""The HTTP server process: opens the port early, loads models in the background, and shuts down cleanly.

Called by the command line and by tests. Knows uvicorn and signals; does not know any routes (``app``), and of models
only how to start and close their manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, cast

import uvicorn
from litestar.types import ASGIApp

from enginehouse.api.http.admission import Admission
from enginehouse.api.http.config_snapshots import ConfigSnapshots, Reread
from enginehouse.api.http.exchange import OpenExchanges
from enginehouse.api.http.keys import KeyStore
from enginehouse.api.http.listeners import Listeners, forward_model_events
from enginehouse.api.http.listening import listen, listen_further, tls_context, url_of
from enginehouse.api.http.protocol import HttpProtocol, WireBounds
from enginehouse.api.http.state import ApiState
from enginehouse.contract.errors import ServerStopping
from enginehouse.pipeline.model_profile import release
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import PluginRegistry
from enginehouse.process import EndSignals, begin_collection, raise_file_limit
from enginehouse.serving import ModelManager
from enginehouse.settings.config import Settings

_log = logging.getLogger("enginehouse.server")

OnProgress = Callable[[str, float, str], None]
"""Called with a model's name, the fraction loaded (0 to 1) and the current activity; any thread."""

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections, so that they close first
_CLOSING_SHARE = 0.4
"""Fraction of ``shutdown_s`` reserved for ending running requests and closing the workers."""
_HURRIED_S = 0.5
"""Time that requests have to send the final error to their clients after a second signal."""


def run(
    settings: Settings,
    registry: PluginRegistry,
    on_progress: OnProgress | None = None,
    on_listening: Callable[[str], None] | None = None,
    reread: Reread | None = None,
) -> int:
    """Serve until SIGINT, SIGTERM or the terminal closes; any other SIGHUP reloads the configuration.

    A second of these signals ends the requests that the first one lets finish.

    Args:
        on_progress: called with the loading progress of each model.
        on_listening: called once with the server's URL when the port is open; models may still be loading.
        reread: reads the settings again.

    Returns:
        The exit code: 0 after a signal, 1 if no model could be loaded.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    raise_file_limit()
    begin_collection()

    async def main() -> int:
        stop, hurry, hangup, had_terminal = asyncio.Event(), asyncio.Event(), asyncio.Event(), _has_terminal()
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe((stop if number == 1 else hurry).set)

        def on_hangup() -> None:
            # The same signal reports a closed terminal; without this check the server could not be stopped any more.
            (signals.note if had_terminal and not _has_terminal() else hangup.set)()

        signals.call(on_signal)
        with contextlib.suppress(NotImplementedError, AttributeError):
            loop.add_signal_handler(signal.SIGHUP, on_hangup)
        return await serve(settings, registry, listener, stop, on_progress, reread=reread, hangup=hangup, hurry=hurry)

    with EndSignals() as signals, listen(settings.server) as listener:
        if on_listening is not None:
            on_listening(url_of(listener, settings.server))
        return run_loop(main())


def _has_terminal() -> bool:
    """Return True if one of the standard streams is a terminal that is still open."""
    return any(os.isatty(descriptor) for descriptor in (0, 1, 2))


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on the fastest available event loop."""
    factory = uvicorn.Config(None, loop="auto", log_config=None).get_loop_factory()  # type: ignore[arg-type]  # no app, only the loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


async def serve(
    settings: Settings,
    registry: PluginRegistry,
    listener: socket.socket,
    stop: asyncio.Event,
    on_progress: OnProgress | None = None,
    *,
    reread: Reread | None = None,
    hangup: asyncio.Event | None = None,
    hurry: asyncio.Event | None = None,
) -> int:
    """Serve on ``listener`` until ``stop`` is set or no model can be loaded; returns the exit code.

    Args:
        reread: reads the settings again; called when ``hangup`` is set and by the admin API.
        hurry: set after ``stop`` to end the requests that it lets finish.

    Raises:
        ConfigError: the settings of a model are invalid.
    """
    async with _opened(settings, registry, on_progress, reread, hangup) as (app, state, starting):
        server = _Server(app, settings)
        further = listen_further(settings.server)
        for opened in (listener, *further):
            _log.info("listening on %s", url_of(opened, settings.server))
        serving = asyncio.create_task(server.serve(sockets=[listener, *further]))
        manager, exchanges = state.manager, state.exchanges
        try:
            is_failed = await _has_started(starting, stop) and await _until_stopped_or_failed(stop, manager, serving)
            await _shut_down(server, serving, exchanges, app.settings.server.shutdown_s, hurry or asyncio.Event())
        finally:
            server.should_exit = server.force_exit = True
            await asyncio.wait([serving], timeout=1.0)
            for opened in further:
                opened.close()
    return 1 if is_failed else 0


@contextlib.asynccontextmanager
async def application(settings: Settings, registry: PluginRegistry) -> AsyncIterator[tuple[ASGIApp, ModelManager]]:
    """Run the server without a port, for an HTTP server of another project; yields the ASGI application and its models.

    Addresses, TLS, the size of a request's head and the time in which a request must arrive are that server's. It also
    lets requests finish before the block ends.

    Raises:
        ConfigError: the settings of a model are invalid.
    """
    async with _opened(settings, registry) as (app, state, starting):
        await starting
        yield app, state.manager


@contextlib.asynccontextmanager
async def _opened(
    settings: Settings,
    registry: PluginRegistry,
    on_progress: OnProgress | None = None,
    reread: Reread | None = None,
    hangup: asyncio.Event | None = None,
) -> AsyncIterator[tuple[ConfigSnapshots, ApiState, asyncio.Future[Any]]]:
    """Start everything but a port; yields the application, its state, and the start of the models."""
    state, renderer = _state(settings, registry, on_progress)
    manager, keys, listeners = state.manager, state.keys, state.listeners
    app = ConfigSnapshots(state, renderer, reread)
    _warn_of_keys(keys, settings)
    watching = asyncio.gather(
        keys.watch(), forward_model_events(manager, listeners), app.reload_on(hangup or asyncio.Event())
    )
    listeners.start(release())
    starting = asyncio.gather(renderer.start(), manager.start())
    try:
        yield app, state, starting
    finally:
        watching.cancel()
        starting.cancel()
        await asyncio.gather(watching, starting, return_exceptions=True)
        await asyncio.gather(manager.close(), renderer.close())
        await asyncio.to_thread(listeners.close)
        registry.end_threads()


def _state(settings: Settings, registry: PluginRegistry, on_progress: OnProgress | None) -> tuple[ApiState, Renderer]:
    """Return the state shared by handlers, and the renderer of chat templates."""
    manager = ModelManager(settings, registry, on_progress)
    renderer = Renderer(settings.limits.render_timeout_s, settings.limits.render_max_chars)
    pipeline = Pipeline(settings, registry, manager, renderer)
    manager.check_with(pipeline.check_model)
    state = ApiState(
        settings=settings,
        registry=registry,
        manager=manager,
        pipeline=pipeline,
        exchanges=OpenExchanges(),
        listeners=Listeners(registry.listeners, failures=registry.failures),
        keys=KeyStore(settings.auth),
        admission=Admission(settings.limits),
    )
    return state, renderer


def _warn_of_keys(keys: KeyStore, settings: Settings) -> None:
    """Warn about models that keys may use but that are not served."""
    for name, unknown in keys.ring.unknown_models(settings.served_names()):
        _log.warning("the key %r may use the model %r, which is not served", name, unknown)


async def _has_started(starting: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Wait until the models have started, raising their errors; returns False if ``stop`` is set first."""
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        return False
    starting.result()
    return True


async def _until_stopped_or_failed(stop: asyncio.Event, manager: ModelManager, serving: asyncio.Task[None]) -> bool:
    """Wait for ``stop``; returns True if every model failed before one was ready, so that there is nothing to serve.

    A server whose models may be added while it runs waits for these.
    """
    stopped = asyncio.create_task(stop.wait())
    settled = asyncio.create_task(manager.wait_settled(math.inf))
    await asyncio.wait({stopped, settled, serving}, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    states = {status.state for status in manager.statuses()}
    if not stopped.done() and states == {"failed"} and not manager.settings.server.may_gain_models:
        stopped.cancel()
        return True
    await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return False


async def _shut_down(
    server: uvicorn.Server,
    serving: asyncio.Task[None],
    exchanges: OpenExchanges,
    shutdown_s: float,
    hurry: asyncio.Event,
) -> None:
    """Close the port, let requests finish until ``hurry`` is set, then end the rest with an error."""
    exchanges.stopping = True
    server.should_exit = True
    _log.info("stopping; %d requests are running; a second signal ends them", len(exchanges))
    finish_s = shutdown_s * (1 - _CLOSING_SHARE)
    hurried = asyncio.create_task(hurry.wait())
    try:
        await asyncio.wait({serving, hurried}, timeout=finish_s, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            exchanges.end_all(ServerStopping("The server is shutting down and had to end this request."))
            told_s = (shutdown_s - finish_s) / 2
            await asyncio.wait({serving, hurried}, timeout=told_s, return_when=asyncio.FIRST_COMPLETED)
        if hurried.done():
            await asyncio.wait([serving], timeout=_HURRIED_S)
    finally:
        hurried.cancel()
    for connection in list(server.server_state.connections):
        # A client that does not read its response would keep its connection, and the server, open indefinitely.
        connection.transport.abort()


def _uvicorn_config(app: ASGIApp, bounds: WireBounds) -> uvicorn.Config:
    """Return the configuration of uvicorn.

    Replaces Litestar's ``lifespan``, which ends before the port opens: models load while requests are answered, and
    :func:`serve` closes them in its own order.
    """
    protocol: Any = functools.partial(HttpProtocol, bounds=bounds)
    return uvicorn.Config(
        app,
        http="h11" if sys.platform == "win32" else protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        h11_max_incomplete_event_size=bounds.max_head_bytes,
    )


class _Server(uvicorn.Server):
    """Leaves signals to :func:`run`: uvicorn would raise them again at the end, and the exit code would not be 0.

    Limits the time of TLS handshakes, for which uvicorn has no setting.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        super().__init__(_uvicorn_config(app, WireBounds.of(settings)))
        self._tls: dict[str, Any] = {}
        if (context := tls_context(settings.server)) is not None:
            self._tls = {"ssl": context, "ssl_handshake_timeout": settings.server.head_timeout_s}

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the sockets."""
        await self.lifespan.startup()
        loop, self.servers = asyncio.get_running_loop(), []

        def connect() -> asyncio.Protocol:
            protocol: Any = self.config.http_protocol_class
            made = protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            return cast(asyncio.Protocol, made)

        for listener in sockets or ():
            is_file = isinstance(listener.getsockname(), str)
            create: Callable[..., Any] = loop.create_unix_server if is_file else loop.create_server
            self.servers.append(await create(connect, sock=listener, backlog=_BACKLOG, **self._tls))
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not capture signals."""
        yield
