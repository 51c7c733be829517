"""The plugin ``ray`` without Ray: commands and settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginehouse.contract.errors import ConfigError, EnginehouseError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, PluginsSettings
from enginehouse_ray.command import deploy

_CONFIG = '[models.m]\nsource = "fake"\nbackend = "ray"\ninner = "fake"\nreplicas = 3\ngpus = 1\n'


def _written(folder: Path, text: str) -> str:
    file = folder / "c.toml"
    file.write_text(text)
    return str(file)


def test_deploy_shows_what_it_would_start(tmp_path: Path) -> None:
    done = CliRunner().invoke(deploy, ["--config", _written(tmp_path, _CONFIG), "--dry-run", "--replicas", "2"])

    assert done.exception is None
    assert json.loads(done.output) == [
        {"model": "m", "backend": "fake", "replicas": 2, "per_replica": {"cpus": 1.0, "gpus": 1.0}}
    ]


def test_deploy_refuses_a_configuration_without_models_of_ray(tmp_path: Path) -> None:
    text = '[models.m]\nsource = "fake"\nbackend = "fake"\n'
    done = CliRunner().invoke(deploy, ["--config", _written(tmp_path, text), "--dry-run"])

    assert isinstance(done.exception, EnginehouseError)
    assert "no model has the backend 'ray'" in str(done.exception)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"replicas": 0}, r"models\.m\.replicas"),
        ({"autoscale": {"min": 3, "max": 2}}, r"models\.m\.autoscale.*less than min = 3"),
        ({"gpu": 1}, r"models\.m\.gpu: unknown setting \(did you mean 'gpus'"),
    ],
)
def test_settings_are_refused_by_name(options: dict[str, object], named: str) -> None:
    registry = PluginRegistry.load(PluginsSettings(allow=("ray",)), builtin=["fake"])

    with pytest.raises(ConfigError, match=named):
        plan_model("m", ModelSettings(source="fake", backend="ray", options={"inner": "fake", **options}), registry)


def test_deploy_shows_the_server_behind_the_proxies_of_ray(tmp_path: Path) -> None:
    config = _written(tmp_path, "[server]\nport = 8001\n" + _CONFIG)
    done = CliRunner().invoke(deploy, ["--config", config, "--dry-run", "--http", "serve"])

    assert json.loads(done.output)[1:] == [{"server": {"host": "127.0.0.1", "port": 8001}}]


@pytest.mark.parametrize(("name", "value"), [("uds", '"s.sock"'), ("extra_ports", "[11434]"), ("port", "0")])
def test_settings_that_proxies_of_ray_cannot_follow_are_refused(tmp_path: Path, name: str, value: str) -> None:
    config = _written(tmp_path, f"[server]\n{name} = {value}\n{_CONFIG}")
    done = CliRunner().invoke(deploy, ["--config", config, "--dry-run", "--http", "serve"])

    assert isinstance(done.exception, ConfigError)
    assert done.exception.path == f"server.{name}"
