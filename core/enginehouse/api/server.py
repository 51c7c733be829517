"""The HTTP server process: an early-opened port, models that load behind it, and a clean end.

Called by the command line and by tests. Knows uvicorn and signals; knows no routes (``app``) and
nothing about models beyond starting and closing their manager.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from litestar.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from enginehouse.api.app import build_app
from enginehouse.api.errors import ErrorAnswer, http_error
from enginehouse.api.exchange import OpenExchanges
from enginehouse.api.security import Guard
from enginehouse.api.state import ApiState
from enginehouse.config import ServerSettings, Settings
from enginehouse.errors import ConfigError, ServerStopping
from enginehouse.models import ModelManager
from enginehouse.pipeline import Pipeline
from enginehouse.plugins import PluginRegistry
from enginehouse.prompt.renderer import Renderer

__all__ = ["OnProgress", "listen", "run", "run_loop", "serve", "url_of"]

_log = logging.getLogger("enginehouse.server")

OnProgress = Callable[[str, float, str], None]
"""Called with a model's name, the share loaded (0 to 1) and what is being done; any thread."""

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than clients and proxies keep idle connections, so that they close first
_HEADER_SIGNS = len(": \r\n")
_CLOSING_SHARE = 0.4
"""Part of ``shutdown_s`` kept for ending what still runs and closing the workers."""


def run(
    settings: Settings,
    registry: PluginRegistry,
    on_progress: OnProgress | None = None,
    on_listening: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM.

    Args:
        on_progress: told how far each model has loaded.
        on_listening: told the server's URL once, when the port is open; models may still be loading.

    Returns:
        The exit code: 0 after a signal, 1 when no model could be loaded.

    Raises:
        ConfigError: the address cannot be listened on.
    """
    listener = listen(settings.server)

    async def main() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows
                loop.add_signal_handler(number, stop.set)
        return await serve(settings, registry, listener, stop, on_progress)

    with listener:
        if on_listening is not None:
            on_listening(url_of(listener))
        return run_loop(main())


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run ``main`` on the fastest event loop there is here."""
    factory = uvicorn.Config(None, loop="auto", log_config=None).get_loop_factory()  # type: ignore[arg-type]  # no app, only the loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def listen(settings: ServerSettings) -> socket.socket:
    """Open the port. Raises ConfigError when it is taken or the address does not exist here."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host!r}: {error.strerror}", "server.host") from error
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"
        raise ConfigError(message, "server.port") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """``http://host:port`` of an open listener."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    settings: Settings,
    registry: PluginRegistry,
    listener: socket.socket,
    stop: asyncio.Event,
    on_progress: OnProgress | None = None,
) -> int:
    """Serve on ``listener`` until ``stop`` is set or no model can be loaded; returns the exit code.

    Raises:
        ConfigError: the settings of a model are wrong.
    """
    manager = ModelManager(settings, registry, on_progress)
    renderer = Renderer(settings.limits.render_timeout_s, settings.limits.render_max_chars)
    pipeline = Pipeline(settings, registry, manager, renderer)
    manager.check_with(pipeline.check_model)
    exchanges = OpenExchanges()
    app = build_app(
        ApiState(settings=settings, registry=registry, manager=manager, pipeline=pipeline, exchanges=exchanges)
    )
    server = _Server(_uvicorn_config(app, settings.limits.max_header_bytes))
    _log.info("listening on %s", url_of(listener))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.gather(manager.start(), renderer.start())
        is_failed = await _until_stopped_or_failed(stop, manager, serving)
        await _shut_down(server, serving, exchanges, settings.server.shutdown_s)
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(manager.close(), renderer.close())
        await asyncio.wait([serving], timeout=1.0)
    return 1 if is_failed else 0


async def _until_stopped_or_failed(stop: asyncio.Event, manager: ModelManager, serving: asyncio.Task[None]) -> bool:
    """Wait for ``stop``; True when every model failed before one was ready, so that there is nothing to serve."""
    stopped = asyncio.create_task(stop.wait())
    settled = asyncio.create_task(manager.wait_settled(math.inf))
    await asyncio.wait({stopped, settled, serving}, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    states = {status.state for status in manager.statuses()}
    if not stopped.done() and states == {"failed"}:
        stopped.cancel()
        return True
    await asyncio.wait({stopped, serving}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    return False


async def _shut_down(
    server: uvicorn.Server, serving: asyncio.Task[None], exchanges: OpenExchanges, shutdown_s: float
) -> None:
    """Close the port, let requests finish, then end the rest with an error that says so."""
    exchanges.stopping = True
    server.should_exit = True
    _log.info("stopping; %d requests are running", len(exchanges))
    finish_s = shutdown_s * (1 - _CLOSING_SHARE)
    await asyncio.wait([serving], timeout=finish_s)
    if not serving.done():
        exchanges.end_all(ServerStopping("The server is shutting down and had to end this request."))
        await asyncio.wait([serving], timeout=(shutdown_s - finish_s) / 2)
    for connection in list(server.server_state.connections):
        # A client that does not read what was sent to it would keep its connection, and the server, for ever.
        connection.transport.abort()


def _uvicorn_config(app: ASGIApp, max_header_bytes: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11" if sys.platform == "win32" else _Protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        h11_max_incomplete_event_size=max_header_bytes,  # read by h11, and by our own protocol
    )


class _Server(uvicorn.Server):
    """Leaves signals to :func:`run`: uvicorn would raise them again at the end, and the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture nothing."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's HTTP, with the usual error object for what is no HTTP, and with bounded request heads.

    The parser keeps an unfinished head in memory and copies it with every packet, so its size is looked at while it
    comes, not only when it is complete.
    """

    _reads_head = True
    _began_before = True  # this packet did: all of it belongs to the head
    _num_head_bytes = 0
    _is_refused = False  # what still comes on this connection is not looked at

    def data_received(self, data: bytes) -> None:
        """Take what arrived; a head that does not end is refused."""
        if self._is_refused:
            return
        self._began_before = self._reads_head
        super().data_received(data)
        if not (self._reads_head and self._began_before):
            return
        self._num_head_bytes += len(data)
        self._check_head(self._num_head_bytes)

    def on_headers_complete(self) -> None:
        """The body begins, unless the head was too long."""
        self._check_head(len(self.url) + sum(len(name) + len(value) + _HEADER_SIGNS for name, value in self.headers))
        self._reads_head, self._num_head_bytes = False, 0
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The next head begins."""
        self._reads_head, self._began_before = True, False
        if not self._is_refused:
            super().on_message_complete()

    def _check_head(self, num_bytes: int) -> None:
        most = self.config.h11_max_incomplete_event_size
        if most is None or num_bytes <= most or self.transport.is_closing():
            return
        too_long = http_error(431, f"The request's headers are longer than {most} bytes (limits.max_header_bytes).")
        guard = self.app
        assert isinstance(guard, Guard)
        self._refuse(guard.check_long_head(dict(reversed(self.headers))) or too_long)

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection."""
        self._refuse(http_error(400, msg))

    def _refuse(self, answer: ErrorAnswer) -> None:
        self._is_refused = True
        body = answer.body()
        head = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\ncontent-type: application/json\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()
