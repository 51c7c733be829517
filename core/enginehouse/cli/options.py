"""What several commands share: ``--config`` and reading the settings with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from enginehouse.config import Settings, load_settings

__all__ = ["config_option", "json_option", "read_settings"]

_DEFAULT_FILE = Path("enginehouse.toml")

config_option = click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    envvar="ENGINEHOUSE_CONFIG",
    help="Configuration file.  [default: enginehouse.toml in this folder, if there is one]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def read_settings(config_file: Path | None, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> Settings:
    """The settings from the named or default file, the environment and the command line.

    Raises:
        ConfigError: see :func:`enginehouse.config.load_settings`.
    """
    if config_file is None and _DEFAULT_FILE.is_file():
        config_file = _DEFAULT_FILE
    return load_settings(config_file, os.environ, overrides)
