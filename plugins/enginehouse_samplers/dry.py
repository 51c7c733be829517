"""DRY, "don't repeat yourself": penalises tokens that would continue a repetition of earlier text.

Source: p-e-w's pull request 5677 to text-generation-webui (2024), with the names of llama.cpp and koboldcpp. If the
last ``length`` tokens of the text also occur earlier in it, the logit of the token that followed there is reduced by
``dry_multiplier * dry_base ** (length - dry_allowed_length)``, once ``length`` reaches ``dry_allowed_length``; of
several such occurrences the longest one counts. Repetitions are not followed across a sequence breaker, and a token
whose text contains one is never penalised.

As in the original, lengths above 50 tokens have no further effect (here: 50 above the allowed length); by then the
penalty practically forbids the token. Breakers are searched in the text of the tokens, so one that spans several
tokens is found with any vocabulary; the original supports only single tokens. Prompt and answer count alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

from enginehouse.contract.sampler import History, TokenPenalties
from enginehouse_samplers.breakers import BreakerCache

__all__ = ["DryFields", "DrySampler", "DryStep"]

_MOST_BEYOND_ALLOWED = 50
_LARGEST = 1e30  # largest value that float32 can subtract; it forbids a token
_MAX_BREAKERS, _MAX_BREAKER_CHARS = 32, 100


def _check_breakers(_: Any, attribute: Any, value: tuple[str, ...]) -> None:
    if len(value) > _MAX_BREAKERS:
        raise ValueError(f"'{attribute.name}' must hold at most {_MAX_BREAKERS} strings, not {len(value)}")
    if not all(0 < len(text) <= _MAX_BREAKER_CHARS for text in value):
        raise ValueError(f"'{attribute.name}' must hold strings of 1 to {_MAX_BREAKER_CHARS} characters")


@frozen
class DryFields:
    """Request fields of DRY."""

    dry_multiplier: float = field(
        default=0.0,
        validator=[validators.ge(0.0), validators.le(100.0)],
        metadata={"description": "Strength of the penalty on tokens that would continue a repetition (DRY). 0 is off."},
    )
    dry_base: float = field(
        default=1.75,
        validator=[validators.ge(1.0), validators.le(10.0)],
        metadata={"description": "By how much the DRY penalty grows with each repeated token."},
    )
    dry_allowed_length: int = field(
        default=2,
        validator=[validators.ge(0), validators.le(100)],
        metadata={"description": "Tokens from which on a repetition is penalised by DRY."},
    )
    dry_penalty_last_n: int = field(
        default=-1,
        validator=[validators.ge(-1), validators.le(2**31 - 1)],
        metadata={"description": "Tokens at the end of the text in which DRY looks for repetitions. -1 is all of it."},
    )
    dry_sequence_breakers: tuple[str, ...] = field(
        default=("\n", ":", '"', "*"),
        validator=_check_breakers,
        metadata={"description": "Strings at which DRY ends a repetition."},
    )


@frozen(eq=False)
class DryStep:
    """Penalises tokens that would continue a repetition."""

    fields: DryFields
    breakers: BreakerCache

    def penalties(self, history: History) -> TokenPenalties | None:
        """See :class:`enginehouse.contract.sampler.PenaltyStep`."""
        fields = self.fields
        breakers = self.breakers.of(history.token_bytes, fields.dry_sequence_breakers)
        last_n = fields.dry_penalty_last_n
        token_ids = history.token_ids if last_n < 0 else history.token_ids[-last_n:]
        most = breakers.distance(token_ids, fields.dry_allowed_length + _MOST_BEYOND_ALLOWED)
        if most < max(1, fields.dry_allowed_length):
            return None
        followers, lengths = _longest_repetitions(token_ids, most)
        counted = (lengths >= fields.dry_allowed_length) & ~breakers.holds_one[followers]
        exponents = (lengths[counted] - fields.dry_allowed_length).astype(np.float64)
        amounts = np.minimum(fields.dry_multiplier * fields.dry_base**exponents, _LARGEST)
        return TokenPenalties(followers[counted], amounts.astype(np.float32))


def _longest_repetitions(token_ids: NDArray[np.int32], most: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Find the tokens after earlier occurrences of the end of ``token_ids``, with the length of the longest occurrence.

    Returns:
        (num_followers,) int64 ids, each once, and (num_followers,) int64 lengths, from 1 to ``most``.
    """
    last = token_ids.size - 1
    places = np.flatnonzero(token_ids[:-1] == token_ids[-1]) if last > 0 else np.empty(0, np.int64)
    found, lengths = places, np.ones(places.size, np.int64)
    alive = np.arange(places.size)
    for length in range(1, most):
        can_grow = places >= length
        places, alive = places[can_grow], alive[can_grow]
        same = token_ids[places - length] == token_ids[last - length]
        places, alive = places[same], alive[same]
        if not places.size:
            break
        lengths[alive] = length + 1
    followers, which = np.unique(token_ids[found + 1], return_inverse=True)
    longest = np.zeros(followers.size, np.int64)
    np.maximum.at(longest, which, lengths)
    return followers.astype(np.int64), longest


class DrySampler:
    """DRY as a sampler plugin. One per process: it caches its data about vocabularies."""

    name = "dry"
    api_version = 1
    request_fields = DryFields
    order = -10
    role = "penalty"

    def __init__(self) -> None:
        self._breakers = BreakerCache()

    def create(self, fields: DryFields) -> DryStep | None:
        """See :class:`enginehouse.contract.sampler.SamplerPlugin`."""
        if not fields.dry_multiplier or not fields.dry_penalty_last_n:
            return None
        return DryStep(fields, self._breakers)
