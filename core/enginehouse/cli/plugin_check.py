"""``enginehouse plugins check``: the contract suites, run on an installed plugin in a process of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from typing import Any

import click

from enginehouse.contract.errors import PluginError
from enginehouse.plugins import PluginRegistry
from enginehouse.settings.config import PluginsSettings
from enginehouse.settings.structuring import closest

__all__ = ["check"]

_SUITES = "enginehouse_testkit.installed_plugin"


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

    A backend needs a small model to be tested with; a model that a plugin offers is taken where it suits.
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
    if alone.backends and model is None:
        model = _suitable_model(registry, alone)
    subject = {"plugin": name, "model": model, "options": _read(options), "tolerance": tolerance}
    command = [sys.executable, "-m", "pytest", "--pyargs", _SUITES, "-c", os.devnull]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:asyncio", "-q", "-rs"]
    done = subprocess.run(command, env={**os.environ, "ENGINEHOUSE_CHECKED": json.dumps(subject)}, check=False)
    sys.exit(done.returncode)


def _suitable_model(registry: PluginRegistry, alone: PluginRegistry) -> str:
    """An offered model that all backends of the plugin open."""
    for offered in registry.model_sources:
        source = registry.model_sources[offered]()
        if source is not None and all(backend.match(source).score for backend in alone.backends.values()):
            return offered
    names = ", ".join(alone.backends)
    raise click.UsageError(f"no installed model suits the backend {names}; name a small one with --model")


def _read(options: tuple[str, ...]) -> dict[str, Any]:
    """Options as the configuration file would have them; a value that is no TOML is a string."""
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
