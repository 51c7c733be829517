"""Policies: a threshold for the confidence of a layer, or for how much it changed the state.

Source: two measures of CALM (Schuster et al., 2022, arXiv:2207.07061, section 3.5): the difference of the two
highest softmax probabilities, and the cosine of the states of two consecutive layers. Entropy is BranchyNet's
(Teerapittayanon et al., 2016, arXiv:1709.01686). Thresholds are constant: they do not fall with the position.

All values are computed on the arrays' device, by the functions of the array API standard (``array-api-compat``), and so
is the decision, which the runner reads when it needs it. Arrays outside the standard are read by numpy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj
from attrs import field, frozen
from attrs.validators import ge, gt, le, optional

from enginehouse.contract.errors import ModelLoadError
from enginehouse.contract.exit_policy import ExitContext, ExitView

__all__ = ["EntropyPolicy", "MarginPolicy", "SaturationPolicy", "Where", "entropy", "margin", "saturation"]

_Array = Any
"""Array of any library that follows the array API standard; float32."""

_LEAST = 1e-30  # lower bound of a divisor


@frozen(kw_only=True)
class Where:
    """Settings that all policies have.

    Attributes:
        min_layer: the first layer after which a token may exit; unset is half of the model's layers.
        every: evaluate the policy after every this many layers from there on. An evaluation of logits costs as much as
            several layers.
    """

    min_layer: int | None = field(default=None, validator=optional(ge(1)))
    every: int = field(default=4, validator=ge(1))

    def layers(self, context: ExitContext) -> tuple[int, ...]:
        """Return the layers after which to evaluate the policy.

        Raises:
            ModelLoadError: there are none.
        """
        first = self.min_layer if self.min_layer is not None else max(1, context.num_layers // 2)
        layers = tuple(layer for layer in range(first, context.num_layers, self.every) if layer in context.exit_layers)
        if not layers:
            reason = f"of {context.num_layers} layers, none from {first} on can be left"
            raise ModelLoadError(f"min_layer = {first}: {reason}")
        return layers


@frozen(kw_only=True)
class _MarginOptions(Where):
    """Settings of ``margin``.

    Attributes:
        threshold: exit when the best token is more probable than the second by at least this, 0 to 1.
    """

    threshold: float = field(default=0.9, validator=[ge(0.0), le(1.0)])


@frozen(kw_only=True)
class _EntropyOptions(Where):
    """Settings of ``entropy``.

    Attributes:
        threshold: exit when the entropy of the next token is at most this, in nats.
    """

    threshold: float = field(default=0.3, validator=ge(0.0))


@frozen(kw_only=True)
class _SaturationOptions(Where):
    """Settings of ``saturation``.

    Attributes:
        threshold: exit when the cosine of the states before and after a layer is at least this, up to 1.
    """

    threshold: float = field(default=0.98, validator=[gt(0.0), le(1.0)])


@frozen
class _Bound(ABC):
    """Implements :class:`enginehouse.contract.exit_policy.BoundExitPolicy`."""

    layers: tuple[int, ...]
    threshold: float

    @abstractmethod
    def leaves(self, view: ExitView) -> _Array:
        """(num_rows,) bool, True for tokens that exit."""


class _MarginBound(_Bound):
    def leaves(self, view: ExitView) -> _Array:
        return margin(_standard(view.logits())) >= self.threshold


class _EntropyBound(_Bound):
    def leaves(self, view: ExitView) -> _Array:
        return entropy(_standard(view.logits())) <= self.threshold


class _SaturationBound(_Bound):
    def leaves(self, view: ExitView) -> _Array:
        return saturation(_standard(view.hidden), _standard(view.previous_hidden)) >= self.threshold


class _Policy:
    """Base class of the three policies: binding selects layers."""

    api_version = 1
    options: type[Any]
    bound: type[_Bound]

    def bind(self, context: ExitContext, options: Any) -> _Bound:
        """See :class:`enginehouse.contract.exit_policy.ExitPolicy`."""
        return self.bound(options.layers(context), options.threshold)


class MarginPolicy(_Policy):
    """Exits when the best token is far ahead of the second one."""

    name = "margin"
    options = _MarginOptions
    bound = _MarginBound


class EntropyPolicy(_Policy):
    """Exits when few likely choices are left."""

    name = "entropy"
    options = _EntropyOptions
    bound = _EntropyBound


class SaturationPolicy(_Policy):
    """Exits when layers have stopped changing the state. Needs no logits, so evaluation is cheap."""

    name = "saturation"
    options = _SaturationOptions
    bound = _SaturationBound


def margin(logits: _Array) -> _Array:
    """Probability of the best token minus that of the second: (num_rows, vocab_size) to (num_rows,), 0 to 1."""
    xp = array_namespace(logits)
    best = xp.max(logits, axis=-1, keepdims=True)
    is_best = xp.arange(logits.shape[-1], device=device(logits)) == xp.argmax(logits, axis=-1, keepdims=True)
    second = xp.max(xp.where(is_best, -xp.inf, logits), axis=-1)
    total = xp.sum(xp.exp(logits - best), axis=-1)
    return (1.0 - xp.exp(second - best[:, 0])) / total


def entropy(logits: _Array) -> _Array:
    """Entropy of the softmax in nats: (num_rows, vocab_size) to (num_rows,), 0 to log(vocab_size)."""
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    weights = xp.exp(shifted)
    total = xp.sum(weights, axis=-1)
    expected = xp.sum(weights * xp.where(weights > 0, shifted, 0.0), axis=-1)  # logits may be -inf
    return xp.clip(xp.log(total) - expected / total, min=0.0)


def saturation(hidden: _Array, previous_hidden: _Array) -> _Array:
    """Cosine of the states after and before a layer: two of (num_rows, hidden_size) to (num_rows,), -1 to 1."""
    xp = array_namespace(hidden, previous_hidden)
    squares = xp.sum(hidden * hidden, axis=-1) * xp.sum(previous_hidden * previous_hidden, axis=-1)
    return xp.sum(hidden * previous_hidden, axis=-1) / xp.sqrt(xp.clip(squares, min=_LEAST))


def _standard(array: Any) -> _Array:
    """Return the array if it follows the standard, otherwise as numpy; MLX arrays claim to, but lack ``device``."""
    return array if is_array_api_obj(array) and hasattr(array, "device") else np.asarray(array)
