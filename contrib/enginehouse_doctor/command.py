"""``enginehouse doctor``: shows what can run on this machine, the backend of each model, and problems."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import attrs
import click
from attrs import evolve, field, frozen
from rich.console import Console
from rich.table import Table
from rich.text import Text

from enginehouse.cli.options import config_option, json_option, read_settings
from enginehouse.contract.backend import Backend
from enginehouse.contract.errors import ConfigError, EnginehouseError
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.serving.sources import find_source, judge_all
from enginehouse.settings.config import ModelSettings, Settings
from enginehouse.settings.features import RouterSettings
from enginehouse_doctor.checkup import Finding, check_all, check_settings
from enginehouse_doctor.files import check_files
from enginehouse_doctor.templates import check_templates

__all__ = ["doctor"]


@frozen
class _BackendReport:
    """Availability of one backend."""

    name: str
    available: bool
    devices: tuple[str, ...]
    reason: str


@frozen
class _VerdictReport:
    """Verdict of one backend on a model."""

    backend: str
    score: float
    reason: str


@frozen(kw_only=True)
class _ModelReport:
    """One model: the chosen backend with the reason, and the verdicts of all backends."""

    name: str
    source: str
    path: str | None = None
    backend: str | None = None
    reason: str = ""
    error: str | None = None
    verdicts: tuple[_VerdictReport, ...] = ()


@frozen(kw_only=True)
class _Report:
    """The whole report."""

    versions: dict[str, str]
    backends: tuple[_BackendReport, ...]
    models: tuple[_ModelReport, ...] = ()
    findings: tuple[Finding, ...] = ()
    problems: tuple[str, ...] = field(default=())


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@config_option
@click.option("--backend", help="Backend that is to open the models.  [default: the one that suits each best]")
@json_option
@click.pass_context
def doctor(
    ctx: click.Context, *, models: tuple[str, ...], config_file: Path | None, backend: str | None, as_json: bool
) -> None:
    """Show what can run here, which backend would open MODEL (or every configured model) and why, and what to fix.

    No weights are loaded. Exit code 1: there is a problem, such as a broken plugin or a model that cannot be opened.
    """
    report = _examine(models, config_file, backend)
    if as_json:
        click.echo(json.dumps(attrs.asdict(report), indent=2))
    else:
        _print(Console(), report)
    ctx.exit(1 if report.problems else 0)


def _examine(models: tuple[str, ...], config_file: Path | None, backend: str | None) -> _Report:
    """Build the report; with unusable settings, the part that does not need them."""
    unusable: tuple[Finding, ...] = ()
    try:
        settings = read_settings(config_file)
        registry = PluginRegistry.for_settings(settings, also=[backend] if backend else [])
    except ConfigError as error:
        unusable = (check_settings(error),)
        settings = Settings()
        registry = PluginRegistry.for_settings(settings, also=[backend] if backend else [])
    asked = _asked(settings, models, backend, registry)
    # Settings that refer to other models are irrelevant to named ones.
    router = RouterSettings() if models else settings.router
    examined = evolve(settings, models=asked, router=router)
    described = tuple(_describe(name, model, registry) for name, model in asked.items())
    paths = {model.name: Path(model.path) for model in described if model.path is not None and not model.error}
    findings = (
        *unusable,
        *check_all(examined, registry, settings.served_names()),
        *check_files(paths),
        *check_templates(examined, paths, registry),
    )
    return _report(described, registry, findings)


def _asked(
    settings: Settings, models: tuple[str, ...], backend: str | None, registry: PluginRegistry
) -> dict[str, ModelSettings]:
    """Return the models to check: the named ones, else the configured ones, else those offered by plugins."""
    names = {known: name for name, model in settings.models.items() for known in (name, *model.aliases)}
    asked = {
        names.get(name, name): settings.models[names[name]] if name in names else ModelSettings(source=name)
        for name in models
    }
    asked = asked or dict(settings.models) or {name: ModelSettings(source=name) for name in registry.model_sources}
    return asked if backend is None else {name: evolve(model, backend=backend) for name, model in asked.items()}


def _report(described: tuple[_ModelReport, ...], registry: PluginRegistry, findings: tuple[Finding, ...]) -> _Report:
    broken = [record.problem for record in registry.plugins if record.problem]
    return _Report(
        versions={
            "enginehouse": version("enginehouse"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        },
        backends=tuple(_probe(backend) for backend in registry.backends.values()),
        models=described,
        findings=findings,
        problems=(
            *(f"{found.subject}: {found.text}" for found in findings if found.state == "problem"),
            *broken,
            *(f"model {model.name}: {model.error}" for model in described if model.error),
        ),
    )


def _probe(backend: Backend) -> _BackendReport:
    try:
        found = backend.probe()
    except EnginehouseError as error:  # a broken backend is what a doctor looks for
        return _BackendReport(backend.name, False, (), error.message)
    return _BackendReport(backend.name, found.available, found.devices, found.reason)


def _describe(name: str, model: ModelSettings, registry: PluginRegistry) -> _ModelReport:
    report = _ModelReport(name=name, source=model.source)
    try:
        source = find_source(model.source, registry)
        judged = judge_all(source, registry.backends, probe=model.python is None)
        verdicts = tuple(_VerdictReport(one.backend.name, one.score, one.reason) for one in judged)
        report = evolve(report, path=str(source.path) if source.path else None, verdicts=verdicts)
        plan = plan_model(name, model, registry)
    except EnginehouseError as error:
        return evolve(report, error=error.message)
    return evolve(report, backend=plan.backend.name, reason=plan.reason)


def _print(console: Console, report: _Report) -> None:
    console.print(Text(", ".join(f"{name} {value}" for name, value in report.versions.items())), soft_wrap=True)
    backends = Table("Backend", "Here", "Devices", "Why not", box=None, header_style="bold")
    for one in report.backends:
        backends.add_row(one.name, _yes(one.available), ", ".join(one.devices), Text(one.reason))
    console.print(backends)
    for model in report.models:
        console.print()
        found = model.path or "no file or folder here"
        console.print(Text(f"{model.name}: {found}", style="bold"), soft_wrap=True)
        console.print(
            Text(model.error, style="red") if model.error else Text(f"opened by {model.backend}: {model.reason}")
        )
        table = Table("Backend", "Score", "Why", box=None, header_style="bold")
        for verdict in model.verdicts:
            table.add_row(verdict.backend, f"{verdict.score:g}", Text(verdict.reason))
        console.print(table)
    console.print()
    for finding in report.findings:
        _print_finding(console, finding)
    told = {f"{found.subject}: {found.text}" for found in report.findings}
    for problem in (problem for problem in report.problems if problem not in told):
        console.print(Text(f"Problem: {problem}", style="red"), soft_wrap=True)


def _print_finding(console: Console, found: Finding) -> None:
    style = {"ok": "green", "advice": "yellow", "problem": "red"}[found.state]
    line = Text.assemble((f"{found.subject}: ", style), found.text)
    console.print(line.append(f" -> {found.advice}", "bold") if found.advice else line, soft_wrap=True)


def _yes(value: bool) -> Text:
    return Text("yes", style="green") if value else Text("no", style="yellow")
