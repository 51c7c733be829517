"""Configuration snapshots: each request is served by the configuration that was current when it arrived.

Everything that is derived from settings (the pipeline with its defaults and templates, the decoders, the guard with its
keys) belongs to one snapshot and is never changed. A reload creates a new snapshot that replaces the old one, which
continues to serve the requests that it has started. Shared by all snapshots: the models, the rendering processes, the
running exchanges and the counters, that is, everything in the state that is not created anew here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

import attrs
from attrs import evolve
from litestar.types import Receive, Scope, Send

from enginehouse.api.http.access import AccessRecord
from enginehouse.api.http.admission import MemoryAccount
from enginehouse.api.http.app import build_app
from enginehouse.api.http.origins import Headers
from enginehouse.api.http.security import HttpGuard
from enginehouse.api.http.state import ApiState, ReloadReport
from enginehouse.contract.errors import (
    ConfigError,
    EnginehouseError,
    GenerationFailed,
    ModelConflict,
    PluginError,
    ReloadFailed,
    ReloadRefused,
    ServerStopping,
)
from enginehouse.contract.surface import ErrorAnswer
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import Contained
from enginehouse.serving.background import run_in_daemon_thread
from enginehouse.serving.changing import ModelChanger, ModelChanges, check_addable
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.settings.reload import SERVER, names_with

Reread = Callable[[], Settings]
"""Reads the settings again, in the same way as at startup; may block, raises ConfigError."""

_STAYS = "The configuration was not reloaded; the old one stays in use"

_log = logging.getLogger("enginehouse.server")


def _refuse_reload(error: EnginehouseError) -> NoReturn:
    """Raise the error of a reload that could not be applied."""
    message = f"{_STAYS}: {error.message}"
    if isinstance(error, ServerStopping):
        raise error
    if isinstance(error, PluginError | GenerationFailed):
        raise ReloadFailed(message) from error
    raise ReloadRefused(message, error.path if isinstance(error, ConfigError) else None) from error


class ConfigSnapshots:
    """The ASGI application that the server runs: passes each request to the newest snapshot.

    Args:
        first: the state of the first snapshot.
        renderer: renders the prompts of all snapshots.
        reread: None if the settings cannot be read again.
    """

    def __init__(self, first: ApiState, renderer: Renderer, reread: Reread | None = None) -> None:
        self._renderer = renderer
        self._reread = reread
        self._changer = ModelChanger(first.manager)
        self._reloading = asyncio.Lock()
        self._number = 1
        self._state = evolve(first, reload=self.reload, add_model=self.add_model, remove_model=self.remove_model)
        self._app = build_app(self._state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._app(scope, receive, send)

    def check_long_head(self, headers: Headers) -> ErrorAnswer | None:
        """See :meth:`enginehouse.api.http.security.HttpGuard.check_long_head`."""
        return self._app.check_long_head(headers)

    def end(self, record: AccessRecord) -> None:
        """See :meth:`enginehouse.api.http.security.HttpGuard.end`."""
        self._app.end(record)

    @property
    def memory(self) -> MemoryAccount:
        """The account of memory held on behalf of clients."""
        return self._state.admission.memory

    @property
    def settings(self) -> Settings:
        """Settings of the newest snapshot."""
        return self._state.settings

    async def reload(self) -> ReloadReport:
        """Read the settings again and apply them, all or nothing.

        Raises:
            ReloadRefused: the settings are invalid, or cannot be read again; nothing was changed.
            ReloadFailed: something failed while applying them, such as a plugin; nothing was changed.
            ServerStopping: the server is shutting down.
        """
        if self._reread is None:
            raise ReloadRefused("This server was started without a configuration that could be read again.")
        async with self._reloading:
            with Contained(_refuse_reload, "planning a new configuration failed"):
                wanted = self._with_added(await run_in_daemon_thread("reading the settings", self._reread))
                settings, needs_restart = keep_fixed(self.settings, wanted)
                needs_restart += await asyncio.to_thread(self._state.registry.changes)
                changes = await self._serve(settings, retries=True)
            return ReloadReport(snapshot=self._number, models=changes, needs_restart=needs_restart)

    async def _serve(self, settings: Settings, *, retries: bool = False) -> ModelChanges:
        """Make a snapshot of the settings, and serve new requests by it; see :meth:`ModelChanger.apply`."""
        state, app = await run_in_daemon_thread("making a snapshot", lambda: self._make(settings))
        planned = await self._changer.plan(settings)
        await self._check_templates(state)
        await asyncio.to_thread(state.keys.reload, settings.auth)
        # No await from here on: a request sees either the old snapshot or the new one.
        state.manager.check_open()
        state.admission.change(settings.limits)
        state.registry.failures.max_call_s = settings.limits.plugin_timeout_s
        state.manager.check_with(state.pipeline.check_model)
        changes = self._changer.apply(planned, retries=retries)
        self._state, self._app = state, app
        self._number += 1
        return changes

    def _with_added(self, wanted: Settings) -> Settings:
        """Return new settings with the models that administrators have added, unless they have models of that name."""
        added = {name: model for name, model in self.settings.models.items() if model.origin == "added"}
        return evolve(wanted, models={**wanted.models, **{n: m for n, m in added.items() if n not in wanted.models}})

    async def add_model(
        self, wanted: Callable[[Settings], tuple[str, ModelSettings]], *, download: bool = False
    ) -> bool:
        """Serve a further model until the server stops; False if its files have to be downloaded first.

        Args:
            wanted: returns its name and settings, from the settings that it is added to; may read the disk.
            download: add it also if its files have to be downloaded, and begin with that.

        Raises:
            EnginehouseError: of ``wanted``, or see :func:`enginehouse.serving.changing.check_addable`; nothing was
                changed.
        """
        async with self._reloading:
            manager, settings = self._state.manager, self.settings
            name, model = await run_in_daemon_thread("looking for a model", lambda: wanted(settings))
            is_here = await check_addable(manager, name, model)
            if is_here or download:
                await self._serve(evolve(settings, models={**settings.models, name: model}))
            if not is_here and download:
                await manager.download_on_demand(manager.find(name))
            return is_here

    async def remove_model(self, name: str) -> None:
        """Stop serving a model that was added; its running requests get ``limits.drain_s`` to finish.

        Raises:
            ModelNotFound: no model has that name.
            ModelConflict: it was not added, so it would come back with the next reload.
        """
        async with self._reloading:
            model = self._state.manager.find(name)
            if model.settings.origin != "added":
                where = "the configuration" if model.settings.origin == "settings" else "a folder in server.models_dir"
                raise ModelConflict(f"The model {model.name!r} is in {where}; remove it there and reload.", "id")
            kept = {known: one for known, one in self.settings.models.items() if known != model.name}
            await self._serve(evolve(self.settings, models=kept))

    async def reload_on(self, signal: asyncio.Event) -> None:
        """Reload whenever ``signal`` is set, and log the result. Runs until it is cancelled."""
        while True:
            await signal.wait()
            signal.clear()
            try:
                report = await self.reload()
            except EnginehouseError as error:
                _log.error("%s", error.message)
            else:
                _log.info("%s", report.sentence())

    def _make(self, settings: Settings) -> tuple[ApiState, HttpGuard]:
        """Build a snapshot. May block, so reloading does it off the event loop."""
        former = self._state
        recovery = former.pipeline.recovery
        pipeline = Pipeline(settings, former.registry, former.manager, self._renderer, recovery)
        state = evolve(former, settings=settings, pipeline=pipeline)
        return state, build_app(state)

    async def _check_templates(self, state: ApiState) -> None:
        """Refuse chat templates that cannot be compiled, for models that stay loaded; choose their parsers."""
        for status in state.manager.statuses():
            settings = state.settings.models.get(status.name)
            if status.info is None or settings is None:
                continue
            if settings.chat_template is not None:
                await state.pipeline.check_model(status.name, status.info)
            else:
                await state.pipeline.prepare_profile(status.name, status.info)


def keep_fixed(old: Settings, new: Settings) -> tuple[Settings, tuple[str, ...]]:
    """Return the new settings with the old values of those that need a restart, and the paths of the changed ones."""
    kept: list[str] = []
    whole = names_with(Settings, SERVER)
    for table in (field.name for field in attrs.fields(Settings)):
        before, after = getattr(old, table), getattr(new, table)
        if table in whole and before != after:
            kept.append(table)
            new = evolve(new, **{table: before})
        elif attrs.has(type(after)):
            names = names_with(type(after), SERVER)
            changed = {name: getattr(before, name) for name in names if getattr(before, name) != getattr(after, name)}
            kept += [f"{table}.{name}" for name in changed]
            new = evolve(new, **{table: evolve(after, **changed)})
    return new, tuple(kept)
