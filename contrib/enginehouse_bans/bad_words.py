"""``bad_words``: strings that never occur in an answer, regardless of the tokens that spell them.

A token is banned if its bytes, together with the end of the answer so far, complete one of the strings. Prompts may
contain them. The field is vLLM's; there only the tokenizations found by its tokenizer are banned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from attrs.validators import deep_iterable, instance_of, max_len, min_len
from numpy.typing import NDArray

from enginehouse.contract.logits_processor import ProcessorSession
from enginehouse.contract.sampler import History

__all__ = ["BadWords", "BadWordsFields"]

_MAX_WORDS = 128
_MAX_CHARACTERS = 256


@frozen
class BadWordsFields:
    """Its request fields."""

    bad_words: tuple[str, ...] = field(
        default=(),
        validator=[
            max_len(_MAX_WORDS),
            deep_iterable([instance_of(str), min_len(1), max_len(_MAX_CHARACTERS)]),
        ],
        metadata={"description": "strings that the answer must not hold; the prompt may"},
    )


@define(eq=False)
class BadWords:
    """The processor; caches the token order of the last vocabulary."""

    name: str = "bad_words"
    api_version: int = 1
    request_fields: type[BadWordsFields] = BadWordsFields
    _vocabulary: _Vocabulary | None = None

    def create(self, fields: BadWordsFields) -> ProcessorSession | None:
        """Return a session if there are words."""
        if not fields.bad_words:
            return None
        return _Session(self, [word.encode("utf-8", "replace") for word in fields.bad_words])

    def vocabulary(self, token_bytes: Sequence[bytes]) -> _Vocabulary:
        """Return the sorted vocabulary of these tokens."""
        if self._vocabulary is None or self._vocabulary.token_bytes is not token_bytes:
            self._vocabulary = _Vocabulary(token_bytes)
        return self._vocabulary


class _Vocabulary:
    """Tokens sorted by their bytes."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        self._order = sorted(range(len(token_bytes)), key=token_bytes.__getitem__)
        self._sorted = [token_bytes[token_id] for token_id in self._order]
        self._ids = np.array(self._order, np.int64)

    def starting_with(self, start: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that begin with ``start``."""
        first = bisect_left(self._sorted, start)
        last = bisect_left(self._sorted, _behind(start), lo=first) if _behind(start) else len(self._sorted)
        return self._ids[first:last]

    def holding(self, word: bytes) -> NDArray[np.int64]:
        """Ids of the tokens that contain all of ``word``."""
        return np.array([i for i, token in enumerate(self.token_bytes) if word in token], np.int64)


@define(eq=False)
class _Session:
    """One sequence: the tokens that are always banned, and those banned after a part of a word."""

    plugin: BadWords
    words: list[bytes]
    _always: NDArray[np.int64] | None = None

    def process(self, logits: NDArray[np.float32], history: History) -> None:
        """Ban the tokens that would complete a word."""
        vocabulary = self.plugin.vocabulary(history.token_bytes)
        if self._always is None:
            self._always = np.unique(np.concatenate([vocabulary.holding(word) for word in self.words]))
        logits[self._always] = -np.inf
        end = self._end_of_answer(history)
        for word in self.words:
            for length in range(1, min(len(word) - 1, len(end)) + 1):
                if end.endswith(word[:length]):
                    logits[vocabulary.starting_with(word[length:])] = -np.inf

    def _end_of_answer(self, history: History) -> bytes:
        """Return as many bytes from the end of the answer as the longest word has."""
        wanted, end = max(map(len, self.words)) - 1, b""
        place = len(history.token_ids)
        while place > history.num_prompt_tokens and len(end) < wanted:
            place -= 1
            end = history.token_bytes[int(history.token_ids[place])] + end
        return end


def _behind(start: bytes) -> bytes:
    """Return the smallest bytes larger than everything that begins with ``start``; empty if there are none."""
    kept = start.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b""
