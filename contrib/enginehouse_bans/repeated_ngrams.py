"""``no_repeat_ngram_size``: no run of this many tokens occurs twice in a text, prompt included.

The field and its meaning are those of transformers.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen
from attrs.validators import ge, le
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from enginehouse.contract.logits_processor import ProcessorSession
from enginehouse.contract.sampler import History

__all__ = ["RepeatedNgrams", "RepeatedNgramsFields"]

_LONGEST = 1024


@frozen
class RepeatedNgramsFields:
    """Its request fields."""

    no_repeat_ngram_size: int = field(
        default=0,
        validator=[ge(0), le(_LONGEST)],
        metadata={"description": "no run of this many tokens may occur twice in prompt and answer; 0 is off"},
    )


@define(eq=False)
class RepeatedNgrams:
    """The processor."""

    name: str = "no_repeat_ngram"
    api_version: int = 1
    request_fields: type[RepeatedNgramsFields] = RepeatedNgramsFields

    def create(self, fields: RepeatedNgramsFields) -> ProcessorSession | None:
        """Return a session if a size is set."""
        return _Session(fields.no_repeat_ngram_size) if fields.no_repeat_ngram_size else None


@frozen(eq=False)
class _Session:
    size: int

    def process(self, logits: NDArray[np.float32], history: History) -> None:
        """Ban the tokens that followed earlier occurrences of the last ``size - 1`` tokens."""
        text = history.token_ids
        if len(text) < self.size:
            return
        if self.size == 1:
            logits[text] = -np.inf
            return
        end = text[len(text) - self.size + 1 :]
        runs = sliding_window_view(text, self.size)
        logits[runs[(runs[:, :-1] == end).all(axis=1), -1]] = -np.inf
