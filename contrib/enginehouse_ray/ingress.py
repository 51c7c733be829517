"""The whole server as a Ray Serve deployment: an option of ``deploy ray``. Ray's proxies are then its HTTP servers.

It has one replica, so that queues, rate limits, metrics and the table of prefixes are of all requests. Ray Serve starts
it again, on another machine if its own is gone; the proxies find it there.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from typing import Any

from enginehouse.api.http.server import application
from enginehouse.contract.errors import ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import Settings
from enginehouse_ray import placement

from ray import serve  # isort: skip - after the settings of Ray in placement

__all__ = ["Ingress", "deploy"]


def deploy(settings: Settings, *, restart: bool) -> None:
    """Start the server, or replace the running one if its settings differ; returns when it answers.

    Raises:
        ModelLoadError: it could not be started.
    """
    pickled = pickle.dumps(settings)
    deployment = serve.deployment(
        serve.ingress()(Ingress),
        name="server",
        num_replicas=1,
        max_ongoing_requests=1_000_000,  # the server's own limits decide which requests are too many
        ray_actor_options={"num_cpus": 1},
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=settings.server.shutdown_s,
    )
    version = placement.version_of(placement.INGRESS, "server", hashlib.sha256(pickled).digest(), restart=restart)
    try:
        application = deployment.options(version=version, _internal=True).bind(pickled)
        serve.run(application, name=placement.INGRESS, route_prefix="/")
    except RuntimeError as error:
        raise ModelLoadError(f"Ray Serve could not start the server: {error}") from error


class Ingress:
    """Runs the server in the replica's process.

    Args:
        pickled: the settings.
    """

    async def __init__(self, pickled: bytes) -> None:  # type: ignore[misc]
        settings: Settings = pickle.loads(pickled)
        self._opened = contextlib.AsyncExitStack()
        running = application(settings, PluginRegistry.for_settings(settings))
        self._app, self._manager = await self._opened.enter_async_context(running)

    async def __del__(self) -> None:
        """End the server; Ray Serve awaits it."""
        await self._opened.aclose()

    async def check_health(self) -> None:
        """Raise an error if no model can be served: Ray Serve then starts the server again."""
        if {status.state for status in self._manager.statuses()} == {"failed"}:
            raise RuntimeError("every model has failed to load")

    def __serve_build_asgi_app__(self) -> Any:
        """Return the ASGI application; called by Ray Serve, which takes a bound method for one of ASGI 2."""

        async def answer(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "lifespan":
                await self._app(scope, receive, send)
                return
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

        return answer
