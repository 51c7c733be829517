"""The policies: a threshold on how sure a layer is, or on how little it still changed.

Source: two measures of CALM (Schuster et al., 2022, arXiv:2207.07061, section 3.5): the difference of the two
highest softmax probabilities, and the cosine of the states of two consecutive layers. Entropy is BranchyNet's
(Teerapittayanon et al., 2016, arXiv:1709.01686). Thresholds are constant: they do not fall with the position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from attrs import field, frozen
from attrs.validators import ge, gt, le, optional
from numpy.typing import NDArray

from enginehouse.early_exit import ExitContext, ExitView
from enginehouse.errors import ModelLoadError

__all__ = ["EntropyPolicy", "MarginPolicy", "SaturationPolicy", "Where", "entropy", "margin", "saturation"]

_Rows = NDArray[np.float32]


@frozen(kw_only=True)
class Where:
    """Settings that all policies have.

    Attributes:
        min_layer: the first layer that a token may leave behind; unset is half of the model's.
        every: ask behind every so many layers from there on. A question about logits costs as much as several layers.
    """

    min_layer: int | None = field(default=None, validator=optional(ge(1)))
    every: int = field(default=4, validator=ge(1))

    def layers(self, context: ExitContext) -> tuple[int, ...]:
        """The layers behind which to ask.

        Raises:
            ModelLoadError: there is none.
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
        threshold: leave when the best token is more probable than the second by at least this, 0 to 1.
    """

    threshold: float = field(default=0.9, validator=[ge(0.0), le(1.0)])


@frozen(kw_only=True)
class _EntropyOptions(Where):
    """Settings of ``entropy``.

    Attributes:
        threshold: leave when the entropy of the next token is at most so many nats.
    """

    threshold: float = field(default=0.3, validator=ge(0.0))


@frozen(kw_only=True)
class _SaturationOptions(Where):
    """Settings of ``saturation``.

    Attributes:
        threshold: leave when the states before and behind a layer have at least this cosine, up to 1.
    """

    threshold: float = field(default=0.98, validator=[gt(0.0), le(1.0)])


@frozen
class _Bound(ABC):
    """A policy at work; see :class:`enginehouse.early_exit.BoundExitPolicy`."""

    layers: tuple[int, ...]
    threshold: float

    @abstractmethod
    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        """(num_rows,) bool."""


class _MarginBound(_Bound):
    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        return margin(np.asarray(view.logits())) >= self.threshold


class _EntropyBound(_Bound):
    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        return entropy(np.asarray(view.logits())) <= self.threshold


class _SaturationBound(_Bound):
    def leaves(self, view: ExitView) -> NDArray[np.bool_]:
        return saturation(np.asarray(view.hidden), np.asarray(view.previous_hidden)) >= self.threshold


class _Policy:
    """What the three share: binding is choosing layers."""

    api_version = 1
    options: type[Any]
    bound: type[_Bound]

    def bind(self, context: ExitContext, options: Any) -> _Bound:
        """See :class:`enginehouse.early_exit.ExitPolicy`."""
        return self.bound(options.layers(context), options.threshold)


class MarginPolicy(_Policy):
    """Leaves when the best token is far ahead of the second one."""

    name = "margin"
    options = _MarginOptions
    bound = _MarginBound


class EntropyPolicy(_Policy):
    """Leaves when there is little left to choose from."""

    name = "entropy"
    options = _EntropyOptions
    bound = _EntropyBound


class SaturationPolicy(_Policy):
    """Leaves when layers have stopped changing the state. Needs no logits, so that asking is cheap."""

    name = "saturation"
    options = _SaturationOptions
    bound = _SaturationBound


def margin(logits: _Rows) -> _Rows:
    """Probability of the best token less that of the second: (num_rows, vocab_size) to (num_rows,), 0 to 1."""
    top = np.partition(logits, -2, axis=-1)[:, -2:]
    total = np.exp(logits - top[:, 1:]).sum(axis=-1)
    result: _Rows = (1.0 - np.exp(top[:, 0] - top[:, 1])) / total
    return result


def entropy(logits: _Rows) -> _Rows:
    """Entropy of the softmax in nats: (num_rows, vocab_size) to (num_rows,), 0 to log(vocab_size)."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = np.exp(shifted)
    total = weights.sum(axis=-1)
    expected = (weights * np.where(weights > 0, shifted, 0.0)).sum(axis=-1)  # a logit may be -inf
    result: _Rows = np.maximum(np.log(total) - expected / total, 0.0)
    return result


def saturation(hidden: _Rows, previous_hidden: _Rows) -> _Rows:
    """Cosine of the states behind and before a layer: two of (num_rows, hidden_size) to (num_rows,), -1 to 1."""
    lengths = np.linalg.norm(hidden, axis=-1) * np.linalg.norm(previous_hidden, axis=-1)
    result: _Rows = (hidden * previous_hidden).sum(axis=-1) / np.maximum(lengths, np.finfo(np.float32).tiny)
    return result
