"""Where a sequence's reasoning ends, and its budget.

Reasoning is the text between an opening and a closing marker (``<think>`` and ``</think>`` in most
templates). The engine must know its end because constraints start there, and because a budget closes it by
force. Splitting the text into reasoning and answer for the client happens elsewhere, on the same markers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from enginehouse.contract.types import ReasoningParams
from enginehouse.engine.text.detokenizer import Detokenizer

__all__ = ["ReasoningGate"]


class ReasoningGate:
    """Follows the text of one sequence up to the end of its reasoning.

    Args:
        params: markers and budget.
        closing_token_ids: the closing marker as tokens, for closing by force.
        detokenizer: this sequence's own; shows the markers even where they are control tokens.

    Attributes:
        num_tokens: tokens of reasoning so far, markers not counted.
    """

    def __init__(self, params: ReasoningParams, closing_token_ids: tuple[int, ...], detokenizer: Detokenizer) -> None:
        self._params = params
        self._budget = params.budget
        self._detokenizer = detokenizer
        self._closing_token_ids = closing_token_ids
        self._phase: Literal["opening", "inside", "after"] = "inside" if params.is_open else "opening"
        self._tail = ""  # text that may belong to a marker
        self._num_closing = 0  # tokens of the closing marker taken by force
        self.num_tokens = 0

    @property
    def is_over(self) -> bool:
        """Whether the answer proper has begun."""
        return self._phase == "after"

    @property
    def is_inside(self) -> bool:
        """Whether the next token is reasoning, or part of its end."""
        return self._phase == "inside"

    def accept(self, token_id: int, is_forced: bool = False) -> None:
        """The sequence grew by one token; ``is_forced``: as part of a closing by force, so it is no reasoning."""
        text = self._detokenizer.push(token_id)
        self._num_closing += is_forced
        if self._phase == "opening":
            self._open(text)
        elif self._phase == "inside":
            self._tail += text
            if self._params.end in self._tail:
                self._phase = "after"
            else:
                self._tail = self._tail[-len(self._params.end) + 1 :] if len(self._params.end) > 1 else ""
                self.num_tokens += not is_forced

    def _open(self, text: str) -> None:
        self._tail = (self._tail + text).lstrip()
        start = self._params.start
        if self._tail.startswith(start):
            self._phase, self._tail = "inside", self._tail[len(start) :]
        elif not start.startswith(self._tail):
            self._phase = "after"  # an answer without reasoning

    def forced_token_ids(self) -> tuple[int, ...]:
        """What is left of the closing marker when the budget is used up, else nothing."""
        if self._phase != "inside" or self._budget is None or self.num_tokens < self._budget:
            return ()
        return self._closing_token_ids[self._num_closing :]

    def is_closed_by(self, token_ids: Sequence[int]) -> bool:
        """Whether the next tokens close the reasoning: the closing marker, or as much of it as there are."""
        closing = self._closing_token_ids[: len(token_ids)]
        return self._phase == "inside" and bool(closing) and tuple(token_ids[: len(closing)]) == closing

    def close_now(self) -> bool:
        """Use the budget up at once; False when no reasoning is open, or it is being closed already."""
        if self._phase != "inside" or self.forced_token_ids():
            return False
        self._budget = 0
        return True
