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
from .model_file import find_model_file
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
}


@click.command()
@click.argument("name", type=click.Choice(list(_BENCHMARKS)))
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Times everything is measured.")
@click.option("--quick", is_flag=True, help="Two short rounds that show whether all works; not to be quoted.")
@click.option("--model", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="A GGUF file.")
@click.option(
    "--out",
    default=Path("../bench-results"),
    show_default=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for results and the servers' logs.",
)
def main(name: str, rounds: int, quick: bool, model: Path | None, out: Path) -> None:
    """Measure NAME and report medians, 95 % intervals and ratios; docs/performance.md explains them."""
    signal.signal(signal.SIGTERM, _exit)
    console = Console()
    machine = describe_machine()
    plan = Plan(find_model_file(model).resolve(), min(rounds, 2) if quick else rounds, quick, out.resolve())
    record, comparisons = _load(_BENCHMARKS[name])(plan, console)
    notes = ["A quick trial: do not quote."] if quick else []
    report = Report(name, machine, record, comparisons, [f"Model: {plan.model_file.name}.", *notes])
    report.show(console)
    for path in report.write(plan.folder):
        console.print(f"written: {path}")


def _load(path: str) -> _Measure:
    module, _, function = path.partition(":")
    measure: _Measure = getattr(import_module(module), function)
    return measure


def _exit(signal_number: int, frame: FrameType | None) -> None:
    """Terminated: leave through every ``finally``, so that no server stays behind."""
    sys.exit(128 + signal_number)


if __name__ == "__main__":
    main()
