"""Options shared by several commands: ``--config`` and reading the settings with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from enginehouse.settings.config import Settings, load_settings

_C = TypeVar("_C", bound=Callable[..., Any])

_DEFAULT_FILE = Path("enginehouse.toml")

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    envvar="ENGINEHOUSE_CONFIG",
    help="Configuration file.  [default: enginehouse.toml in this folder, if there is one]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def server_options(command: _C) -> _C:
    """Add ``--url`` and ``--key`` to commands that talk to a running server."""
    key = click.option("--key", envvar="ENGINEHOUSE_KEY", help="API key; also the variable ENGINEHOUSE_KEY.")
    url = click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The running server.")
    return url(key(command))


def read_settings(config_file: Path | None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """Load the settings from the named or default file, the environment and the command line.

    Raises:
        ConfigError: see :func:`enginehouse.settings.config.load_settings`.
    """
    if config_file is None and _DEFAULT_FILE.is_file():
        config_file = _DEFAULT_FILE
    return load_settings(config_file, os.environ, overrides)
