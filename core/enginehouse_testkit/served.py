"""A client of a server in a thread whose models are loaded: what most tests over HTTP begin with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import httpx

from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import Settings
from enginehouse_testkit.server_thread import server_thread
from enginehouse_testkit.waiting import wait_until

__all__ = ["served", "wait_ready"]

_LOAD_TIMEOUT_S = 120.0


def wait_ready(server: httpx.Client | str, timeout_s: float = _LOAD_TIMEOUT_S) -> None:
    """Wait until ``/health`` of a server, given by its URL or a client, returns 200.

    Raises:
        TimeoutError: a model is not ready in time; the error contains the last response.
    """
    client = httpx.Client(base_url=server, timeout=timeout_s, trust_env=False) if isinstance(server, str) else server
    last: list[str] = [""]

    def is_ready() -> bool:
        response = client.get("/health")
        last[0] = response.text
        return response.status_code == 200

    with client if client is not server else contextlib.nullcontext():
        wait_until(is_ready, lambda: f"/health, which returns {last[0]}", timeout_s)


@contextlib.contextmanager
def served(
    settings: Settings,
    registry: PluginRegistry | None = None,
    *,
    timeout: float = 30.0,
    reread: Callable[[], Settings] | None = None,
    headers: dict[str, str] | None = None,
) -> Iterator[httpx.Client]:
    """Serve while the block runs, which gets a client and begins when all models are loaded.

    Args:
        timeout: of each request, in seconds.
        reread: returns the settings for a reload.
        headers: sent with each request.
    """
    with (
        server_thread(settings, registry, reread) as running,
        httpx.Client(base_url=running.url, timeout=timeout, headers=headers) as client,
    ):
        wait_ready(client)
        yield client
