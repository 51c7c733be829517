"""A real HTTP server in a thread of the test's process: quick to start, easy to inspect.

It is the server of ``enginehouse serve`` on a free port, without signals. Tests that need signals or a separate process
use :mod:`enginehouse_testkit.server`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from attrs import define, evolve, field

from enginehouse.api.http.listening import listen, url_of
from enginehouse.api.http.server import run_loop, serve
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import LimitsSettings, Settings

__all__ = ["ServerThread", "server_thread"]

_STOP_TIMEOUT_S = 60.0
_RENDER_TIMEOUT_S = 60.0


@define(eq=False)
class ServerThread:
    """A server that runs in a thread.

    Attributes:
        reread: returns the settings for a reload of the configuration.
        url: ``http://host:port``, without a path; ``unix:path`` if it listens on a socket file.
        exit_code: the return value of ``enginehouse serve``; None while it runs.
    """

    settings: Settings
    reread: Callable[[], Settings] | None = None
    url: str = ""
    exit_code: int | None = None
    _error: BaseException | None = None
    _ready: threading.Event = field(factory=threading.Event)
    _loop: asyncio.AbstractEventLoop | None = None
    _stop: asyncio.Event | None = None
    _thread: threading.Thread | None = None

    def start(self, registry: PluginRegistry) -> None:
        """Open the port and serve; return when the port is open, not when models are loaded."""
        listener = listen(self.settings.server)
        self.url = url_of(listener, self.settings.server)

        async def main() -> int:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._ready.set()
            return await serve(self.settings, registry, listener, self._stop, reread=self.reread)

        def run() -> None:
            try:
                with listener:
                    self.exit_code = run_loop(main())
            except BaseException as error:  # noqa: BLE001 - handed to the test, which raises it
                self._error = error
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=run, name="server")
        self._thread.start()
        self._ready.wait()

    def begin_stop(self) -> None:
        """Start the shutdown that SIGTERM causes; return at once."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already ended
                self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        """Shut down and wait for the end; re-raise errors of the server."""
        self.begin_stop()
        assert self._thread is not None
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise TimeoutError("the server did not stop")
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def server_thread(
    settings: Settings, registry: PluginRegistry | None = None, reread: Callable[[], Settings] | None = None
) -> Iterator[ServerThread]:
    """Serve while the block runs. The port of ``settings`` is replaced by a free one.

    Chat templates may take a minute instead of the default of ``limits.render_timeout_s``: machines that run tests are
    busy. Another value is kept.

    Args:
        reread: returns the settings for a reload.
    """
    settings = _with_patience(settings)
    server = ServerThread(settings, reread and (lambda: _with_patience(reread())))
    server.start(registry or PluginRegistry.for_settings(settings))
    try:
        yield server
    finally:
        server.stop()


def _with_patience(settings: Settings) -> Settings:
    """Return the settings with a free port, and with more time for chat templates unless it is set."""
    limits = settings.limits
    if limits.render_timeout_s == LimitsSettings().render_timeout_s:
        limits = evolve(limits, render_timeout_s=_RENDER_TIMEOUT_S)
    return evolve(settings, server=evolve(settings.server, port=0), limits=limits)
