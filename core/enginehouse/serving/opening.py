"""Opens a model: backend, options, engine settings, and the engine in a worker or in this process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

import attrs
from attrs import evolve, field, fields, frozen

from enginehouse.contract.adapters import Adapter
from enginehouse.contract.backend import Backend, ModelSource, Progress, Runner
from enginehouse.contract.engine import Engine
from enginehouse.contract.errors import ConfigError, EngineDead, ModelLoadError
from enginehouse.contract.fleet import PlacesWorkers
from enginehouse.contract.pooler import Pooler
from enginehouse.contract.types import EngineSettings
from enginehouse.plugins import PluginRegistry, guard_of
from enginehouse.serving.adapters import plan_adapters
from enginehouse.serving.background import run_in_daemon_thread
from enginehouse.serving.engine_calls import guarded_engine
from enginehouse.serving.model_parts import DrafterPlan, plan_drafters, plan_exit_policy, plan_prefix_disk
from enginehouse.serving.sources import check_backend, choose_backend, find_source, no_such_model, suits
from enginehouse.settings.config import ModelSettings, Settings, structure_options
from enginehouse.settings.reload import WORKER_ONLY, names_with
from enginehouse.workers.client import WorkerEngine
from enginehouse.workers.fleet import FleetEngine
from enginehouse.workers.health import LoadWatch
from enginehouse.workers.messages import ExitPolicyLoad, Load, PoolingLoad, PrefixDiskLoad, encode
from enginehouse.workers.request_queue import RequestQueue


def check_own_engine(name: str, settings: ModelSettings, backend: Backend) -> None:
    """Refuse settings of a worker if there is none, because they would have no effect.

    Raises:
        ConfigError: names the first of them.
    """
    if backend.opens != "engine":
        return
    defaults = {attribute.name: attribute.default for attribute in fields(ModelSettings)}
    for setting in names_with(ModelSettings, WORKER_ONLY):
        if getattr(settings, setting) != defaults[setting]:
            path = f"models.{name}.{setting}"
            reason = f"the backend {backend.name!r} serves this model by an engine of its own; remove this setting"
            raise ConfigError(f"{path}: {reason}", path)


@frozen
class PlacementPlan:
    """The backend that places a model's workers on other machines, with its own settings as plain data."""

    backend: Backend
    options: dict[str, Any]


def _plan_placement(
    name: str, settings: ModelSettings, registry: PluginRegistry
) -> tuple[PlacementPlan | None, ModelSettings]:
    """Split the settings of a model between the backend that places its workers, if it has one, and the inner one."""
    outer = registry.backends.get(settings.backend or "")
    if outer is None or outer.opens != "workers":
        return None, settings
    path = f"models.{name}"
    for setting in ("isolation", "python"):
        if getattr(settings, setting) != getattr(fields(ModelSettings), setting).default:
            reason = f"the backend {outer.name!r} starts the workers of this model elsewhere; remove this setting"
            raise ConfigError(f"{path}.{setting}: {reason}", f"{path}.{setting}")
    known = {attribute.name for attribute in attrs.fields(outer.options)}
    own = {key: value for key, value in settings.options.items() if key in known}
    inner = structure_options(outer.options, own, path).inner
    if inner is not None and (chosen := registry.backends.get(inner)) is not None and chosen.opens != "model":
        reason = f"the backend {inner!r} opens no model in a worker, so the backend {outer.name!r} cannot place it"
        raise ConfigError(f"{path}.inner: {reason}", f"{path}.inner")
    rest = {key: value for key, value in settings.options.items() if key not in known}
    return PlacementPlan(outer, own), evolve(settings, backend=inner, options=rest)


PLAN_TIMEOUT_S = 60.0
"""Planning reads only names, sizes and headers of files."""


@frozen(kw_only=True)
class ModelPlan:
    """Plan for opening a model.

    Attributes:
        options: the backend's settings as plain data, including ``context`` and ``slots`` if it has them.
        reason: reason for the choice of the backend.
        placement: for workers on other machines.
    """

    name: str
    source: ModelSource
    backend: Backend
    options: dict[str, Any]
    reason: str
    drafters: tuple[DrafterPlan, ...] = ()
    exit_policy: ExitPolicyLoad | None = None
    prefix_disk: PrefixDiskLoad | None = None
    pooling: PoolingLoad = field(factory=PoolingLoad)
    placement: PlacementPlan | None = None
    adapters: tuple[Adapter, ...] = ()

    @property
    def options_path(self) -> str:
        """Dotted path of the options in the configuration, for messages."""
        return f"models.{self.name}"


@frozen(eq=False)
class OpenEngine:
    """An engine that is ready; ``died`` receives the reason when it ends by itself."""

    engine: Engine
    died: asyncio.Future[EngineDead]


def plan_model(name: str, settings: ModelSettings, registry: PluginRegistry) -> ModelPlan:
    """Find the source, choose the backend and check its options; blocking, but fast.

    Raises:
        ConfigError: an option is unknown to the backend or has an invalid value, or settings contradict each other.
        ModelLoadError: the source does not exist, or no backend opens it.
        PluginFailed: a plugin failed; its traceback is in the log.
    """
    if settings.python is not None and settings.isolation == "thread":
        path = f"models.{name}.python"
        raise ConfigError(f"{path}: a thread runs in the server's own Python; use isolation = 'process'", path)
    check_backend(settings.backend, registry)
    placement, settings = _plan_placement(name, settings, registry)
    source = find_source(settings.source, registry)
    # Another environment or machine has other libraries, so probing in this one would be meaningless.
    can_probe = settings.python is None and placement is None
    check_backend(settings.backend, registry)
    wanted = registry.backends.get(settings.backend or "")
    candidates = [wanted] if wanted else registry.backends.values()
    if source.path is None and not any(suits(source, backend, probe=can_probe) for backend in candidates):
        raise no_such_model(settings.source, registry)
    choice = choose_backend(source, settings.backend, registry.backends, probe=can_probe)
    options = dict(settings.options)
    known = {attribute.name for attribute in attrs.fields(choice.backend.options)}
    for generic in ("context", "slots"):
        if generic in known:
            options[generic] = getattr(settings, generic)
    plan = ModelPlan(name=name, source=source, backend=choice.backend, options=options, reason=choice.reason)
    generic_names = tuple(attribute.name for attribute in attrs.fields(ModelSettings))
    if placement is not None:
        generic_names += tuple(attribute.name for attribute in attrs.fields(placement.backend.options))
    structure_options(choice.backend.options, options, plan.options_path, also_known=generic_names)
    check_own_engine(name, settings, choice.backend)
    exit_policy = plan_exit_policy(name, settings, choice.backend, registry)
    # Drafts are verified with all layers, so a model with early exit has no default drafter.
    model = source, choice.backend, options
    drafters = plan_drafters(name, settings, registry, model) if exit_policy is None else ()
    prefix_disk = plan_prefix_disk(name, settings, choice.backend)
    pooling = PoolingLoad(
        cache_bytes=settings.pooling_cache.num_bytes if settings.pooling_cache is not None else 0,
        rerank=settings.rerank,
        template=settings.rerank_template,
        answers=settings.rerank_answers,
    )
    return evolve(
        plan,
        drafters=drafters,
        exit_policy=exit_policy,
        prefix_disk=prefix_disk,
        pooling=pooling,
        placement=placement,
        adapters=plan_adapters(name, settings, choice.backend, registry),
    )


async def plan_in_thread(name: str, settings: ModelSettings, registry: PluginRegistry) -> ModelPlan:
    """Run :func:`plan_model` in its own thread, so that a hanging plugin cannot keep the server from exiting."""
    try:
        async with asyncio.timeout(PLAN_TIMEOUT_S):
            return await run_in_daemon_thread(f"planning {name}", lambda: plan_model(name, settings, registry))
    except TimeoutError as error:
        raise ModelLoadError(
            f"{settings.source}: what its files say could not be read within {PLAN_TIMEOUT_S:g} s"
        ) from error


async def open_engine(
    plan: ModelPlan,
    model: ModelSettings,
    settings: Settings,
    progress: Progress,
    request_queue: RequestQueue | None = None,
) -> OpenEngine:
    """Load the model.

    Args:
        plan: the model to open.
        model: the model's settings.
        settings: all settings; the worker needs those of plugins.
        progress: called on the event loop.
        request_queue: the queue of the model.

    Raises:
        EnginehouseError: the model could not be loaded; EngineDead if its worker died meanwhile.
    """
    if plan.backend.opens == "engine":
        opened = await _open_here(plan, progress, model.load_timeout_s)
        if plan.adapters and opened.engine.info.engine.adapters == "none":
            await opened.engine.close()
            raise ModelLoadError(f"{plan.options_path}.adapters: this model takes no adapters; remove them")
        return opened
    load = load_of(plan, model, settings)
    if plan.placement is not None:
        queue = RequestQueue(load.engine.slots, settings.limits) if request_queue is None else request_queue
        guard = guard_of(plan.placement.backend, "backend")
        fleet = FleetEngine(load, queue, guard, step_timeout_s=model.step_timeout_s)
        await _fill(plan, fleet, load, progress, model.load_timeout_s)
        return OpenEngine(fleet, fleet.died)
    engine = await WorkerEngine.open(
        load,
        isolation=model.isolation,
        python=model.python,
        on_progress=progress,
        request_queue=request_queue,
        step_timeout_s=model.step_timeout_s,
        load_timeout_s=model.load_timeout_s,
    )
    return OpenEngine(engine, engine.died)


def load_of(plan: ModelPlan, model: ModelSettings, settings: Settings) -> Load:
    """Return the first message for a worker that opens the model."""
    plugins = settings.plugins
    if plan.placement is not None:  # how to reach the machines is the server's own business
        own = plan.placement.backend.name
        plugins = evolve(plugins, options={name: value for name, value in plugins.options.items() if name != own})
    return Load(
        backend=plan.backend.name,
        source_text=plan.source.text,
        source_path=str(plan.source.path) if plan.source.path is not None else None,
        options=plan.options,
        options_path=plan.options_path,
        engine=EngineSettings(
            slots=model.slots,
            prefill_chunk_tokens=model.prefill_chunk_tokens,
            prefix_cache=model.prefix_cache,
            max_adapters=model.max_adapters,
            embedding_cache_bytes=model.embedding_cache.num_bytes,
        ),
        plugins=plugins,
        drafters=tuple(drafter.to_load() for drafter in plan.drafters),
        exit_policy=plan.exit_policy,
        prefix_disk=plan.prefix_disk,
        plugin_timeout_s=settings.limits.plugin_timeout_s,
        pooling=plan.pooling,
        adapters=plan.adapters,
    )


async def _fill(plan: ModelPlan, fleet: FleetEngine, load: Load, progress: Progress, timeout_s: float) -> None:
    """Let a backend place the workers of a model on other machines; returns when the first one is ready."""
    assert plan.placement is not None and isinstance(plan.placement.backend, PlacesWorkers)
    backend = plan.placement.backend
    options = structure_options(backend.options, plan.placement.options, plan.options_path)
    stuck: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    watch = LoadWatch(timeout_s, progress, stuck.set_result)

    async def place() -> None:
        fleet.placement = await backend.place(plan.name, encode(load), options, fleet, watch.heard)
        await fleet.loaded()

    placing = asyncio.ensure_future(place())

    async def undo() -> None:
        placing.cancel()
        await asyncio.wait([placing])
        await fleet.close()

    async with contextlib.AsyncExitStack() as stack:
        stack.callback(watch.end)
        unplaced = await stack.enter_async_context(contextlib.AsyncExitStack())
        unplaced.push_async_callback(undo)
        await asyncio.wait((placing, stuck), return_when=asyncio.FIRST_COMPLETED)
        if not placing.done():
            raise ModelLoadError(f"{stuck.result()}; if it needs longer, raise {plan.options_path}.load_timeout_s")
        placing.result()
        unplaced.pop_all()


async def _open_here(plan: ModelPlan, progress: Progress, timeout_s: float) -> OpenEngine:
    """Open a backend that is itself an engine: it runs in this process."""
    loop = asyncio.get_running_loop()
    stuck: asyncio.Future[str] = loop.create_future()
    watch = LoadWatch(timeout_s, progress, stuck.set_result)

    def report(share: float, text: str) -> None:
        loop.call_soon_threadsafe(watch.heard, share, text)

    options = structure_options(plan.backend.options, plan.options, plan.options_path)
    opening = asyncio.ensure_future(asyncio.to_thread(plan.backend.open, plan.source, options, report))
    try:
        await asyncio.wait((opening, stuck), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        # A thread cannot be stopped: its memory is free only after the engine that it opens has been closed again.
        await _close_opened(plan, opening)
        raise
    finally:
        watch.end()
    if not opening.done():
        opening.add_done_callback(lambda _: asyncio.ensure_future(_close_opened(plan, opening)))
        raise ModelLoadError(f"{stuck.result()}; if it needs longer, raise {plan.options_path}.load_timeout_s")
    return _opened(plan, opening.result())


def _opened(plan: ModelPlan, engine: Runner | Pooler | Engine) -> OpenEngine:
    """Return what a backend has opened, guarded; an engine of another distribution runs on a loop of its own."""
    return OpenEngine(*guarded_engine(cast(Engine, engine), guard_of(plan.backend, "backend")))


async def _close_opened(plan: ModelPlan, opening: asyncio.Future[Runner | Pooler | Engine]) -> None:
    """Wait for an engine that is no longer needed, and close it."""
    with contextlib.suppress(Exception):
        await _opened(plan, await opening).engine.close()
