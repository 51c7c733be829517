"""Splits a model before its vocabulary projection, after verifying that the parts give the same logits.

mlx-lm models project every position to the vocabulary, which costs most of a prefill's memory. Most are built
as ``model.model`` and ``lm_head`` (or tied embeddings); a few do more in between (such as soft capping), and
a few cannot process sequences of unequal lengths in one call. Instead of a list of model names, both are tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from attrs import evolve, frozen
from mlx_lm.models.cache import make_prompt_cache

from enginehouse.contract.errors import ModelLoadError
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.cache import SlotMemory

__all__ = ["PROBE", "ModelHalves", "agrees", "batch_tolerance", "cut_model"]

PROBE = (0, 1, 2, 3)
"""Token ids used for tests of models."""


@frozen
class ModelHalves:
    """The parts of a model.

    Attributes:
        body: (token ids (B, N), caches) to (B, N, width).
        head: (num_rows, width) to (num_rows, vocab_size); the identity if the model could not be split.
        can_batch: several sequences may share a call.
    """

    body: Callable[[mx.array, Any], mx.array]
    head: Callable[[mx.array], mx.array]
    can_batch: bool


def cut_model(model: Any) -> tuple[ModelHalves, int]:
    """Split an mlx-lm model if that is safe.

    Returns:
        Its parts and the width of a row of logits.

    Raises:
        ModelLoadError: the model needs a cache other than keys and values or states, or its states do not work as with
            mlx-lm's own caches.
    """
    uncut = ModelHalves(model, lambda logits: logits, can_batch=False)
    expected = _run_alone(uncut, SlotMemory(model))
    mx.eval(expected)
    if SlotMemory(model).states:
        _check_states(model, expected)
    halves = uncut
    if (head := _find_head(model)) is not None:
        cut = ModelHalves(_body_of(model), head, can_batch=False)
        halves = cut if agrees(expected, lambda: _run_alone(cut, SlotMemory(model)), 1e-4) else uncut
    rows = expected[mx.array([2, 3, 0])]
    can_batch = agrees(rows, lambda: _run_together(halves, SlotMemory(model)), batch_tolerance(expected.dtype))
    return evolve(halves, can_batch=can_batch), int(expected.shape[-1])


def _find_head(model: Any) -> Callable[[mx.array], mx.array] | None:
    """Return the vocabulary projection of models built in mlx-lm's usual way, otherwise None."""
    body = _body_of(model)
    if body is None:
        return None
    own: Callable[[mx.array], mx.array] | None = getattr(model, "lm_head", None)
    embedding = getattr(body, "embed_tokens", getattr(body, "embeddings", None))
    return own if own is not None else getattr(embedding, "as_linear", None)


def _body_of(model: Any) -> Any:
    """Return a model without its vocabulary projection; recurrent ones call it their backbone. None if unknown."""
    return getattr(model, "model", getattr(model, "backbone", None))


def _check_states(model: Any, expected: mx.array) -> None:
    """Raise ModelLoadError if a model with recurrent layers behaves otherwise with our caches than with its own."""
    tolerance = batch_tolerance(expected.dtype)
    own = make_prompt_cache(model)
    alone = mx.concatenate([model(mx.array([PROBE[:3]]), own)[0], model(mx.array([PROBE[3:]]), own)[0]])

    def in_parts() -> mx.array:
        memory, rows = SlotMemory(model), []
        for start, end in ((0, 2), (2, 3), (3, 4)):
            caches = memory.begin(Batch((0,), (start,), end - start))
            rows.append(model(mx.array([PROBE[start:end]]), caches)[0])
        return mx.concatenate(rows)

    if not agrees(alone, lambda: expected, tolerance) or not agrees(alone, in_parts, tolerance):
        raise ModelLoadError("its recurrent layers need more than the states that the mlx backend keeps")


def _run_alone(halves: ModelHalves, memory: SlotMemory) -> mx.array:
    """(4, vocab_size) logits of the probe as one sequence."""
    caches = memory.begin(Batch((0,), (0,), len(PROBE)))
    return halves.head(halves.body(mx.array([PROBE]), caches)[0])


def _run_together(halves: ModelHalves, memory: SlotMemory) -> mx.array:
    """The last two rows of the probe and its first, from sequences of two, three and no tokens in one call."""
    for slot, length in ((0, 2), (1, 3)):
        halves.body(mx.array([PROBE[:length]]), memory.begin(Batch((slot,), (0,), length)))
    caches = memory.begin(Batch((0, 1, 2), (2, 3, 0), 1))
    return halves.head(halves.body(mx.array([[PROBE[2]], [PROBE[3]], [PROBE[0]]]), caches)[:, 0])


def batch_tolerance(dtype: mx.Dtype) -> float:
    """Return the tolerance: low precision rounds differently in a batch, but a wrong position or mask is far off."""
    return 1e-3 if dtype == mx.float32 else 3e-2


def agrees(expected: mx.array, compute: Callable[[], mx.array], tolerance: float) -> bool:
    """True if ``compute`` succeeds and returns ``expected`` within ``tolerance`` of its largest value."""
    try:
        actual = compute()
        if actual.shape != expected.shape:
            return False
        error = mx.abs(actual - expected).max() / mx.abs(expected).max()
        return bool((error <= tolerance).item())
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        return False  # the model is built differently
