"""The replicas of one model on a Ray cluster, in the server's process: deployment, links, choice of a replica."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.metadata
import logging
import math
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse.contract.backend import Progress
from enginehouse.contract.engine import Placement
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.fleet import Fleet
from enginehouse.contract.types import EngineRequest
from enginehouse_backendkit.prefix_affinity import PrefixAffinity, prefix_blocks
from enginehouse_ray import watching
from enginehouse_ray.options import RayModelOptions

# Ray reads it when it is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from enginehouse_ray.replica import EngineReplica

__all__ = ["INGRESS", "RayPlacement", "app_name", "connect", "deploy", "scale", "undeploy", "version_of"]

_log = logging.getLogger(__name__)

_AGAIN_S = 0.5
"""Seconds until a replica is connected again after its link has ended; doubled each time that it ends soon."""

_MAX_AGAIN_S = 30.0

_SHORT_S = 5.0
"""A link that lasts less than this was refused."""

_SCALE_S = 1.0
"""Seconds between two looks at the demand."""

INGRESS = "enginehouse"
"""Name in Ray Serve of the application that is the server; those of models have a dash after it."""

_DEPLOYMENT = "replica"

_connecting = threading.Lock()


def app_name(model: str) -> str:
    """Return the name of a model's application in Ray Serve."""
    return f"enginehouse-{model}"


def connect(address: str, proxies: Mapping[str, Any] | None = None) -> None:
    """Connect this process with the cluster, and start Ray Serve, unless it runs.

    Args:
        address: see :class:`enginehouse_ray.options.RayOptions`.
        proxies: ``http_options`` of Ray Serve for HTTP proxies on every machine; None for no proxies.

    Raises:
        ModelLoadError: there is no cluster, or Ray Serve runs with other proxies.
    """
    with _connecting:
        if not ray.is_initialized():
            try:
                where = None if address == "local" else address
                ray.init(address=where, namespace="enginehouse", log_to_driver=False, include_dashboard=None)
            except (ConnectionError, RuntimeError, ValueError) as error:
                message = f"no Ray cluster at {address!r} (plugins.ray.address): {error}"
                raise ModelLoadError(message) from error
        if proxies is None:
            serve.start(proxy_location="Disabled")
            return
        serve.start(proxy_location="EveryNode", http_options=dict(proxies))
        running = _get_global_client().http_config
        if running.location == "Disabled" or any(getattr(running, name) != value for name, value in proxies.items()):
            where = f"without HTTP proxies at {proxies['host']}:{proxies['port']}, or with other settings of them"
            raise ModelLoadError(
                f"Ray Serve runs {where}, which cannot be changed while it runs; end it, with all of its applications, "
                "by: serve shutdown"
            )


def deploy(model: str, load: bytes, options: RayModelOptions, num_replicas: int, *, restart: bool = False) -> Any:
    """Start the replicas of a model, or update those that run; returns their handle when they have loaded it.

    Replicas that run with the same settings stay: only their number changes. Else one after the other is replaced.

    Args:
        model: name of the model.
        load: the first message of its workers.
        options: the settings of the replicas.
        num_replicas: their number.
        restart: replace replicas with the same settings, too.

    Raises:
        ModelLoadError: they could not be started.
    """
    deployment = serve.deployment(
        EngineReplica,
        name=_DEPLOYMENT,
        num_replicas=num_replicas,
        max_ongoing_requests=1_000_000,  # the server's queue decides which requests are too many
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus, "resources": options.resources},
        request_router_config=RequestRouterConfig(request_router_class="enginehouse_ray.router:ReplicaRouter"),
        health_check_period_s=2,
        health_check_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=10,
    )
    # Without a version, Ray Serve invents one each time, and replaces all replicas even if only their number differs.
    deployment = deployment.options(
        version=version_of(app_name(model), _DEPLOYMENT, load, restart=restart), _internal=True
    )
    try:
        application = deployment.bind(load)
        return serve.run(application, name=app_name(model), route_prefix=None, external_scaler_enabled=True)
    except RuntimeError as error:
        raise ModelLoadError(f"Ray Serve could not start the replicas of the model {model!r}: {error}") from error


def version_of(app: str, deployment: str, settings: bytes, *, restart: bool) -> str:
    """Return the version of a deployment with these settings: that of the running one if they are the same."""
    code = importlib.metadata.version("enginehouse").encode()
    version = hashlib.sha256(code + b" " + settings).hexdigest()[:16]
    if restart:
        return f"{version}-{uuid.uuid4().hex[:8]}"
    if app in serve.status().applications:
        with contextlib.suppress(ray.exceptions.RayError):  # it failed to be deployed, or is being stopped
            info, _ = _get_global_client().get_deployment_info(deployment, app)
            if (info.version or "").startswith(version):
                return str(info.version)
    return version


def scale(model: str, num_replicas: int) -> None:
    """Change the number of replicas; those that remain are not touched. Does not wait for new ones.

    Source: the method that Ray Serve's dashboard calls for ``POST .../deployments/{name}/scale``, which needs no
    dashboard here; unlike ``serve.run`` it takes 0.

    Raises:
        ModelLoadError: the model is not deployed, or Ray Serve does not answer.
    """
    try:
        where = serve.get_app_handle(app_name(model)).deployment_id
        ray.get(_get_global_client()._controller.update_deployment_replicas.remote(where, num_replicas))
    except (ray.exceptions.RayError, RayServeException) as error:
        raise ModelLoadError(f"Ray Serve could not change the number of replicas of {model!r}: {error}") from error


def undeploy(models: Sequence[str], address: str) -> list[str]:
    """Stop the replicas of models; those of all models, and the server, if none is named.

    Returns:
        The names of what was stopped; that of the server is :data:`INGRESS`.
    """
    connect(address)
    prefix = app_name("")
    running = list(serve.status().applications)
    stopped = [(app.removeprefix(prefix), app) for app in running if app.startswith(prefix)]
    if models:
        stopped = [(model, app) for model, app in stopped if model in models]
    elif INGRESS in running:
        stopped.insert(0, (INGRESS, INGRESS))
    for _, app in stopped:
        serve.delete(app)
    return [name for name, _ in stopped]


class RayPlacement:
    """See :class:`enginehouse.contract.fleet.PlacedWorkers`; use :meth:`open`."""

    def __init__(self, model: str, options: RayModelOptions, fleet: Fleet) -> None:
        self._model = model
        self._options = options
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._handle: Any = None
        self._is_own = False
        self._links: dict[str, asyncio.Task[None]] = {}
        self._scaling: asyncio.Task[None] | None = None
        self._affinity = PrefixAffinity()
        self._indices: dict[str, int] = {}  # by place

    @classmethod
    async def open(  # noqa: PLR0917 - the arguments of PlacesWorkers.place, and the address
        cls, model: str, load: bytes, options: RayModelOptions, address: str, fleet: Fleet, progress: Progress
    ) -> RayPlacement:
        """Find the replicas of a model, or start them."""
        placement = cls(model, options, fleet)
        progress(0.0, "connecting with the Ray cluster")
        await asyncio.to_thread(connect, address)
        running = (await asyncio.to_thread(serve.status)).applications
        if app_name(model) in running:
            placement._handle = serve.get_app_handle(app_name(model))
            if options.autoscale is not None:  # there may be none
                await asyncio.to_thread(scale, model, options.num_at_start)
        else:
            progress(0.0, f"starting {options.num_at_start} replicas on the Ray cluster")
            placement._is_own = True
            placement._handle = await asyncio.to_thread(deploy, model, load, options, options.num_at_start)
        watching.watch(app_name(model), placement._hear)
        if not placement._handle.is_initialized:  # Ray Serve keeps the handle of an earlier load
            placement._handle._init()
        if options.autoscale is not None:
            placement._scaling = asyncio.create_task(placement._scale(), name=f"scaling {model}")
        return placement

    # -- links -------------------------------------------------------------------------------------

    def _hear(self, replicas: Mapping[str, str]) -> None:
        """Take note of the replicas; called on a thread of Ray Serve."""
        self._loop.call_soon_threadsafe(self._update, dict(replicas))

    def _update(self, replicas: dict[str, str]) -> None:
        """Connect new replicas, and leave those that Ray Serve stops: their requests move to the others."""
        for replica in self._links.keys() - replicas.keys():
            self._links.pop(replica).cancel()
        for replica, node in replicas.items():
            if replica not in self._links:
                stay = self._stay_linked(replica, f"{replica}@{node[:8]}")
                self._links[replica] = self._loop.create_task(stay, name=f"replica {replica}")

    async def _stay_linked(self, replica: str, place: str) -> None:
        pause_s = _AGAIN_S
        while True:
            began = self._loop.time()
            try:
                await self._link(replica, place)
            except Exception:  # noqa: BLE001 - Ray raises many types; the replica is linked again
                _log.exception("the link to the replica %s failed; it is opened again", place)
            is_short = self._loop.time() - began < _SHORT_S
            pause_s = min(2 * pause_s, _MAX_AGAIN_S) if is_short else _AGAIN_S
            await asyncio.sleep(pause_s)

    async def _link(self, replica: str, place: str) -> None:
        """Carry bytes until the worker ends, or the replica is lost or stopped."""
        key = uuid.uuid4().hex
        feed = self._handle.options(method_name="feed")
        frames = self._handle.options(method_name="link", stream=True).remote(replica, key)
        opened = asyncio.Event()

        async def send(data: bytes) -> None:
            await opened.wait()  # calls overtake each other: none before the link is there
            try:
                await feed.remote(replica, key, data)
            except ray.exceptions.RayError as error:
                raise ConnectionError(type(error).__name__) from error  # its text is a whole traceback

        def leave() -> None:
            with contextlib.suppress(RayServeException):  # the replica was stopped before it had the call
                frames.cancel()

        link = self._fleet.join(place, send, leave)
        reason = "has left: its replica is stopped"
        try:
            async for data in frames:
                opened.set()
                link.feed(data)
            reason = "has ended"
        except ray.exceptions.RayError as error:
            reason = f"is gone with its replica ({type(error).__name__})"
        finally:
            link.end(reason)
            self._affinity.forget(self._indices.pop(place, -1))

    # -- choice ------------------------------------------------------------------------------------

    def choose(self, request: EngineRequest, loads: Mapping[str, int]) -> Placement:
        """Choose the replica that has computed most of the prompt, unless it is too busy."""
        places = {self._index(place): place for place in loads}
        by_index = [loads[places[index]] if index in places else math.inf for index in range(max(places) + 1)]
        namespace = request.namespace
        blocks = prefix_blocks((segment.content for segment in request.segments), namespace)
        choice = self._affinity.choose(blocks, by_index)
        if request.request_id:
            self._affinity.learn(choice.index, blocks)
        matched = choice.matched / len(blocks) if blocks else 0.0
        return Placement(replica=places[choice.index], reason=choice.reason, matched=matched)

    def _index(self, place: str) -> int:
        """Return the number of a replica in the table of prefixes."""
        if place not in self._indices:
            taken = set(self._indices.values())
            self._indices[place] = next(index for index in range(len(taken) + 1) if index not in taken)
        return self._indices[place]

    # -- number of replicas ------------------------------------------------------------------------

    async def _scale(self) -> None:
        """Follow the demand: up at once, down after a while of less."""
        bounds = self._options.autoscale
        assert bounds is not None
        current, last_needed = self._options.num_at_start, self._loop.time()
        while True:
            await asyncio.sleep(_SCALE_S)
            wanted = min(bounds.max, max(bounds.min, math.ceil(self._fleet.num_requests / bounds.target)))
            is_loading = bool(current) and not self._links  # stopped now, a slow first replica would never be ready
            if wanted >= current or is_loading:
                last_needed = self._loop.time()
            is_kept = is_loading or self._loop.time() - last_needed < bounds.down_after_s
            if wanted == current or (wanted < current and is_kept):
                continue
            try:
                await asyncio.to_thread(scale, self._model, wanted)
            except ModelLoadError as error:
                _log.warning("model %s: %s", self._model, error.message)
                await asyncio.sleep(_MAX_AGAIN_S)
                continue
            _log.info("model %s: %d replicas instead of %d", self._model, wanted, current)
            current, last_needed = wanted, self._loop.time()

    async def close(self) -> None:
        """Leave the replicas; stop them unless ``deploy ray`` has started them."""
        watching.unwatch(app_name(self._model))
        tasks = [*self._links.values(), *([self._scaling] if self._scaling is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._is_own and ray.is_initialized():
            await asyncio.to_thread(serve.delete, app_name(self._model))
