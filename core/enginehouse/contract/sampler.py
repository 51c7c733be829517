"""The contract of sampler plugins: sampling steps from logits to a token, with their own request fields.

Core samples a token step by step: the logit bias, then the steps by their ``order``, then the draw. Its own steps have
the positions in :data:`CORE_ORDER`, a plugin's step has any other, for example typical-p 20. A request may list the
steps in another order (``samplers``), by these names. The mask of a constraint always comes before the first step that
is not a penalty.

A step sees only tokens and numbers, never a runner, so it works on every backend. It must be deterministic for the same
arguments: a token can be drawn again.
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
    "WeightsStep",
    "role_of",
]

CORE_ORDER: Mapping[str, int] = MappingProxyType(
    {"penalties": -20, "temperature": 0, "top_k": 10, "top_p": 30, "min_p": 40}
)
"""Core's own steps and their positions."""

SamplerRole = Literal["penalty", "temperature", "truncation", "replacement", "weights", "processor"]
"""Kind of a plugin's step.

``penalty`` lowers some logits, ``temperature`` sets the temperature (at the position of core's step), ``truncation``
keeps some candidates; ``replacement`` is a truncation that replaces all others, core's included; ``weights`` sets the
weights of the draw, after every other step, in any order that a request lists. ``processor`` is the role of logits
processors (:mod:`enginehouse.contract.logits_processor`), not of samplers."""


@frozen(eq=False)
class Candidates:
    """The remaining candidate tokens at one position.

    Attributes:
        token_ids: (num_candidates,) int32.
        logits: (num_candidates,) float32 after temperature, descending; ties by ascending id.
        row: (vocab_size,) float32, the whole row after bias, penalties and mask, before temperature. Read-only.
        temperature: divisor that was applied to ``logits``; 1.0 if the temperature step comes later.
        uniform: ``uniform(purpose)`` is a number in [0, 1) that depends only on the request's seed, the choice, the
            position and ``purpose`` (a short string), so that answers can be replayed.
    """

    token_ids: NDArray[np.int32]
    logits: NDArray[np.float32]
    row: NDArray[np.float32]
    temperature: float
    uniform: Callable[[str], float]


@frozen(eq=False)
class History:
    """Tokens of a sequence so far.

    Attributes:
        token_ids: (num_tokens,) int32, prompt and answer; read-only.
        token_bytes: ``vocab_size`` entries, the bytes of each id, always the same object for one model.
        num_prompt_tokens: number of leading ``token_ids`` that are the prompt.
    """

    token_ids: NDArray[np.int32]
    token_bytes: Sequence[bytes]
    num_prompt_tokens: int = 0


@frozen(eq=False)
class TokenPenalties:
    """Values that are subtracted from the logits of some tokens.

    Attributes:
        token_ids: (num_penalties,) integers, each id at most once.
        amounts: (num_penalties,) finite floats.
    """

    token_ids: NDArray[np.int64]
    amounts: NDArray[np.float32]


@runtime_checkable
class TruncationStep(Protocol):
    """Truncation of one sequence; called at most once per position.

    Calls:
        __call__: for each token; worker, engine thread; microseconds, as all sequences wait.
    """

    def __call__(self, candidates: Candidates) -> NDArray[np.bool_]:
        """Return (num_candidates,) bool, True for tokens to keep; at least one must be True."""
        ...


@runtime_checkable
class PenaltyStep(Protocol):
    """Penalties of one sequence.

    Calls:
        penalties: for each token; worker, engine thread; microseconds, as all sequences wait.
    """

    def penalties(self, history: History) -> TokenPenalties | None:
        """Return the penalties for the next token; None for no penalty."""
        ...


@runtime_checkable
class TemperatureStep(Protocol):
    """Temperature of one sequence. Not called if the request's temperature is 0, which is greedy.

    Calls:
        temperature: for each token; worker, engine thread; microseconds, as all sequences wait.
    """

    def temperature(self, logits: NDArray[np.float32], temperature: float) -> float:
        """Return the divisor of the logits, at least 0.

        Args:
            logits: (num_candidates,) float32 of the candidate tokens, before temperature, in no particular order.
                Read-only.
            temperature: the request's.
        """
        ...


@runtime_checkable
class WeightsStep(Protocol):
    """Probabilities of one sequence's draw; called at most once per position, and not if the request is greedy.

    Calls:
        weights: for each token; worker, engine thread; microseconds, as all sequences wait.
    """

    def weights(self, candidates: Candidates) -> NDArray[np.float64]:
        """Return (num_candidates,) float64: finite, not negative, not all 0; proportional to the probabilities."""
        ...


@runtime_checkable
class FollowingStep(Protocol):
    """A step that depends on previously drawn tokens. Any step may implement it as well.

    Calls:
        accept: for each token; worker, engine thread; microseconds.
    """

    def accept(self, token_id: int, probability: float | None) -> None:
        """Record a token that was appended to the sequence.

        Args:
            token_id: the new token.
            probability: its probability among the tokens that all steps kept, before a step of the role ``weights``;
                None if it was not sampled (greedy, or forced by a constraint).
        """
        ...


SamplerStep = TruncationStep | PenaltyStep | TemperatureStep | WeightsStep
"""A step that a sampler creates for one sequence."""


@runtime_checkable
class SamplerPlugin(Protocol):
    """A sampler for ``register_samplers``.

    It may have two optional attributes. ``role`` (:data:`SamplerRole`) is the kind of its steps, by default truncation.
    ``aliases`` are further names of the step in the request field ``samplers``.

    Attributes:
        name: unique; the name of the step, and the key of its fields in ``SamplingParams.extensions``.
        request_fields: attrs class; each attribute is a top-level request field whose default means "off". Ranges are
            attrs validators; metadata ``description`` goes to the API document.
        order: position among the steps.

    Calls:
        create: for each request that sets a field, to check it: worker, intake thread; then for each choice:
            worker, engine thread; microseconds.
    """

    name: str
    api_version: int
    request_fields: type[Any]
    order: int

    def create(self, fields: Any) -> SamplerStep | None:
        """Create the step for one sequence, or None if ``fields`` (an instance of ``request_fields``) is off."""
        ...


def role_of(plugin: SamplerPlugin) -> SamplerRole:
    """Return the role of a plugin's steps."""
    role: SamplerRole = getattr(plugin, "role", "truncation")
    return role
