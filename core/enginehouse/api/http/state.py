"""State shared by handlers: one value per server.

Handlers are closures over it instead of having Litestar dependencies, which are looked up by name for each request.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from attrs import Factory, field, frozen

from enginehouse.api.http.admission import Admission
from enginehouse.api.http.exchange import OpenExchanges
from enginehouse.api.http.keys import KeyStore
from enginehouse.api.http.listeners import Listeners
from enginehouse.api.metrics import ServerMetrics
from enginehouse.contract.errors import ReloadRefused
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.serving.changing import ModelChanges
from enginehouse.settings.config import ModelSettings, Settings


@frozen(kw_only=True)
class ReloadReport:
    """The changes made by a reload of the configuration.

    Attributes:
        snapshot: number of the current configuration snapshot; the first one is 1.
        needs_restart: changed settings that cannot change while the server runs, and plugins that were changed; the
            old values and plugins stay in effect.
    """

    snapshot: int
    models: ModelChanges
    needs_restart: tuple[str, ...]

    def sentence(self) -> str:
        """Return the changes as text for the log."""
        words = {"added": self.models.added, "replaced": self.models.replaced, "removed": self.models.removed}
        parts = [f"models {word}: {', '.join(names)}" for word, names in words.items() if names]
        if self.needs_restart:
            parts.append(f"needing a restart: {', '.join(self.needs_restart)}")
        return f"configuration {self.snapshot} is served now" + "".join(f"; {part}" for part in parts)


async def _no_reload() -> ReloadReport:
    raise ReloadRefused("This server cannot read its configuration again.")


async def _no_addition(wanted: Callable[[Settings], tuple[str, ModelSettings]], *, download: bool = False) -> bool:
    raise ReloadRefused("This server cannot change its models.")


async def _no_removal(name: str) -> None:
    raise ReloadRefused("This server cannot change its models.")


class AddModel(Protocol):
    """See :meth:`enginehouse.api.http.config_snapshots.ConfigSnapshots.add_model`."""

    def __call__(
        self, wanted: Callable[[Settings], tuple[str, ModelSettings]], *, download: bool = False
    ) -> Coroutine[Any, Any, bool]:
        """Serve a further model."""


@frozen(eq=False, kw_only=True)
class ApiState:
    """The parts of the server that handlers use.

    Attributes:
        reload: reads the configuration again, see
            :meth:`enginehouse.api.http.config_snapshots.ConfigSnapshots.reload`; likewise ``add_model`` and
            ``remove_model``.
    """

    settings: Settings
    registry: PluginRegistry
    manager: ModelManager
    pipeline: Pipeline
    exchanges: OpenExchanges
    admission: Admission
    listeners: Listeners = field(factory=Listeners)
    metrics: ServerMetrics = field(
        default=Factory(
            lambda self: ServerMetrics(
                self.manager, self.exchanges, self.listeners, self.admission.memory, self.registry.failures
            ),
            takes_self=True,
        )
    )
    keys: KeyStore
    reload: Callable[[], Coroutine[Any, Any, ReloadReport]] = _no_reload
    add_model: AddModel = _no_addition
    remove_model: Callable[[str], Coroutine[Any, Any, None]] = _no_removal
