"""Drafts with a second model in its own memory, where one sequence follows each sequence that is drafted for.

It runs in the same worker, on the same thread, with one forward pass per token for all sequences together. It may be a
smaller model or a part of the model that it drafts for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from enginehouse.contract.backend import Runner, Span
from enginehouse.contract.drafter import Draft, DraftTask
from enginehouse.contract.errors import CacheFull
from enginehouse_speculate.greedy import GreedyDraft, write_greedily

__all__ = ["SecondModel"]


@define(eq=False)
class _Session:
    """A sequence in the second model; ``token_ids`` are the tokens in its cache."""

    handle: int
    token_ids: list[int] = field(factory=list)


@define(eq=False, kw_only=True)
class _Growing(GreedyDraft):
    """Draft of one sequence."""

    session: _Session


@define(eq=False)
class SecondModel:
    """A bound drafter; closes the second model on shutdown.

    Args:
        runner: runner of the second model, which has the same vocabulary as the first.
        min_probability: a draft ends before a token that the second model considers less probable than this.
        max_tokens: longest draft.
    """

    runner: Runner
    min_probability: float
    max_tokens: int
    is_free: bool = False
    prior: float = 0.6

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> _Session | None:
        """Open a sequence in the second model; None if it has no free slot."""
        try:
            return _Session(self.runner.open_sequence())
        except CacheFull:
            return None

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Draft with the second model; None for sequences whose text it has not fully read yet."""
        growing = [self._begin(task) for task in tasks]
        write_greedily([one for one in growing if one is not None], self._last_rows)
        return [one.finished() if one is not None else None for one in growing]

    def close(self, session: _Session) -> None:
        """Free the sequence."""
        self.runner.free_sequence(session.handle)

    def shutdown(self) -> None:
        """Close the second model."""
        self.runner.close()

    def _begin(self, task: DraftTask) -> _Growing | None:
        """Update a sequence up to its last token; None while that takes more than one chunk."""
        session: _Session = task.session
        wanted = task.token_ids.tolist()
        if len(wanted) >= self.runner.capabilities.max_context:
            return None
        common = _common_length(session.token_ids, wanted[:-1])
        if common < len(session.token_ids):
            common = self.runner.truncate(session.handle, common)
            del session.token_ids[common:]
        due = wanted[common:]
        chunk = self.runner.capabilities.prefill_chunk_tokens
        if len(due) > chunk:
            self._forward([(session, due[:chunk])], "none")
            return None
        room = self.runner.capabilities.max_context - len(wanted)
        return _Growing(
            session=session,
            due=due,
            max_tokens=min(task.max_tokens, self.max_tokens, room),
            min_probability=self.min_probability,
        )

    def _last_rows(self, growing: Sequence[_Growing]) -> NDArray[np.float32] | None:
        return self._forward([(one.session, one.due) for one in growing], "last")

    def _forward(self, spans: Sequence[tuple[_Session, list[int]]], outputs: Any) -> NDArray[np.float32] | None:
        """Run a forward pass; None if the second model has no memory, which costs only the drafts."""
        try:
            output = self.runner.forward(
                [Span(s.handle, len(s.token_ids), np.array(due, np.int32), outputs) for s, due in spans]
            )
        except CacheFull:
            return None
        for session, due in spans:
            session.token_ids += due
        return output.host() if outputs == "last" else None


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length
