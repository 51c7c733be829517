"""The contract of sampler plugins: steps on the way from logits to a token, with request fields of their own.

Core draws a token step by step: the logit bias, then the steps by their ``order``, then the draw. Its own steps
stand at the places in :data:`CORE_ORDER`, a plugin's at any other, for example typical-p at 20. A request may list
the steps in another order (``samplers``), by these names. The mask of a constraint always comes before the first
step that is no penalty.

A step sees tokens and numbers only, never a runner, so it works on every backend. It must give the same result
for the same arguments: a token can be drawn again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

__all__ = [
    "CORE_ORDER",
    "Candidates",
    "FollowingStep",
    "History",
    "PenaltyStep",
    "SamplerPlugin",
    "SamplerRole",
    "SamplerStep",
    "TemperatureStep",
    "TokenPenalties",
    "TruncationStep",
    "role_of",
]

CORE_ORDER: Mapping[str, int] = MappingProxyType(
    {"penalties": -20, "temperature": 0, "top_k": 10, "top_p": 30, "min_p": 40}
)
"""Core's own steps and their places."""

SamplerRole = Literal["penalty", "temperature", "truncation", "replacement", "processor"]
"""What a plugin's step does: lowers some logits, sets the temperature (at the place of core's), or keeps some
candidates; a replacement does that instead of every other truncation, core's included. Processors are what
:mod:`enginehouse.contract.logits_processor` makes of a logits processor; samplers are none."""


@frozen(eq=False)
class Candidates:
    """The tokens still in play at one position.

    Attributes:
        token_ids: (num_candidates,) int32.
        logits: (num_candidates,) float32 after temperature, descending; ties by ascending id.
        row: (vocab_size,) float32, the whole row after bias, penalties and mask, before temperature.
            Not to be changed.
        temperature: what ``logits`` was divided by; 1.0 where the temperature comes later.
        uniform: ``uniform(purpose)`` is a number in [0, 1) that depends only on the request's seed, the
            choice, the position and ``purpose`` (a short string), so that answers can be replayed.
    """

    token_ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    row: NDArray[np.float32]
    temperature: float
    uniform: Callable[[str], float]


@frozen(eq=False)
class History:
    """What a sequence holds already.

    Attributes:
        token_ids: (num_tokens,) int32, prompt and answer so far; not to be changed.
        token_bytes: ``vocab_size`` entries, the bytes of each id, always the same object for one model.
        num_prompt_tokens: how many of ``token_ids``, from the first on, are the prompt.
    """

    token_ids: NDArray[np.int32]
    token_bytes: Sequence[bytes]
    num_prompt_tokens: int = 0


@frozen(eq=False)
class TokenPenalties:
    """What is subtracted from the logits of some tokens.

    Attributes:
        token_ids: (num_penalties,) integers, each id at most once.
        amounts: (num_penalties,) finite floats.
    """

    token_ids: NDArray[np.int64]
    amounts: NDArray[np.float32]


@runtime_checkable
class TruncationStep(Protocol):
    """One sequence's truncation; called at most once per position."""

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """(num_candidates,) bool, True where a token survives; at least one must."""
        ...


@runtime_checkable
class PenaltyStep(Protocol):
    """One sequence's penalties."""

    def penalties(self, history: History) -> TokenPenalties | None:
        """What the next token is penalised with; None is nothing."""
        ...


@runtime_checkable
class TemperatureStep(Protocol):
    """One sequence's temperature. Not asked when the request's temperature is 0, which is greedy."""

    def temperature(self, logits: NDArray[np.float32], temperature: float) -> float:
        """What to divide the logits by, at least 0.

        Args:
            logits: (num_candidates,) float32 of the tokens in play, before temperature, in no particular order.
                Not to be changed.
            temperature: the request's.
        """
        ...


@runtime_checkable
class FollowingStep(Protocol):
    """A step that depends on what was drawn before. Any step may also be one."""

    def accept(self, token_id: int, probability: float | None) -> None:
        """The sequence grew.

        Args:
            token_id: the new token.
            probability: with which it was drawn among the tokens that all steps left; None when it was not
                drawn by chance (greedy, or forced by a constraint).
        """
        ...


SamplerStep = TruncationStep | PenaltyStep | TemperatureStep
"""What a sampler makes for one sequence."""


@runtime_checkable
class SamplerPlugin(Protocol):
    """What ``register_samplers`` hands over.

    It may have two further attributes. ``role`` (:data:`SamplerRole`) says what its steps do, and without it they
    truncate. ``aliases`` are further names of the step in the request field ``samplers``.

    Attributes:
        name: unique; the name of the step, and the key of its fields in ``SamplingParams.extensions``.
        request_fields: attrs class; each attribute is a top-level request field whose default means "off".
            Ranges are attrs validators; metadata ``description`` goes to the API document.
        order: place among the steps.
    """

    name: str
    api_version: int
    request_fields: type[Any]
    order: int

    def create(self, fields: Any) -> SamplerStep | None:
        """The step for one sequence, or None when ``fields`` (an instance of ``request_fields``) is off."""
        ...


def role_of(plugin: SamplerPlugin) -> SamplerRole:
    """What the steps of a plugin do."""
    role: SamplerRole = getattr(plugin, "role", "truncation")
    return role
