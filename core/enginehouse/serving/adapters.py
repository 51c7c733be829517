"""Adapters of a served model by name: those of its settings, and those that its operator adds and removes.

Requests are resolved to :class:`enginehouse.contract.adapters.Adapter` values here; a name is never taken for a path.
Does not load anything: workers do, when a request needs an adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from attrs import define, field

from enginehouse.contract.adapters import Adapter, digest_of
from enginehouse.contract.backend import Backend
from enginehouse.contract.errors import AdapterNotFound, AdapterRefused, InvalidRequest, ModelLoadError, quoted
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.background import run_in_daemon_thread
from enginehouse.serving.sources import find_source, hub_of
from enginehouse.settings.adapters import AdapterSettings
from enginehouse.settings.config import ModelSettings

__all__ = ["AdapterTable", "AskedAdapters", "plan_adapter", "plan_adapters"]

AskedAdapters = Sequence[tuple[str | int, float | None]]
"""Names, or places in the table, with the scale of the request; None is the adapter's own scale."""


@define
class AdapterTable:
    """The adapters of one model.

    Attributes:
        configured: names in the settings.
        planned: those of them whose files were found.
        added: adapters that the operator added, and ``removed`` the names of removed ones.
    """

    configured: tuple[str, ...] = ()
    planned: tuple[Adapter, ...] = ()
    added: dict[str, Adapter] = field(factory=dict)
    removed: set[str] = field(factory=set)
    _places_of_added: dict[str, None] = field(factory=dict)

    @property
    def places(self) -> tuple[str, ...]:
        """All names that adapters have had, by the ids of llama-server's API: no id is given to another adapter."""
        return tuple(dict.fromkeys((*self.configured, *self._places_of_added)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters that are offered, in the order of their places."""
        return tuple(name for name in self.places if name not in self.removed)

    def all(self) -> Mapping[str, Adapter]:
        """Return the adapters by name, without those of a model that was not planned yet."""
        known = {one.name: one for one in self.planned} | self.added
        return {name: known[name] for name in self.names if name in known}

    def scales(self, configured: Mapping[str, AdapterSettings]) -> dict[str, float]:
        """Return the scale of each adapter where a request gives none; ``configured`` are those of the settings."""
        known = self.all()
        return {name: known[name].scale if name in known else configured[name].scale for name in self.names}

    def not_found(self, model: str, name: object, param: str = "model") -> AdapterNotFound:
        """Return the error for a name that no adapter of the model has."""
        listed = f"; its adapters: {', '.join(sorted(self.names))}." if self.names else "; it has none."
        return AdapterNotFound(f"The model {quoted(model)} has no adapter {quoted(name)}{listed}", param)

    def add(self, adapter: Adapter) -> None:
        """Offer an adapter from now on."""
        self.added[adapter.name] = adapter
        self._places_of_added[adapter.name] = None
        self.removed.discard(adapter.name)

    def remove(self, model: str, name: str) -> Adapter | None:
        """Offer an adapter no longer; return it. Raises AdapterNotFound."""
        if name not in self.names:
            raise self.not_found(model, name, "name")
        adapter = self.all().get(name)
        self.added.pop(name, None)
        self.removed.add(name)
        return adapter

    def name_of(self, model: str, wanted: str | int, param: str) -> str:
        """Return the name of an adapter that a request names by its name or place. Raises AdapterNotFound."""
        name = self.places[wanted] if isinstance(wanted, int) and 0 <= wanted < len(self.places) else wanted
        if not isinstance(name, str) or name in self.removed or name not in self.places:
            raise self.not_found(model, wanted, param)
        return name

    def resolve(self, model: str, asked: AskedAdapters, param: str) -> tuple[Adapter, ...]:
        """Return the adapters that a request names, without those of scale 0: these are the base model.

        Raises:
            AdapterNotFound: there is no adapter of that name or place.
            InvalidRequest: an adapter is named twice.
        """
        table, found = self.all(), dict[str, Adapter]()
        for wanted, scale in asked:
            name = self.name_of(model, wanted, param)
            if name not in table:
                raise self.not_found(model, wanted, param)
            adapter = table[name]
            if adapter.name in found:
                raise InvalidRequest(f"{param}: names the adapter {quoted(name)} twice", param)
            found[name] = adapter if scale is None else msgspec.structs.replace(adapter, scale=scale)
        by_digest = {one.digest or one.path for one in found.values()}
        if len(by_digest) < len(found):
            raise InvalidRequest(f"{param}: two of the adapters have the same files", param)
        return tuple(one for one in found.values() if one.scale != 0)


def plan_adapters(
    name: str, settings: ModelSettings, backend: Backend, registry: PluginRegistry
) -> tuple[Adapter, ...]:
    """Find the files of a model's configured adapters and hash them; blocking.

    Raises:
        ModelLoadError: a source does not exist; names the setting.
    """
    if backend.opens == "engine":
        return tuple(Adapter(key, one.source, scale=one.scale) for key, one in settings.adapters.items())
    planned = []
    for key, one in settings.adapters.items():
        path = f"models.{name}.adapters.{key}.source"
        try:
            found = find_source(one.source, registry).path
            if found is None:
                raise ModelLoadError(f"{path}: file or folder not found: {one.source!r}")
            planned.append(Adapter(key, str(found), digest_of(found), one.scale))
        except OSError as error:
            raise ModelLoadError(f"{path}: {one.source!r} cannot be read: {error.strerror}") from error
    return tuple(planned)


async def plan_adapter(
    name: str, source: str, scale: float, folders: Iterable[str], registry: PluginRegistry
) -> Adapter:
    """Find the files of an adapter that the operator adds, and hash them.

    Args:
        source: path below one of ``folders``, or the id of a downloaded repository.
        folders: ``adapter_folders`` of the model.

    Raises:
        AdapterRefused: there are no such files there.
    """

    def plan() -> Adapter:
        path = _below(source, folders) or _downloaded(source, registry)
        if path is None:
            reason = "there is no such file or folder below the model's adapter_folders, nor a downloaded repository"
            raise AdapterRefused(f"source: {reason}: {quoted(source)}", "source")
        try:
            return Adapter(name, str(path), digest_of(path), scale)
        except OSError as error:
            raise AdapterRefused(f"source: {quoted(source)} cannot be read: {error.strerror}", "source") from error

    return await run_in_daemon_thread(f"adapter {name}", plan)


def _below(source: str, folders: Iterable[str]) -> Path | None:
    """Return the path of ``source`` in one of the folders, links followed; None if it leads out of all of them."""
    for folder in folders:
        root = Path(folder).expanduser().resolve()
        try:
            path = (root / source).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            continue
        if path != root and path.is_relative_to(root):
            return path
    return None


def _downloaded(source: str, registry: PluginRegistry) -> Path | None:
    hub = hub_of(source, registry)
    return hub.find(source) if hub is not None else None
