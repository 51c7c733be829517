"""Random text that a matcher allows, without a model: what one may write, some model will write."""

from __future__ import annotations

import random

import numpy as np

from enginehouse.contract.backend import Tokenizer
from enginehouse.contract.structured import Grammar, Matcher

__all__ = ["allowed_ids", "walk"]


def allowed_ids(matcher: Matcher, tokenizer: Tokenizer) -> list[int]:
    """The tokens that the matcher's mask allows."""
    bitmask = np.full((tokenizer.vocab_size + 31) // 32, -1, np.int32)
    matcher.fill_bitmask(bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    assert not bits[tokenizer.vocab_size :].any()
    return np.flatnonzero(bits).tolist()


def walk(grammar: Grammar, tokenizer: Tokenizer, chance: random.Random, max_tokens: int = 250) -> str | None:
    """A text that is finished, or None when ``max_tokens`` were not enough.

    Every walk has a temper of its own: how much it likes to close, to end and to go on.
    """
    matcher, token_ids = grammar.start(), []
    likes_closing, likes_end = chance.choice((0.1, 0.3, 0.6)), chance.choice((0.05, 0.3, 0.9))
    while len(token_ids) < max_tokens and not matcher.is_finished():
        ids = allowed_ids(matcher, tokenizer)
        forced = list(matcher.forced_token_ids())
        assert ids and (not forced or forced[0] in ids)
        others = [token_id for token_id in ids if token_id not in tokenizer.end_token_ids]
        can_end = len(others) < len(ids)
        if not others or (can_end and chance.random() < likes_end):
            break
        closing = [token_id for token_id in others if tokenizer.token_bytes[token_id][:1] in b'"}]']
        pool = closing if closing and chance.random() < likes_closing else others
        token_ids.append(chance.choice(pool))
        matcher.accept(token_ids[-1])
    else:
        if not matcher.is_finished():
            return None
    return b"".join(tokenizer.token_bytes[token_id] for token_id in token_ids).decode("utf-8")
