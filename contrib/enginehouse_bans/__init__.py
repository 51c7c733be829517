"""Logits processors: banned words, and a ban on repeated runs of tokens. Hooks only."""

from __future__ import annotations

from collections.abc import Callable

from enginehouse import hookimpl
from enginehouse.contract.logits_processor import LogitsProcessor
from enginehouse_bans.bad_words import BadWords
from enginehouse_bans.repeated_ngrams import RepeatedNgrams

__all__ = ["register_logits_processors"]


@hookimpl
def register_logits_processors(register: Callable[[LogitsProcessor], None]) -> None:
    """Register the processors; each is off until a request sets its field."""
    register(BadWords())
    register(RepeatedNgrams())
