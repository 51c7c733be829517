"""Optional parts of a worker's engine, opened from its start message: disk tier, drafters, early exit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
from attrs import define

from enginehouse.contract.backend import Backend, ModelSource, Progress, Runner, StateKeeper
from enginehouse.contract.drafter import BoundDrafter, DraftContext, HeadDrafter
from enginehouse.contract.errors import AdapterRefused, EnginehouseError, ModelLoadError, PluginFailed
from enginehouse.contract.exit_policy import BoundExitPolicy, ExitContext, ExitView, LayerAccess
from enginehouse.contract.pooler import Pooler
from enginehouse.contract.regular_files import open_regular
from enginehouse.engine.disk import DiskTier, FolderTaken, StateFolder
from enginehouse.engine.loop import StepEngine
from enginehouse.engine.pooling.generative import QWEN_TEMPLATE, RunnerPooler, TemplateArrangement
from enginehouse.engine.pooling.loop import PoolEngine
from enginehouse.plugins import Guard, PluginRegistry, guard_of, guarded
from enginehouse.settings.config import structure_options
from enginehouse.workers.messages import DrafterLoad, ExitPolicyLoad, Load, ModelLoad, PrefixDiskLoad

_DIGEST_BYTES = 16
_CPU = 1  # kDLCPU of the DLPack standard
_PROBE_BYTES = 2**20
_log = logging.getLogger(__name__)


def open_disk(load: PrefixDiskLoad, model: Load, runner: Runner) -> DiskTier | None:
    """Open the disk tier; None if another process uses the folder, because the tier is only an optimisation.

    Raises:
        ModelLoadError: the runner's sequences cannot be saved, or the folder cannot be used.
    """
    if not isinstance(runner, StateKeeper) or not runner.capabilities.states:
        raise ModelLoadError(
            f"{load.setting}: the backend {model.backend!r} cannot save sequences of this model; remove the setting, "
            "or use a backend that can (docs/prefix-cache.md names them)"
        )
    digest = model_digest(model, runner.state_format)
    can_cut = runner.capabilities.truncate == "any"
    try:
        folder = StateFolder(Path(load.folder), digest, load.max_bytes, can_cut=can_cut)
    except FolderTaken:
        _log.warning("%s: another process uses %s; nothing is saved or loaded by this one", load.setting, load.folder)
        return None
    except OSError as error:
        raise ModelLoadError(f"{load.setting}: {load.folder} cannot be used: {error.strerror}") from error
    _log.info("%d saved sequences in %s", len(folder), load.folder)
    return DiskTier(runner, folder)


def model_digest(model: Load, state_format: str) -> bytes:
    """Return a digest of everything that determines the meaning of a saved sequence."""
    whole = blake2b(digest_size=_DIGEST_BYTES)
    exit_policy = msgspec.to_builtins(model.exit_policy)
    for part in (model.backend, model.source_text, state_format, repr(exit_policy)):
        text = part.encode("utf-8", "surrogateescape")
        whole.update(len(text).to_bytes(8, "little") + text)
    for fact in _facts(Path(model.source_path)) if model.source_path is not None else ():
        whole.update(fact)
    return whole.digest()


def _facts(source: Path) -> Iterator[bytes]:
    """Yield, for each file of a model, its name, size and modification time, and its first and last megabyte."""
    paths = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    for path in paths:
        facts = path.stat()
        yield f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\0".encode("utf-8", "surrogateescape")
        with open_regular(path) as file:
            yield file.read(_PROBE_BYTES)
            file.seek(max(0, facts.st_size - _PROBE_BYTES), os.SEEK_SET)
            yield file.read(_PROBE_BYTES)


def open_model(backend: Backend, model: Load | ModelLoad, progress: Progress) -> Runner | Pooler:
    """Open a model on this thread; returns its runner or pooler, guarded."""
    options = structure_options(backend.options, model.options, model.options_path)
    opened = backend.open(_source_of(model), options, progress)
    if isinstance(opened, Pooler):
        return guarded(opened, Pooler, guard_of(backend, "backend"))
    return guarded(cast(Runner, opened), Runner, guard_of(backend, "backend"))


def _source_of(model: Load | ModelLoad) -> ModelSource:
    return ModelSource(model.source_text, Path(model.source_path) if model.source_path is not None else None)


def open_pooling(opened: Runner | Pooler, load: Load, on_turn: Callable[[int, bool], None]) -> PoolEngine:
    """Return the engine of a pooling model, or of a generative one that answers pooling requests.

    Raises:
        ModelLoadError: settings of the model have no effect on it.
    """
    for setting, is_set in (("exit_policy", load.exit_policy is not None), ("prefix_cache_dir", load.prefix_disk)):
        if is_set:
            path = f"{load.options_path}.{setting}"
            raise ModelLoadError(f"{path}: this model is a pooling model, which does not generate; remove the setting")
    settings, path, task = load.pooling, f"{load.options_path}.rerank", opened.info.task
    needed = {"cosine": "embed", "yes_no": "generate"}.get(settings.rerank or "", task)
    if task != needed:
        raise ModelLoadError(f"{path}: {settings.rerank!r} needs a model for {needed!r}; this one is for {task!r}")
    template = opened.info.chat_templates.get("rerank")
    if isinstance(opened, Pooler):
        pooler = opened
    else:
        runner_pooler = RunnerPooler(opened, settings.answers, f"{path}_answers")
        pooler = guarded(runner_pooler, Pooler, guard_of(opened, "backend"))
        template = settings.template or template or QWEN_TEMPLATE
    arrangement = None
    if template is not None:
        max_tokens = pooler.capabilities.max_tokens
        arrangement = TemplateArrangement(pooler.tokenizer, max_tokens, template, f"{path}_template")
    return PoolEngine(
        pooler,
        cache_bytes=settings.cache_bytes,
        compares=settings.rerank == "cosine",
        arrangement=arrangement,
        on_turn=on_turn,
    )


def find_backend(registry: PluginRegistry, name: str) -> Backend:
    """Return the backend with that name; raises ModelLoadError, which lists the plugins that failed in this process."""
    backend = registry.backends.get(name)
    if backend is None:
        problems = "; ".join(record.problem for record in registry.plugins if record.problem)
        raise ModelLoadError(f"the worker has no backend {name!r}" + (f" ({problems})" * bool(problems)))
    return backend


def bind_drafters(
    registry: PluginRegistry, loads: Sequence[DrafterLoad], runner: Runner, slots: int, progress: Progress
) -> Mapping[str, BoundDrafter]:
    """Bind each drafter to the model of ``runner``; if one fails, those bound before it are shut down.

    To a model that goes back to checkpoints only a draft head is bound, whose runner can drop rejected drafts: to any
    other place the model would go back by a copy of its state and another pass over the tokens since then.

    Raises:
        ModelLoadError: a drafter is not installed here, or cannot draft for this model.
    """
    bound: dict[str, BoundDrafter] = {}
    if runner.capabilities.truncate == "checkpoint":
        unused = [one.name for one in loads if not isinstance(registry.drafters.get(one.name), HeadDrafter)]
        loads = [one for one in loads if one.name not in unused]
        if unused:
            _log.info("the drafters %s are not used: this model cannot drop single tokens", unused)
    with contextlib.ExitStack() as undo:
        undo.callback(shut_down, bound)
        for load in loads:
            bound[load.name] = _bind(registry, load, runner, slots, progress)
        undo.pop_all()
    return bound


def shut_down(drafters: Mapping[str, BoundDrafter]) -> None:
    """Shut drafters down; a failure of one, which its guard logs, does not keep the others running."""
    for drafter in drafters.values():
        with contextlib.suppress(PluginFailed):
            drafter.shutdown()


def _bind(registry: PluginRegistry, load: DrafterLoad, runner: Runner, slots: int, progress: Progress) -> BoundDrafter:
    drafter = registry.drafters.get(load.name)
    if drafter is None:
        raise ModelLoadError(f"the worker has no drafter {load.name!r}")
    options = structure_options(drafter.options, load.options, load.options_path)
    second = head = None
    if load.model is not None and isinstance(drafter, HeadDrafter):
        head = _source_of(load.model)
    elif load.model is not None:
        second = _Second(registry, load.model, progress)
    try:
        bound = drafter.bind(DraftContext(runner, slots, second, head), options)
    except PluginFailed:
        raise
    except EnginehouseError as error:
        raise ModelLoadError(f"the drafter {load.name!r}: {error.message}") from error
    if second is not None and not second.was_opened:
        bound.shutdown()
        raise ModelLoadError(f"the drafter {load.name!r} uses no second model; remove its 'source'")
    return bound


@define
class _Second:
    """Opens a second model, and records that it did."""

    registry: PluginRegistry
    model: ModelLoad
    progress: Progress
    was_opened: bool = False

    def __call__(self) -> Runner:
        """Open the second model and return its runner."""
        self.was_opened = True
        opened = open_model(find_backend(self.registry, self.model.backend), self.model, self.progress)
        if isinstance(opened, Pooler):
            opened.close()
            raise ModelLoadError(f"{self.model.options_path}: {self.model.source_text} is a pooling model")
        return opened


class GuardedExitPolicy:
    """An exit policy that is disabled after its first failure or invalid answer; no token exits early from then on."""

    def __init__(self, guard: Guard, policy: BoundExitPolicy) -> None:
        self.layers = policy.layers
        self._guard = guard
        self._policy = policy
        self._has_failed = False

    def leaves(self, view: ExitView) -> Any:
        """Return the tokens that exit early: (num_rows,) bool, on the host or in the memory of another device."""
        num_rows = len(view.hidden)
        if self._has_failed:
            return np.zeros(num_rows, np.bool_)
        try:
            with self._guard.calling("leaves", passes=(PluginFailed,)):
                mask = self._policy.leaves(view)
                if _is_on_host(mask):
                    mask = np.asarray(mask)
            if tuple(mask.shape) != (num_rows,) or str(mask.dtype).rpartition(".")[2] != "bool":
                what = f"gave {mask.dtype} of shape {tuple(mask.shape)}, bool of shape {(num_rows,)} was expected"
                raise self._guard.mistake("leaves", what, self._policy.leaves)
        except PluginFailed:
            _log.warning("%s is off until the model is loaded again", self._guard)
            self._has_failed = True
            return np.zeros(num_rows, np.bool_)
        return mask


def _is_on_host(array: Any) -> bool:
    """True if numpy can read an array, as far as the array says where it is."""
    device = getattr(array, "__dlpack_device__", None)
    return device is None or int(device()[0]) == _CPU


def use_exit_policy(registry: PluginRegistry, load: ExitPolicyLoad, runner: Runner, backend: str) -> None:
    """Bind the policy to the runner's model and enable it.

    Raises:
        ModelLoadError: the runner does not support early exit, the policy is not installed here, or it cannot decide
            for this model.
    """
    if not isinstance(runner, LayerAccess):
        raise ModelLoadError(
            f"{load.options_path}: the backend {backend!r} has no access to the layers of this model, so it does not "
            "support early exit; remove the setting, or use a backend that has (docs/early-exit.md names them)"
        )
    policy = registry.exit_policies.get(load.name)
    if policy is None:
        raise ModelLoadError(f"the worker has no exit policy {load.name!r}")
    options = structure_options(policy.options, load.options, load.options_path)
    context = ExitContext(runner.num_layers, runner.capabilities.exit_layers)
    try:
        bound = policy.bind(context, options)
        unknown = sorted(set(bound.layers) - set(context.exit_layers))
        if unknown:
            raise ModelLoadError(f"it requests the layers {unknown}, which do not support early exit")
        runner.use_exit_policy(GuardedExitPolicy(guard_of(policy, "exit policy"), bound))
    except PluginFailed:
        raise
    except EnginehouseError as error:
        raise ModelLoadError(f"the exit policy {load.name!r}: {error.message}") from error


def load_adapters(engine: StepEngine, load: Load) -> None:
    """Load the adapters of the settings, as far as there are places. Raises ModelLoadError, which names the setting."""
    for adapter in load.adapters[: load.engine.max_adapters]:
        try:
            engine.load_adapter(adapter)
        except AdapterRefused as error:
            raise ModelLoadError(f"{load.options_path}.adapters.{adapter.name}: {error.message}") from error
