"""Drives a runner in contract tests: short calls, and nothing left open afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Outputs, Runner, Span

__all__ = ["Rows", "RunnerDriver", "largest_difference", "repeated"]

Rows = NDArray[np.float32]


class RunnerDriver:
    """Keeps track of the sequences that a test opens. Rows that it returns are copies."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._open: set[int] = set()

    def open(self) -> int:
        """A new, empty sequence."""
        return self._track(self.runner.open_sequence())

    def holding(self, token_ids: Sequence[int]) -> int:
        """A new sequence that holds ``token_ids``."""
        sequence = self.open()
        self.feed(sequence, token_ids, "none")
        return sequence

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """See :class:`enginehouse.contract.backend.Runner`."""
        sequence, shared = self.runner.fork(source, length)
        return self._track(sequence), shared

    def adopt(self, sequence: int) -> int:
        """Take a sequence over that the runner has made in another way."""
        return self._track(sequence)

    def free(self, sequence: int) -> None:
        """Give a sequence back."""
        self.runner.free_sequence(sequence)
        self._open.discard(sequence)

    def free_all(self) -> None:
        """Give all sequences back."""
        for sequence in list(self._open):
            self.free(sequence)

    def span(self, sequence: int, token_ids: Sequence[int], outputs: Outputs = "last") -> Span:
        """A span that starts where the sequence ends."""
        return Span(sequence, self.runner.length(sequence), np.asarray(token_ids, np.int32), outputs)

    def forward(self, *spans: Span) -> Rows:
        """One forward pass; (num_rows, vocab_size)."""
        output = self.runner.forward(spans)
        rows = output.host()
        assert rows.shape[0] == output.num_rows, "num_rows must be the number of rows of host()"
        return rows.copy()

    def feed(
        self, sequence: int, token_ids: Sequence[int], outputs: Outputs = "last", chunk_tokens: int | None = None
    ) -> Rows:
        """Append ``token_ids`` in chunks; the rows of all chunks (with ``last``: of the last chunk)."""
        chunk_tokens = chunk_tokens or self.runner.capabilities.max_batch_tokens
        chunks = [token_ids[start : start + chunk_tokens] for start in range(0, len(token_ids), chunk_tokens)]
        rows = []
        for index, chunk in enumerate(chunks):
            is_silent = outputs == "none" or (outputs == "last" and index < len(chunks) - 1)
            rows.append(self.forward(self.span(sequence, chunk, "none" if is_silent else outputs)))
        return np.concatenate(rows)

    def alone(self, token_ids: Sequence[int]) -> Rows:
        """The rows of all positions when these tokens are the only ones, fed at once: the reference."""
        sequence = self.open()
        rows = self.feed(sequence, token_ids, "all")
        self.free(sequence)
        return rows

    def _track(self, sequence: int) -> int:
        assert sequence not in self._open, f"handle {sequence} is already in use"
        self._open.add(sequence)
        return sequence


def largest_difference(left: Rows, right: Rows) -> float:
    """The largest difference between two logits of the same place; equal infinities do not differ."""
    assert left.shape == right.shape, f"rows of shape {left.shape} against {right.shape}"
    unequal = left != right
    if not unequal.any():
        return 0.0
    return float(np.abs(left[unequal].astype(np.float64) - right[unequal]).max())


def repeated(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """``num_tokens`` ids: ``token_ids`` over and over."""
    return list(islice(cycle(token_ids), num_tokens))
