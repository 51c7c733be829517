"""``enginehouse plugins check``: runs the contract suites on an installed plugin in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click

from enginehouse.contract.errors import PluginError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.sources import find_source, no_such_model
from enginehouse.settings.config import PluginsSettings
from enginehouse.settings.structuring import closest

__all__ = ["check"]

_SUITES = Path(__file__).with_name("installed_plugin.py")


@click.command()
@click.argument("name")
@click.option("--model", help="A small model for the plugin's backend: a path, or a name that a plugin offers.")
@click.option(
    "-o",
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of that model, as in [models.<name>]; may be given several times.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    default=0.05,
    show_default=True,
    help="Largest difference of two logits that were computed in different batches.",
)
def check(name: str, model: str | None, options: tuple[str, ...], tolerance: float) -> None:
    """Run the contract suites on everything that the installed plugin NAME registers.

    A backend is tested with a small model; by default a suitable model that a plugin offers.
    """
    if importlib.util.find_spec("pytest") is None:
        raise click.ClickException("the suites need pytest; run: pip install 'enginehouse[testing]'")
    registry = PluginRegistry.load(PluginsSettings())
    names = tuple(record.name for record in registry.plugins)
    if name not in names:
        raise click.BadParameter(f"no plugin {name!r} is installed{closest(name, names)}", param_hint="NAME")
    alone = PluginRegistry.load(PluginsSettings(allow=(name,)))
    for record in alone.plugins:
        if record.name == name and record.error:
            raise PluginError(f"the plugin {name!r} does not load: {record.error}", name)
        for warning in record.warnings:
            click.echo(f"Warning: {warning}", err=True)
    if alone.backends and model is None:
        model = _suitable_model(registry, alone)
    elif alone.backends and model is not None:
        _check_exists(model, registry, alone)
    subject = {"plugin": name, "model": model, "options": _read(options), "tolerance": tolerance}
    command = [sys.executable, "-m", "pytest", str(_SUITES), "-c", os.devnull, "--rootdir", str(_SUITES.parent)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:asyncio", "-q", "-rs"]
    done = subprocess.run(command, env={**os.environ, "ENGINEHOUSE_CHECKED": json.dumps(subject)}, check=False)
    sys.exit(done.returncode)


def _suitable_model(registry: PluginRegistry, alone: PluginRegistry) -> str:
    """Return an offered model that all backends of the plugin open."""
    for offered in registry.model_sources:
        source = registry.model_sources[offered]()
        if source is not None and all(backend.match(source).score for backend in alone.backends.values()):
            return offered
    names = ", ".join(alone.backends)
    advice = "name a small one with --model: a file or folder that its match accepts, even one that it does not read"
    raise click.UsageError(f"no installed model suits the backend {names}; {advice}")


def _check_exists(model: str, registry: PluginRegistry, alone: PluginRegistry) -> None:
    """Check that a model is there, or that a backend of the plugin takes its name. Raises ModelLoadError."""
    source = find_source(model, registry)
    if source.path is None and not any(backend.match(source).score for backend in alone.backends.values()):
        raise no_such_model(model, registry)


def _read(options: tuple[str, ...]) -> dict[str, Any]:
    """Parse options as in the configuration file; a value that is not valid TOML is a string."""
    found: dict[str, Any] = {}
    for option in options:
        key, separator, value = option.partition("=")
        if not separator or not key.strip():
            raise click.BadParameter(f"{option!r} is not KEY=VALUE", param_hint="--option")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key.strip()] = value
    return found
