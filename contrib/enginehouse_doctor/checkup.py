"""Checks of ``enginehouse doctor`` besides backends and models: the machine, the settings, and their files.

Each check reports its finding and advice. Nothing is changed, loaded or downloaded, and the only network operation is
one attempt to listen on the server's own port.
"""

from __future__ import annotations

import shutil
import socket
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from attrs import frozen

from enginehouse.api.http.keys import load_keys
from enginehouse.api.http.listening import tls_context
from enginehouse.contract.errors import ConfigError, EnginehouseError
from enginehouse.pipeline.pipeline import Pipeline
from enginehouse.pipeline.prompt.renderer import Renderer
from enginehouse.plugins import PluginRegistry
from enginehouse.serving import ModelManager
from enginehouse.serving.memory import default_budget, footprint_of
from enginehouse.serving.opening import plan_model
from enginehouse.settings.auth import AuthSettings
from enginehouse.settings.config import ServerSettings, Settings
from enginehouse.settings.limits import MAIN_MEMORY, format_bytes
from enginehouse.settings.structuring import closest

__all__ = ["Finding", "check_all", "check_settings"]

_COMPILERS = ("c++", "g++", "clang++", "cl")
_INSTALL = "build-essential (Debian, Ubuntu), gcc-c++ (Fedora), or on macOS: xcode-select --install"
_FEW_FILES = 4096


@frozen
class Finding:
    """Result of one check.

    Attributes:
        state: ``ok``; ``advice`` works but could be better; ``problem`` will not work.
        text: the finding.
        advice: recommended action; empty if none.
    """

    subject: str
    state: Literal["ok", "advice", "problem"]
    text: str
    advice: str = ""


def check_settings(error: ConfigError) -> Finding:
    """Report unusable settings."""
    return Finding("settings", "problem", error.message, "docs/configuration.md lists every setting")


def check_all(settings: Settings, registry: PluginRegistry, served: tuple[str, ...]) -> tuple[Finding, ...]:
    """Run all checks, in the order in which they matter at startup.

    Args:
        settings: settings with the models to check.
        served: names and aliases of all models in the settings.
    """
    return (
        *_check_start(settings, registry),
        *_check_compiler(),
        *_check_plugins(registry),
        *_check_memory(settings, registry),
        *_check_port(settings.server),
        *_check_reach(settings),
        *_check_keys(settings.auth, served),
        *_check_open_files(),
    )


def _check_start(settings: Settings, registry: PluginRegistry) -> Iterator[Finding]:
    """Check what the server itself would refuse at startup, except for its models: parsers, routers, defaults, ..."""
    try:
        manager = ModelManager(settings, registry)
        renderer = Renderer(settings.limits.render_timeout_s, settings.limits.render_max_chars)
        Pipeline(settings, registry, manager, renderer)
        registry.check_authenticators(settings.auth.authenticators)
    except EnginehouseError as error:
        yield Finding("settings", "problem", error.message, "docs/configuration.md lists every setting")


def _check_compiler() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is not None:
        yield Finding("compiler", "ok", found)
    else:
        yield Finding("compiler", "advice", "none: what comes as source cannot be installed", f"install {_INSTALL}")


def _check_plugins(registry: PluginRegistry) -> Iterator[Finding]:
    working = [record for record in registry.plugins if not record.error and not record.skipped]
    yield Finding("plugins", "ok", ", ".join(f"{record.name} {record.version}".strip() for record in working) or "none")
    for warning in (*registry.complaints, *(line for record in registry.plugins for line in record.warnings)):
        yield Finding("plugins", "advice", warning)
    skipped = [record.name for record in registry.plugins if record.skipped]
    if skipped:
        yield Finding("plugins", "ok", f"left out by the settings: {', '.join(skipped)}")


def _check_memory(settings: Settings, registry: PluginRegistry) -> Iterator[Finding]:
    """Check that the configured models fit into memory together, by the estimates of their backends."""
    budget = (settings.limits.memory_budget or default_budget()).by_device.get(MAIN_MEMORY)
    sizes: dict[str, int] = {}
    for name, model in settings.models.items():
        try:
            footprint = footprint_of(plan_model(name, model, registry))
        except EnginehouseError:
            continue  # the table of models shows the reason
        if footprint.device == MAIN_MEMORY:
            sizes[name] = footprint.num_bytes
    if budget is None:
        yield Finding("memory", "advice", "this machine does not say how much it has", "set limits.memory_budget")
        return
    listed = "; ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items()) or "no model is configured"
    text = f"{format_bytes(budget)} for models; {listed}"
    too_large = [name for name, size in sizes.items() if size > budget]
    if too_large:
        advice = "a smaller context, fewer slots or a quantised file"
        yield Finding("memory", "problem", f"{text}; {', '.join(too_large)} cannot fit", advice)
    elif sum(sizes.values()) > budget:
        yield Finding("memory", "advice", f"{text}; not all at once", 'load = "lazy" for those that are used rarely')
    else:
        yield Finding("memory", "ok", text)


def _check_port(server: ServerSettings) -> Iterator[Finding]:
    try:
        if tls_context(server) is not None:
            yield Finding("certificate", "ok", f"{server.ssl_certfile}")
    except ConfigError as error:
        yield Finding("certificate", "problem", error.message)
    if server.uds is not None:
        yield Finding("port", "ok", f"none: the socket file {server.uds} (mode {server.uds_mode})")
        return
    where = f"{server.host}:{server.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            if sys.platform != "win32":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        advice = "stop what listens there, or set another server.port; if it is this server, all is well"
        yield Finding("port", "advice", f"{where} cannot be listened on now: {error.strerror or error}", advice)
    else:
        yield Finding("port", "ok", f"{where} is free")


def _check_reach(settings: Settings) -> Iterator[Finding]:
    server = settings.server
    if server.insecure and server.uds is None and not settings.auth.needs_key:
        advice = "set auth.key_file (enginehouse keys add), and put TLS in front: docs/deployment.md"
        yield Finding(
            "reach", "advice", f"any client that reaches {server.host}:{server.port} may use the models", advice
        )
    if "*" in server.cors_origins and not settings.auth.needs_key:
        yield Finding("reach", "advice", "any web page may use the models", "list the origins in server.cors_origins")


def _check_keys(auth: AuthSettings, served: tuple[str, ...]) -> Iterator[Finding]:
    try:
        ring = load_keys(auth)
    except ConfigError as error:
        yield Finding("keys", "problem", error.message)
        return
    for name, unknown in ring.unknown_models(served) if served else ():
        text = f"{name!r} may use {unknown!r}, which is not served{closest(unknown, served)}"
        yield Finding("keys", "advice", text, "correct the name; until then it opens nothing")
    if auth.key_file is None:
        return
    path = Path(auth.key_file).expanduser()
    mode = stat.S_IMODE(path.stat().st_mode)
    if sys.platform != "win32" and mode & (stat.S_IWGRP | stat.S_IWOTH):
        text = f"{path} can be changed by others (mode {mode:o}): they could add keys"
        yield Finding("keys", "problem", text, f"chmod 600 {path}")
    elif sys.platform != "win32" and mode & stat.S_IROTH:
        yield Finding("keys", "advice", f"{path} can be read by everyone (mode {mode:o})", f"chmod 600 {path}")
    else:
        yield Finding("keys", "ok", f"{path} (mode {mode:o})")


def _check_open_files() -> Iterable[Finding]:
    """Check the limit of open files; each connection uses one."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - only on Unix

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < soft < _FEW_FILES:
        text = f"at most {soft} at once, so about as many connections"
        yield Finding("open files", "advice", text, f"ulimit -n {_FEW_FILES}, or LimitNOFILE= in a systemd unit")
    else:
        yield Finding("open files", "ok", "unlimited" if soft < 0 else f"at most {soft} at once")
