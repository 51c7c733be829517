"""Runs a server inside a command, for commands that need one and were given no URL.

It is the server of ``enginehouse serve`` on a free local port, in a thread, with the loading progress on the terminal.
It stops with the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from attrs import evolve
from rich.console import Console
from rich.text import Text

from enginehouse.api.http.listening import listen, url_of
from enginehouse.api.http.server import run_loop, serve
from enginehouse.cli.serve import choose_models
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.auth import AuthSettings
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.settings.features import RouterSettings

__all__ = ["own_server"]

_STOP_TIMEOUT_S = 20.0


@contextlib.contextmanager
def own_server(settings: Settings, model: str | None, backend: str | None, console: Console) -> Iterator[str]:
    """Serve one model within the block; yields the server's URL. Other programs neither need nor get a key.

    Args:
        model: as for ``enginehouse serve``; None is the first configured one, else the starter model.
        backend: backend that opens it.
        console: shows the loading progress.

    Raises:
        EnginehouseError: the model does not exist, or it could not be loaded.
    """
    registry = PluginRegistry.for_settings(settings, also=[backend] if backend else [])
    models = choose_models([model] if model else [], backend, settings.models, registry)
    name = next(iter(models))
    settings = _alone(settings, name, models[name])
    running = _Running(settings, registry)
    with console.status(Text(f"Loading {name}")) as status:
        running.start(lambda share, text: status.update(Text(f"Loading {name} {share:.0%} {text}")))
        try:
            running.wait_ready()
        except BaseException:
            running.stop()
            raise
    try:
        yield running.url
    finally:
        running.stop()


def _alone(settings: Settings, name: str, model: ModelSettings) -> Settings:
    """Return the settings for one model, without those that refer to other models."""
    if isinstance(model.compressor, dict) and model.compressor.get("scorer") not in (None, name):
        model = evolve(model, compressor=None)
    server = evolve(settings.server, host="127.0.0.1", port=0, uds=None, root_path="")
    server = evolve(server, ssl_certfile=None, ssl_keyfile=None, ssl_keyfile_password=None, ssl_ca_certs=None)
    return evolve(settings, server=server, auth=AuthSettings(), router=RouterSettings(), models={name: model})


class _Running:
    """A server running in a thread."""

    def __init__(self, settings: Settings, registry: PluginRegistry) -> None:
        self._settings, self._registry = settings, registry
        self.url = ""
        self._settled = threading.Event()
        self._outcome = ""
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None

    def start(self, on_progress: Callable[[float, str], None]) -> None:
        """Open the port and start loading."""
        listener = listen(self._settings.server)
        self.url = url_of(listener, self._settings.server)

        def report(_: str, share: float, text: str) -> None:
            if text in ("ready", "failed"):
                self._outcome = text
                self._settled.set()
            elif not self._settled.is_set():
                on_progress(share, text)

        async def main() -> int:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            return await serve(self._settings, self._registry, listener, self._stop, report)

        def run() -> None:
            try:
                with listener:
                    run_loop(main())
            except BaseException as error:  # noqa: BLE001 - handed to the command, which raises it
                self._error = error
            finally:
                self._settled.set()

        self._thread = threading.Thread(target=run, name="server", daemon=True)
        self._thread.start()

    def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises the server's error, or ModelLoadError."""
        while not self._settled.wait(0.2):  # in short waits, so that Ctrl-C works on every system
            pass
        if isinstance(self._error, EnginehouseError):
            raise self._error
        if self._outcome != "ready":
            raise ModelLoadError("the model could not be loaded; the lines above say why")

    def stop(self) -> None:
        """Stop the server."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has already stopped
                self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            self._thread.join(_STOP_TIMEOUT_S)
