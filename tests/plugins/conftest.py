"""What the tests of several engines share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from enginehouse.contract.backend import Runner, Span


@pytest.fixture(scope="session")
def greedy() -> Callable[..., list[list[int]]]:
    """Continues prompts with the most probable tokens; see :func:`continue_greedily`."""
    return continue_greedily


@pytest.fixture(scope="session")
def python() -> Callable[..., str]:
    """Runs Python text in a process of its own; see :func:`run_python`."""
    return run_python


def continue_greedily(
    runner: Runner, prompts: Sequence[Sequence[int]], num_tokens: int, chunk_tokens: int
) -> list[list[int]]:
    """``num_tokens`` tokens for each prompt, all in one batch; prompts enter in chunks, beside what decodes."""
    sequences = [runner.open_sequence() for _ in prompts]
    pending = [list(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in prompts]
    while active := [i for i, answer in enumerate(answers) if len(answer) < num_tokens]:
        spans, sampled = [], []
        for i in active:
            chunk, pending[i] = pending[i][:chunk_tokens], pending[i][chunk_tokens:]
            outputs = "none" if pending[i] else "last"
            spans.append(Span(sequences[i], runner.length(sequences[i]), np.array(chunk, np.int32), outputs))
            sampled += [] if pending[i] else [i]
        for i, row in zip(sampled, runner.forward(spans).host(), strict=True):
            answers[i].append(int(row.argmax()))
            pending[i] = answers[i][-1:]
    for sequence in sequences:
        runner.free_sequence(sequence)
    return answers


def run_python(text: str, *arguments: str) -> str:
    """The standard output of ``python -c text arguments``; the test fails with its error output."""
    done = subprocess.run([sys.executable, "-c", text, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
