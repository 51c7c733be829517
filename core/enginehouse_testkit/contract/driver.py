"""Driver of a runner in contract tests: short calls, and cleanup of all sequences."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

from enginehouse.contract.backend import Outputs, Runner, Span

__all__ = ["Rows", "RunnerDriver", "largest_difference", "repeated"]

Rows = NDArray[np.float32]


class RunnerDriver:
    """Keeps track of the sequences that a test opens. Returned rows are copies."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._open: set[int] = set()

    def open(self) -> int:
        """Open an empty sequence."""
        return self._track(self.runner.open_sequence())

    def holding(self, token_ids: Sequence[int]) -> int:
        """Open a sequence that holds ``token_ids``."""
        sequence = self.open()
        self.feed(sequence, token_ids, "none")
        return sequence

    def fork(self, source: int, length: int) -> tuple[int, int]:
        """See :class:`enginehouse.contract.backend.Runner`."""
        sequence, shared = self.runner.fork(source, length)
        return self._track(sequence), shared

    def adopt(self, sequence: int) -> int:
        """Track a sequence that the runner created in another way."""
        return self._track(sequence)

    def free(self, sequence: int) -> None:
        """Free a sequence."""
        self.runner.free_sequence(sequence)
        self._open.discard(sequence)

    def free_all(self) -> None:
        """Free all sequences."""
        for sequence in list(self._open):
            self.free(sequence)

    def span(self, sequence: int, token_ids: Sequence[int], outputs: Outputs = "last") -> Span:
        """Return a span that starts at the end of the sequence."""
        return Span(sequence, self.runner.length(sequence), np.asarray(token_ids, np.int32), outputs)

    def forward(self, *spans: Span) -> Rows:
        """Run one forward pass; return (num_rows, vocab_size)."""
        output = self.runner.forward(spans)
        rows = output.host()
        assert rows.shape[0] == output.num_rows, "num_rows must be the number of rows of host()"
        return rows.copy()

    def feed(
        self, sequence: int, token_ids: Sequence[int], outputs: Outputs = "last", chunk_tokens: int | None = None
    ) -> Rows:
        """Append ``token_ids`` in chunks; return the rows of all chunks (with ``last``: of the last chunk)."""
        chunk_tokens = chunk_tokens or self.runner.capabilities.max_batch_tokens
        chunks = [token_ids[start : start + chunk_tokens] for start in range(0, len(token_ids), chunk_tokens)]
        rows = []
        for index, chunk in enumerate(chunks):
            is_silent = outputs == "none" or (outputs == "last" and index < len(chunks) - 1)
            rows.append(self.forward(self.span(sequence, chunk, "none" if is_silent else outputs)))
        return np.concatenate(rows)

    def alone(self, token_ids: Sequence[int]) -> Rows:
        """Return the reference: the rows of all positions when these tokens are fed alone in one pass."""
        sequence = self.open()
        rows = self.feed(sequence, token_ids, "all")
        self.free(sequence)
        return rows

    def _track(self, sequence: int) -> int:
        assert sequence not in self._open, f"handle {sequence} is already in use"
        self._open.add(sequence)
        return sequence


def largest_difference(left: Rows, right: Rows) -> float:
    """Return the largest difference between two logits at the same position; equal infinities do not differ."""
    assert left.shape == right.shape, f"rows of shape {left.shape} against {right.shape}"
    unequal = left != right
    if not unequal.any():
        return 0.0
    return float(np.abs(left[unequal].astype(np.float64) - right[unequal]).max())


def repeated(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return ``num_tokens`` ids by repeating ``token_ids``."""
    return list(islice(cycle(token_ids), num_tokens))
