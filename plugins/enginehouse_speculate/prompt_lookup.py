"""Prompt lookup: a text that begins to repeat an earlier part is drafted to continue like it.

Effective if answers quote their prompts: edits of code, extraction, summaries, chats about one document. Source:
Saxena, "Prompt Lookup Decoding" (2023, https://github.com/apoorvumang/prompt-lookup-decoding).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from attrs.validators import ge
from numpy.typing import NDArray

from enginehouse.contract.drafter import BoundDrafter, Draft, DraftContext, DraftTask
from enginehouse_speculate.suffix_index import SuffixIndex, grade_of

__all__ = ["PromptLookupDrafter", "PromptLookupOptions"]


@frozen(kw_only=True)
class PromptLookupOptions:
    """Settings of the drafter ``prompt-lookup``.

    Attributes:
        min_match: minimum number of tokens that must occur earlier in the text.
    """

    min_match: int = field(default=2, validator=ge(1))


@define(eq=False)
class PromptLookupDrafter:
    """The registered drafter."""

    name: str = "prompt-lookup"
    api_version: int = 1
    options: type[PromptLookupOptions] = PromptLookupOptions

    def bind(self, _: DraftContext, options: PromptLookupOptions) -> BoundDrafter:
        """Return the drafter, which does not depend on the model."""
        return _PromptLookup(options.min_match)


@define(eq=False)
class _PromptLookup:
    min_match: int
    is_free: bool = True
    prior: float = 0.25  # most texts do not repeat themselves; those that do are soon detected

    def open(self, _: NDArray[np.int32], __: Sequence[int]) -> SuffixIndex:
        """Return an empty index: the first task adds the prompt."""
        return SuffixIndex(self.min_match)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft | None]:
        """Draft the tokens that followed the same tokens earlier."""
        return [self._propose(task) for task in tasks]

    def _propose(self, task: DraftTask) -> Draft | None:
        index: SuffixIndex = task.session
        index.extend(task.token_ids[len(index.token_ids) :].tolist())
        match = index.find(index.token_ids)
        if match is None:
            return None
        return Draft(index.after(match.place, task.max_tokens), grade_of(match.length))

    def close(self, _: SuffixIndex) -> None:
        """Nothing to release."""

    def shutdown(self) -> None:
        """Nothing to release."""
