"""What core adds to a decode step: ``StepEngine`` over the llama.cpp runner beside ``llama_decode`` alone.

The engine's step is everything from one forward pass to the next: scheduling, filling the batch, sampling, stop
strings and events. The subjects (``bench.steppers``) stay loaded and take turns; those that wait sleep.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen
from rich.console import Console

from .machine import usable_cores
from .plan import Plan
from .record import Comparison, Key, Record

__all__ = ["measure_step"]

_METRIC = "step, ms"
_NUM_WARM_UP_STEPS = 4
_SCENARIOS = {1: "1 sequence", 8: "8 sequences"}
_RAW, _FIXED, _ADAPTIVE = "llama_decode", "engine", "adaptive"
_TESTS_FOLDER = Path(__file__).parents[1]


@frozen
class _Subject:
    """A stepper that answers."""

    name: str
    process: subprocess.Popen[str]

    def measure(self, seed: int, num_sequences: int, num_steps: int) -> float:
        """Median milliseconds of a step, the first few left out."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{seed} {num_sequences} {num_steps}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The stepper {self.name} ended with code {self.process.wait()}.")
        return 1e3 * statistics.median(json.loads(answer)[_NUM_WARM_UP_STEPS:])


@contextlib.contextmanager
def _open(name: str, model_file: Path) -> Iterator[_Subject]:
    command = [sys.executable, "-m", "bench.steppers", name, str(model_file), str(len(usable_cores()))]
    with subprocess.Popen(
        command, cwd=_TESTS_FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield _Subject(name, process)
        finally:
            process.kill()


def measure_step(plan: Plan, console: Console) -> tuple[Record, list[Comparison]]:
    """Milliseconds of a decode step at 1 and 8 sequences: raw, ours with as many threads, ours as it adapts."""
    record = Record()
    with contextlib.ExitStack() as stack:
        subjects = [stack.enter_context(_open(name, plan.model_file)) for name in (_RAW, _FIXED, _ADAPTIVE)]
        for round_number, subject in plan.interleave(subjects):
            for num_sequences, scenario in _SCENARIOS.items():
                step_ms = subject.measure(round_number, num_sequences, 12 if plan.quick else 100)
                record.add(Key(scenario, subject.name, _METRIC), step_ms)
                console.print(
                    f"round {round_number + 1}/{plan.num_rounds}  {subject.name}, {scenario}: {step_ms:.2f} ms"
                )
    return record, [
        Comparison(Key(scenario, name, _METRIC), Key(scenario, _RAW, _METRIC), target, target_is_upper=True)
        for scenario in _SCENARIOS.values()
        for name, target in ((_FIXED, 1.05), (_ADAPTIVE, None))
    ]
