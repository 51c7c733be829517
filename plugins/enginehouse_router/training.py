"""Fits weights and thresholds of ``difficulty`` to prompts labelled with models.

Logistic regression on the features, regularised towards the built-in weights, so that a handful of prompts changes
little. Does not know files or the terminal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from enginehouse_router.features import WEIGHTS, Reading, difficulty, features_of

__all__ = ["Fitted", "Labelled", "accuracy", "cross_validated", "fit"]

_PULL = 1.0
"""Strength of the regularisation towards the built-in weights, in prompts."""
_NUM_STEPS = 50
_MAX_STEP = 2.0
_MAX_CUTS = 40


@frozen
class Labelled:
    """A prompt, and the rank of the model that should answer it."""

    reading: Reading
    rank: int


@frozen
class Fitted:
    """Fitted weights and thresholds."""

    weights: dict[str, float]
    thresholds: tuple[float, ...]


def fit(examples: Sequence[Labelled], num_models: int) -> Fitted:
    """Fit weights that score harder prompts higher, and the thresholds that agree with the most labels."""
    names = list(WEIGHTS)
    rows = [features_of(example.reading) for example in examples]
    inputs = np.array([[row[name] for name in names] for row in rows], dtype=np.float64).reshape(-1, len(names))
    targets = np.array([example.rank / max(1, num_models - 1) for example in examples], dtype=np.float64)
    prior = np.array([WEIGHTS[name] for name in names])
    weights = dict(zip(names, map(float, _regress(inputs, targets, prior)), strict=True))
    scores = [difficulty(row, weights) for row in rows]
    return Fitted(weights, _thresholds(scores, [example.rank for example in examples], num_models))


def accuracy(examples: Sequence[Labelled], fitted: Fitted) -> float:
    """Share of the examples that are routed to the labelled model."""
    scores = [difficulty(features_of(example.reading), fitted.weights) for example in examples]
    hits = (
        sum(score >= cut for cut in fitted.thresholds) == one.rank for score, one in zip(scores, examples, strict=True)
    )
    return sum(hits) / max(1, len(examples))


def cross_validated(examples: Sequence[Labelled], num_models: int, num_folds: int = 5) -> float:
    """Cross-validated accuracy: each fold is judged by a fit to the others."""
    folds = [examples[number::num_folds] for number in range(num_folds)]
    hits = 0.0
    for number, held_out in enumerate(folds):
        others = [example for other, fold in enumerate(folds) if other != number for example in fold]
        hits += accuracy(held_out, fit(others, num_models)) * len(held_out)
    return hits / max(1, len(examples))


def _regress(
    inputs: NDArray[np.float64], targets: NDArray[np.float64], prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Minimise the log-loss plus the squared distance from ``prior`` by Newton's method.

    Args:
        inputs: (num_examples, num_features)
        targets: (num_examples,), 0 to 1
        prior: (num_features,)
    """
    weights = prior.copy()
    for _ in range(_NUM_STEPS):
        shares = 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30)))
        gradient = inputs.T @ (shares - targets) + _PULL * (weights - prior)
        curvature = (inputs.T * (shares * (1 - shares))) @ inputs + _PULL * np.eye(len(prior))
        step = np.linalg.solve(curvature, gradient)
        weights = weights - np.clip(step, -_MAX_STEP, _MAX_STEP)
    return weights


def _thresholds(scores: Sequence[float], ranks: Sequence[int], num_models: int) -> tuple[float, ...]:
    """Return the ascending thresholds that agree with the most labels; of equal ones the most evenly spaced."""
    even = np.linspace(0, 1, num_models + 1)[1:-1]
    cuts = np.unique(np.quantile(scores, np.linspace(0, 1, _MAX_CUTS)) if scores else even)
    middles = (cuts[1:] + cuts[:-1]) / 2 if len(cuts) > 1 else even
    best, best_key = tuple(map(float, even)), (-1, 0.0)
    for chosen in itertools.combinations([*middles], num_models - 1):
        found = np.searchsorted(np.array(chosen), scores, side="right")
        key = int((found == np.array(ranks)).sum()), -float(np.abs(np.array(chosen) - even).sum())
        if key > best_key:
            best, best_key = tuple(round(float(cut), 4) for cut in chosen), key
    return best
