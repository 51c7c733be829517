"""``enginehouse deploy ray`` and ``undeploy ray``: replicas that outlive the server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from attrs import evolve, frozen

from enginehouse.cli.options import config_option, read_settings
from enginehouse.contract.errors import ConfigError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import load_of, plan_model
from enginehouse.settings.config import Settings, structure_options
from enginehouse.workers.messages import encode
from enginehouse_ray.backend import check_installed
from enginehouse_ray.options import RayModelOptions

__all__ = ["deploy", "undeploy"]


@frozen
class _Deployment:
    """One model, its worker's first message, and the settings of its replicas."""

    model: str
    inner: str
    load: bytes
    options: RayModelOptions

    def shown(self) -> dict[str, Any]:
        """Return what ``--dry-run`` prints."""
        options = self.options
        return {
            "model": self.model,
            "backend": self.inner,
            "replicas": options.num_at_start,
            "per_replica": {"cpus": options.cpus, "gpus": options.gpus, **options.resources},
        }


def _plan(settings: Settings, num_replicas: int | None) -> list[_Deployment]:
    """Plan every model of the configuration that has the backend ``ray``.

    Raises:
        ConfigError: a setting is invalid, or there is no such model.
    """
    registry = PluginRegistry.for_settings(settings)
    planned = []
    for name, model in settings.models.items():
        if model.backend != "ray":
            continue
        plan = plan_model(name, model, registry)
        assert plan.placement is not None
        options = structure_options(RayModelOptions, plan.placement.options, f"models.{name}")
        if num_replicas is not None:
            options = evolve(options, replicas=num_replicas, autoscale=None)
        planned.append(_Deployment(name, plan.backend.name, encode(load_of(plan, model, settings)), options))
    if not planned:
        raise ConfigError("no model has the backend 'ray'; set backend = \"ray\" in [models.<name>]", "models")
    return planned


def _proxies(settings: Settings) -> dict[str, Any]:
    """Return the settings of Ray's HTTP proxies.

    Raises:
        ConfigError: they cannot follow a setting of the server.
    """
    server = settings.server
    if server.uds is not None:
        raise ConfigError("server.uds: Ray's proxies listen on server.host and server.port only", "server.uds")
    if server.extra_ports:
        raise ConfigError("server.extra_ports: Ray's proxies listen on server.port only", "server.extra_ports")
    if server.port == 0:
        raise ConfigError("server.port: 0; Ray's proxies need one port for all machines", "server.port")
    tls = {"ssl_certfile": server.ssl_certfile, "ssl_keyfile": server.ssl_keyfile or server.ssl_certfile}
    return {"host": server.host, "port": server.port} | (tls if server.ssl_certfile else {})


_address = click.option("--address", default="auto", show_default=True, help="The cluster: auto, or HOST:PORT.")


@click.command()
@config_option
@_address
@click.option("--replicas", type=click.IntRange(min=1), help="Number of replicas of each model.")
@click.option("--restart", is_flag=True, help="Replace replicas that run with the same settings, one after the other.")
@click.option(
    "--http",
    type=click.Choice(["own", "serve"]),
    default="own",
    show_default=True,
    help="own: `enginehouse serve` is the server. serve: a server runs on the cluster, behind Ray's HTTP proxies.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be started, as JSON; does not need a cluster.")
def deploy(
    *, config_file: Path | None, address: str, replicas: int | None, restart: bool, http: str, dry_run: bool
) -> None:
    """Start the replicas of a configuration on a Ray cluster; ``enginehouse serve`` with the same file finds them.

    They stay when the server ends. Of replicas that run with the same settings, only the number is changed; those with
    others are replaced one after the other. Ray's usage statistics are switched off.
    """
    settings = read_settings(config_file)
    planned = _plan(settings, replicas)
    proxies = _proxies(settings) if http == "serve" else None
    if dry_run:
        shown = [one.shown() for one in planned]
        click.echo(json.dumps([*shown, {"server": proxies}] if proxies else shown, indent=2))
        return
    check_installed()
    from enginehouse_ray import ingress, placement  # noqa: PLC0415 - imports Ray

    placement.connect(address, proxies)
    for one in planned:
        placement.deploy(one.model, one.load, one.options, one.options.num_at_start, restart=restart)
        click.echo(f"{one.model}: {one.options.num_at_start} replicas run")
    if proxies is not None:
        ingress.deploy(settings, restart=restart)
        click.echo(
            f"the server runs behind Ray's proxies, {settings.server.host}:{settings.server.port} of each machine"
        )


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@_address
def undeploy(models: tuple[str, ...], address: str) -> None:
    """Stop the replicas of MODELs; if none is named, those of all models, and the server of ``--http serve``."""
    check_installed()
    from enginehouse_ray import placement  # noqa: PLC0415 - imports Ray

    for name in placement.undeploy(models, address):
        click.echo(f"{name}: stopped")
