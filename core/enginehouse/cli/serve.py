"""``enginehouse serve``: starts a server from settings and arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from attrs import evolve
from rich.console import Console

from enginehouse.api.http.server import run
from enginehouse.cli.choosing import choose_models
from enginehouse.cli.logs import drop_unwritable, write_logs
from enginehouse.cli.options import config_option, read_settings
from enginehouse.cli.startup import Startup
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import Settings

__all__ = ["serve"]


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
    pull: bool,
    insecure: bool,
    log_level: str,
) -> None:
    """Serve models over HTTP until Ctrl-C; SIGHUP reads the configuration again.

    MODEL is a model file or folder, the id of a model that `enginehouse pull` has downloaded, or a name from the
    configuration file. Without one, every configured model is served, or the starter model where none is configured.
    """
    if uds is not None and (host is not None or port is not None):
        raise click.UsageError("--uds takes the place of --host and --port; give one or the other")
    files = {"uds": uds, "ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    paths = {name: path and str(path.expanduser().absolute()) for name, path in files.items()}
    given = {"server": _given(host=host, port=port, **paths, insecure=insecure or None, pull=pull or None)}
    settings = read_settings(config_file, given)
    # A backend named only on the command line must be known before the models, for the test backends.
    registry = PluginRegistry.for_settings(settings, also=[backend] if backend else [])

    def choose(read: Settings) -> Settings:
        return evolve(read, models=choose_models(models, backend, read.models, registry, pull=read.server.pull))

    settings = choose(settings)
    console = Console(stderr=True)
    write_logs(console, log_level, settings.server.log_format)
    for line in _complaints(registry):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    eager = [name for name, model in settings.models.items() if model.load == "eager"]
    with Startup(console, eager) as startup:
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


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
