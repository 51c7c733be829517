"""Contract of backends whose models run in workers on other machines: they place and connect the workers of core.

Such a backend (``opens = "workers"``) knows neither requests nor models. Core gives it the first message of a worker,
which names the backend that opens the model there and all of its settings; it starts workers that get this message,
connects each with the server, and says when one is gone. Links carry bytes only, in the frames of core's workers. The
worker's end of a link is ``enginehouse_backendkit.shared_worker.SharedWorker``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from enginehouse.contract.backend import Progress
from enginehouse.contract.engine import Placement
from enginehouse.contract.types import EngineRequest

__all__ = ["Fleet", "PlacedWorkers", "PlacesWorkers", "WorkerLink"]


class WorkerLink(Protocol):
    """The server's end of the link with one worker. Used on the server's event loop."""

    def feed(self, data: bytes) -> None:
        """Give the server bytes that the worker has sent, in their order, cut at any place."""

    def end(self, reason: str) -> None:
        """Report that the worker is gone, or leaves: its requests continue in the others. Idempotent.

        Args:
            reason: continues "the worker", as in "is gone with its machine".
        """


class Fleet(Protocol):
    """The workers of one model, as the backend that places them sees them. Used on the server's event loop."""

    def join(self, place: str, send: Callable[[bytes], Awaitable[None]], on_end: Callable[[], None]) -> WorkerLink:
        """Add a worker, which is used once it has said that its model is loaded.

        Args:
            place: name of the replica and its machine, unique among the workers of the model.
            send: sends bytes to the worker. The next call comes after the last one has returned.
            on_end: called once, when the server has closed its end.
        """

    def end(self, reason: str) -> None:
        """Report that there will be no workers any more: the model is opened again."""

    @property
    def num_requests(self) -> int:
        """Number of requests that need the model, those included that wait for a worker."""


class PlacedWorkers(Protocol):
    """The placed workers of one model.

    Calls:
        choose: for each request, each time that it enters a worker; server, event loop; must not block.
        close: once, when the model is unloaded; server, event loop.
    """

    def choose(self, request: EngineRequest, loads: Mapping[str, int]) -> Placement:
        """Return the worker for a request. The server passes on why, and sends the request there.

        Args:
            request: the request; a call has no id, and may have no prompt.
            loads: number of requests by place, of the workers that may be chosen; at least one.
        """

    async def close(self) -> None:
        """Disconnect the workers; those that belong to this server alone are stopped."""


@runtime_checkable
class PlacesWorkers(Protocol):
    """Methods of a backend with ``opens = "workers"`` besides :class:`enginehouse.contract.backend.Backend`.

    Its options class has the attribute ``inner``: the name of the backend that opens the model in the workers, or None
    for the one that suits the model best. Settings that its options class does not have are those of that backend.

    Calls:
        place: for each load; server, event loop; no limit while ``progress`` changes, see ``load_timeout_s``.
    """

    async def place(self, model: str, load: bytes, options: Any, fleet: Fleet, progress: Progress) -> PlacedWorkers:
        """Start workers, or find those that run; returns without waiting for their models.

        Args:
            model: name of the model.
            load: the first message for each worker, without its length.
            options: the backend's own settings.
            fleet: gets the workers, now and later.
            progress: called while the workers start.

        Raises:
            MissingDependency: a library is not installed.
            ModelLoadError: no worker can be started.
        """
