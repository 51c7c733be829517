"""A language model in numpy without weights: logits are a hash of the token ids.

Each token advances a 64-bit state, so one wrong, missing or swapped token anywhere before a position changes every
later row: caches that mix up sequences are detected. Under the noise, a prior makes the output resemble text: pieces
and letters are likely, characters are completed, ends are rare.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginehouse_testkit.fake_tokenizer import END_TOKENS, PIECES, FakeTokenizer

__all__ = ["FakeModel", "State"]

State = tuple[int, int]
"""State at a position: the hash of the tokens, and the number of bytes missing from the last character."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_FOLLOWING = range(0x98, 0xAA)  # continuation bytes that are valid after every first byte in _MISSING
_MISSING = {b"\xc3": 1, b"\xe2": 2, b"\xf0": 3, b"\xf0\x9f": 2, b" \xe2": 2}
_NOISE = 2.5  # in logits; the best token of a row has a probability of about a half


class FakeModel:
    """Maps token ids to logits. Holds no state of sequences.

    Args:
        tokenizer: its vocabulary.
        end_logit: added to the logits of end tokens; at the default a greedy answer has about 100 tokens.
    """

    def __init__(self, tokenizer: FakeTokenizer, end_logit: float = -2.5) -> None:
        self._ids = np.arange(1, tokenizer.vocab_size + 1, dtype=np.uint64) * np.uint64(_GAMMA)
        self._missing = [_MISSING.get(token, 0) for token in tokenizer.token_bytes]
        self._follows = [token in (bytes([value]) for value in range(0x80, 0xC0)) for token in tokenizer.token_bytes]
        self._between = _prior(tokenizer, end_logit)
        self._inside = np.full(tokenizer.vocab_size, -40.0, np.float32)
        self._inside[_FOLLOWING.start : _FOLLOWING.stop] = 0.0

    def start(self) -> State:
        """Return the state before any token."""
        return (0x5EED, 0)

    def advance(self, state: State, token_id: int, salt: int = 0) -> State:
        """Return the state after one more token; ``salt`` represents the weights of adapters, 0 for none."""
        mixed = ((state[0] ^ salt ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 31
        missing = 0
        if token_id >= 0:  # not of an image
            missing = max(state[1] - 1, 0) if self._follows[token_id] else self._missing[token_id]
        return ((mixed * 0x94D049BB133111EB) & _MASK) ^ (mixed >> 29), missing

    def window_state(self, token_ids: Sequence[int], length: int, salt: int = 0) -> State:
        """Return the state of a sliding-window model, which depends on the last tokens and the length only."""
        state = ((length * _GAMMA) & _MASK, 0)
        for token_id in token_ids:
            state = self.advance(state, token_id, salt)
        return state

    def logits(self, state: State) -> NDArray[np.float32]:
        """Return logits, (vocab_size,) float32: the prior plus noise determined by the state."""
        row: NDArray[np.float32] = self._noise(state[0]) + (self._inside if state[1] else self._between)
        return row

    def doubt(self, state: State) -> NDArray[np.float32]:
        """Return other noise, (vocab_size,) float32, for the output of fewer layers at the same state."""
        return self._noise(state[0] ^ _MASK)

    def _noise(self, number: int) -> NDArray[np.float32]:
        """Return Gumbel noise, generated from the number by splitmix64's finaliser."""
        mixed = self._ids + np.uint64(number)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        noise: NDArray[np.float32] = (-np.log(-np.log(uniform)) * _NOISE).astype(np.float32)
        return noise


def _prior(tokenizer: FakeTokenizer, end_logit: float) -> NDArray[np.float32]:
    """Return the logits between characters, (vocab_size,) float32."""
    prior = np.full(tokenizer.vocab_size, -40.0, np.float32)
    for token_id, token in enumerate(tokenizer.token_bytes[: 256 + len(PIECES)]):
        if token in _MISSING:
            prior[token_id] = -1.0
        elif len(token) > 1 and token != b"\x98\x80":
            prior[token_id] = 1.0
        elif token.isalpha() and token.islower():
            prior[token_id] = 0.0
        elif token in b" .,'\"-!?\n" or token.isdigit():
            prior[token_id] = -1.0
    for name in END_TOKENS:
        prior[tokenizer.special_tokens[name]] = end_logit
    return prior
