"""``enginehouse calibrate early-exit``: measures cost and gain of early exit on the user's own text."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import cast

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from enginehouse.cli.options import config_option, read_settings
from enginehouse.contract.backend import Runner
from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.exit_policy import LayerAccess
from enginehouse.plugins import PluginRegistry
from enginehouse.serving.opening import plan_model
from enginehouse.settings.config import ModelSettings, structure_options
from enginehouse_early_exit.calibration import THRESHOLDS, Measured, calibrate, grid, passages

__all__ = ["best_setting", "calibrate_early_exit"]

_PROMPT_TOKENS, _ANSWER_TOKENS = 24, 32
_MIN_GAIN = 1.02  # smaller differences also occur between two identical runs


@click.command("early-exit")
@click.argument("model")
@click.option(
    "--target-agreement",
    type=click.FloatRange(0, 1),
    default=0.98,
    show_default=True,
    help="Share of tokens that must be those of the whole model.",
)
@click.option("--text", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="UTF-8 text to measure on.")
@click.option("--passages", "num_passages", type=click.IntRange(1), default=6, show_default=True, help="Most of them.")
@click.option("--layers", help="Layers to measure, separated by commas.  [default: half, three quarters, nine tenths]")
@click.option(
    "--policy", "policies", type=click.Choice(list(THRESHOLDS)), multiple=True, help="Only this one; repeatable."
)
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the setting to this file, too.")
@config_option
def calibrate_early_exit(
    *,
    model: str,
    target_agreement: float,
    text: Path | None,
    num_passages: int,
    layers: str | None,
    policies: tuple[str, ...],
    output: Path | None,
    config_file: Path | None,
) -> None:
    """Measure policies of early exit on MODEL, a configured name or a source, and print the setting that pays.

    Agreement, perplexity and speed are those of real decoding, one sequence at a time, compared with all layers.
    """
    written = (
        text.read_text("utf-8") if text is not None else files(__package__).joinpath("sample.txt").read_text("utf-8")
    )
    runner = _open(model, config_file)
    try:
        token_ids = runner.tokenizer.encode(written, special=False)
        parts = passages(token_ids, _PROMPT_TOKENS, _ANSWER_TOKENS, num_passages)
        if not parts:
            least = _PROMPT_TOKENS + _ANSWER_TOKENS + 1
            raise click.ClickException(f"the text has {len(token_ids)} tokens; at least {least} are needed")
        settings = grid(_layers(layers, runner), policies or tuple(THRESHOLDS))
        click.echo(f"{len(parts)} passages, {len(settings)} settings ...", err=True)
        with _bar() as bar:
            task = bar.add_task("Measuring", total=len(parts) * len(settings))
            plain, measured = calibrate(runner, parts, _PROMPT_TOKENS, settings, lambda: bar.advance(task))
        num_layers = runner.num_layers
    finally:
        runner.close()
    click.echo(_table(plain, measured))
    chosen = best_setting(measured, target_agreement)
    if chosen is None or chosen.setting is None:
        click.echo(f"\nNo setting gains time at an agreement of {target_agreement:g}: leave exit_policy unset.")
        return
    line = chosen.setting.to_toml(num_layers)
    click.echo(f"\nFastest at an agreement of {target_agreement:g}, for [models.<name>]:\n\n{line}")
    if output is not None:
        output.write_text(line + "\n", "utf-8")


def _open(model: str, config_file: Path | None) -> LayerAccess:
    """Load the model in this process.

    Raises:
        ModelLoadError: it cannot be opened, or does not support early exit.
    """
    settings = read_settings(config_file)
    registry = PluginRegistry.for_settings(settings)
    plan = plan_model(model, settings.models.get(model) or ModelSettings(source=model), registry)
    if plan.backend.opens != "model":
        raise ModelLoadError(f"{model}: the backend {plan.backend.name!r} forwards requests; it has no layers")
    options = structure_options(plan.backend.options, plan.options, plan.options_path)
    with _bar() as bar:
        task = bar.add_task(f"Loading {model}", total=1.0)
        opened = plan.backend.open(plan.source, options, lambda share, what: bar.update(task, completed=share))
    runner = cast(Runner, opened)
    if isinstance(runner, LayerAccess) and runner.capabilities.exit_layers:
        return runner
    runner.close()
    raise ModelLoadError(f"{model}: the backend {plan.backend.name!r} has no access to the layers of this model")


def _bar() -> Progress:
    """Return a progress bar on standard error, as the results go to standard output; it is shown at a terminal only."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _layers(asked: str | None, runner: LayerAccess) -> list[int]:
    offered = runner.capabilities.exit_layers
    if asked is None:
        wanted = [max(1, round(runner.num_layers * share)) for share in (0.5, 0.75, 0.9)]
        return sorted({min(offered, key=lambda layer: abs(layer - one)) for one in wanted})
    try:
        found = sorted({int(layer) for layer in asked.split(",")})
    except ValueError as error:
        raise click.BadParameter("must be whole numbers with commas between them", param_hint="--layers") from error
    if wrong := [layer for layer in found if layer not in offered]:
        raise click.BadParameter(
            f"{wrong}: this model supports early exit after layers {offered[0]} to {offered[-1]}", param_hint="--layers"
        )
    return found


def best_setting(measured: list[Measured], target_agreement: float) -> Measured | None:
    """Return the fastest setting with sufficient agreement, if it saves time on every passage."""
    good = [one for one in measured if one.agreement >= target_agreement and one.num_left and one.least_speed >= 1.0]
    best = max(good, key=lambda one: one.speed, default=None)
    return best if best is not None and best.speed >= _MIN_GAIN else None


def _table(plain: Measured, measured: list[Measured]) -> str:
    """Format a Markdown table."""
    lines = [
        "| policy | layer | threshold | agreement | left early | mean layers | tokens/s | speed | perplexity |",
        "|---|---|---|---|---|---|---|---|---|",
        _row("all layers", "", "", plain),
    ]
    for one in measured:
        assert one.setting is not None
        lines.append(_row(one.setting.policy, str(one.setting.layer), f"{one.setting.threshold:g}", one))
    return "\n".join(lines)


def _row(policy: str, layer: str, threshold: str, one: Measured) -> str:
    figures = (
        f"{one.agreement:.3f}",
        f"{one.share_left:.2f}",
        f"{one.mean_layers:.1f}",
        f"{one.tokens_per_s:.1f}",
        f"{one.speed:.2f}",
        f"{one.perplexity:.2f}",
    )
    return "| " + " | ".join((policy, layer, threshold, *figures)) + " |"
