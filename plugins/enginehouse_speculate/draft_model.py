"""A smaller model of the same vocabulary writes ahead, greedily, and the large one checks.

It runs in the same worker, on the same thread, one forward pass per token for all sequences together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen
from attrs.validators import ge, gt, le
from numpy.typing import NDArray

from enginehouse.backend import Runner, Span
from enginehouse.drafting import BoundDrafter, Draft, DraftContext, DraftTask
from enginehouse.errors import CacheFull, ModelLoadError
from enginehouse_speculate.greedy import GreedyDraft, write_greedily

__all__ = ["DraftModelDrafter", "DraftModelOptions"]


@frozen(kw_only=True)
class DraftModelOptions:
    """Settings of the drafter ``draft-model``.

    Attributes:
        min_probability: a draft ends before a token that the smaller model finds less probable than this.
        max_tokens: longest draft.
    """

    min_probability: float = field(default=0.4, validator=[ge(0.0), le(1.0)])
    max_tokens: int = field(default=16, validator=gt(0))


@define(eq=False)
class DraftModelDrafter:
    """What the plugin registers."""

    name: str = "draft-model"
    api_version: int = 1
    options: type[DraftModelOptions] = DraftModelOptions

    def bind(self, context: DraftContext, options: DraftModelOptions) -> BoundDrafter:
        """Open the smaller model and compare the vocabularies.

        Raises:
            ModelLoadError: it cannot be opened, or its vocabulary is another one.
        """
        if context.open_second is None:
            raise ModelLoadError("needs the smaller model as its 'source'")
        runner = context.open_second()
        own, other = context.runner.tokenizer, runner.tokenizer
        if own.vocab_size != other.vocab_size or list(own.token_bytes) != list(other.token_bytes):
            runner.close()
            raise ModelLoadError("the smaller model has another vocabulary than the model that it drafts for")
        return _DraftModel(runner, options)


@define(eq=False)
class _Session:
    """A sequence in the smaller model; ``token_ids`` are those that it holds."""

    handle: int
    token_ids: list[int] = field(factory=list)


@define(eq=False, kw_only=True)
class _Growing(GreedyDraft):
    """The draft of one sequence."""

    session: _Session


@define(eq=False)
class _DraftModel:
    runner: Runner
    settings: DraftModelOptions
    is_free: bool = False
    prior: float = 0.6

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> _Session | None:
        """A sequence in the smaller model; None when it has no room."""
        try:
            return _Session(self.runner.open_sequence())
        except CacheFull:
            return None

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """What the smaller model writes; none for those whose text it has not read to the end yet."""
        growing = [self._begin(task) for task in tasks]
        write_greedily([one for one in growing if one is not None], self._last_rows)
        return [one.finished() if one is not None else None for one in growing]

    def close(self, session: _Session) -> None:
        """Give the sequence back."""
        self.runner.free_sequence(session.handle)

    def shutdown(self) -> None:
        """Close the smaller model."""
        self.runner.close()

    def _begin(self, task: DraftTask) -> _Growing | None:
        """Bring a sequence up to date, all but its last tokens; None while that takes more than a chunk."""
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
            max_tokens=min(task.max_tokens, self.settings.max_tokens, room),
            min_probability=self.settings.min_probability,
        )

    def _last_rows(self, growing: Sequence[_Growing]) -> NDArray[np.float32] | None:
        return self._forward([(one.session, one.due) for one in growing], "last")

    def _forward(self, spans: Sequence[tuple[_Session, list[int]]], outputs: Any) -> NDArray[np.float32] | None:
        """Compute; None when the smaller model has no room, which costs only the drafts."""
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
