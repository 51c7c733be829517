"""The commands: ``python -m bench NAME``, from the folder ``tests``."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from .machine import describe_machine
from .model_file import find_embedding_folder, find_model_file
from .plan import Plan
from .record import Comparison, Record
from .report import Report

__all__ = ["main"]

_Measure = Callable[[Plan, Console], tuple[Record, list[Comparison]]]

# Imported on use: each needs only its own peers installed.
_BENCHMARKS = {
    "serving": "bench.serving:measure_serving",
    "neighbour": "bench.serving:measure_neighbour",
    "isolation": "bench.serving:measure_isolation",
    "step": "bench.step_cost:measure_step",
    "http": "bench.http_layer:measure_http",
    "sampling": "bench.sampling:measure_sampling",
    "constrained": "bench.constrained:measure_constrained",
    "speculation": "bench.speculation:measure_speculation",
    "prefix": "bench.prefix:measure_prefix",
    "overload": "bench.overload:measure_overload",
    "plugins": "bench.held_plugins:measure_plugins",
    "beside": "bench.beside:measure_beside",
    "embeddings": "bench.embeddings:measure_embeddings",
    "adapters": "bench.adapters:measure_adapters",
    "images": "bench.images:measure_images",
    "replicas": "bench.replicas:measure_replicas",
    "generate": "bench.generate:measure_generate",
}
_SOAK = "soak"


@click.command()
@click.argument("name", type=click.Choice([*_BENCHMARKS, _SOAK]))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Times everything is measured.")
@click.option(
    "--seconds",
    default=120.0,
    show_default=True,
    type=click.FloatRange(5),
    help="Of overload; of a load of embeddings at most 15.",
)
@click.option("--quick", is_flag=True, help="Two short rounds that show whether all works; not to be quoted.")
@click.option("--wide", is_flag=True, help="Of adapters: on the shape of Llama-3.2-1B with random weights.")
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A GGUF file.")
@click.option("--minutes", default=30.0, show_default=True, type=click.FloatRange(0.1), help="How long soak goes on.")
@click.option(
    "--out",
    default=Path("../bench-results"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for results and the servers' logs.",
)
def main(
    *, name: str, rounds: int, seconds: float, quick: bool, wide: bool, model: Path | None, minutes: float, out: Path
) -> None:
    """Measure NAME and report medians, 95 % intervals and ratios; docs/performance.md explains them.

    soak measures nothing: it passes or fails, see docs/metrics.md.
    """
    signal.signal(signal.SIGTERM, _exit)
    console = Console()
    if name == _SOAK:
        sys.exit(_soak(minutes, console, out.resolve()))
    if wide and (name != "adapters" or model is not None):
        raise click.UsageError("--wide is an option of adapters, without --model.")
    machine = describe_machine()
    measured = find_embedding_folder() if name == "embeddings" else find_model_file(model)
    plan = Plan(measured.resolve(), min(rounds, 2) if quick else rounds, quick, out.resolve(), seconds, wide)
    record, comparisons = _load(_BENCHMARKS[name])(plan, console)
    notes = ["A quick trial: do not quote."] if quick else []
    report = Report(
        name,
        machine,
        record,
        comparisons,
        [f"Model: {'Llama-3.2-1B, random weights' if wide else plan.model_file.name}.", *notes],
    )
    report.show(console)
    for path in report.write(plan.folder):
        console.print(f"written: {path}")


def _soak(minutes: float, console: Console, folder: Path) -> int:
    """Run the soak test; the exit code says whether it passed."""
    soak = import_module("bench.soak")
    result = soak.soak(60 * minutes, console, folder=folder)
    for figure, value in result.figures.items():
        console.print(f"{figure}: {value}", markup=False, highlight=False)
    console.print(f"FAILED: {len(result.problems)} problems" if result.problems else "passed")
    return 1 if result.problems else 0


def _load(path: str) -> _Measure:
    module, _, function = path.partition(":")
    measure: _Measure = getattr(import_module(module), function)
    return measure


def _exit(signal_number: int, frame: FrameType | None) -> None:
    """Terminated: leave through every ``finally``, so that no server stays behind."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    main()
