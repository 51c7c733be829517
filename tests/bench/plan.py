"""How much is measured, on what, and where the results go: what every benchmark is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from attrs import frozen

__all__ = ["Plan"]

Subject = TypeVar("Subject")


@frozen
class Plan:
    """What the command line says.

    Attributes:
        model_file: GGUF file that everything runs on.
        num_rounds: times that every subject is measured.
        quick: a trial that shows whether everything works; its figures are not to be quoted.
        folder: results and logs.
        seconds: how long a load without end lasts.
        wide: adapters on a model of 1.2 billion random weights.
    """

    model_file: Path
    num_rounds: int
    quick: bool
    folder: Path
    seconds: float = 120.0
    wide: bool = False

    def interleave(self, subjects: Sequence[Subject]) -> Iterator[tuple[int, Subject]]:
        """Round by round all subjects, each round beginning with another one, so that none is always first."""
        for round_number in range(self.num_rounds):
            first = round_number % len(subjects)
            for subject in (*subjects[first:], *subjects[:first]):
                yield round_number, subject
