"""Access to the layers of a transformers model for early exit: replace them, stop inside them, skip to the end.

Nothing of the model is copied: all objects made here share its weights. Used by ``exits.py``, for draft heads, and on a
single CUDA device by ``cuda/layered.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn

from enginehouse_hf.depth import own_modules

__all__ = ["Head", "KeyMemory", "run_to_keys", "states_of", "watched_module", "with_forward"]


class KeyMemory(Protocol):
    """The part of a step that stores keys and values."""

    def append(self, index: int, key: Tensor, value: Tensor) -> Any:
        """Write the keys and values of layer ``index``, (1, H, T, D)."""
        ...


class Head:
    """Output norm and projection: the model with a single layer, which returns the given states unchanged."""

    def __init__(self, model: Any) -> None:
        self._given: Tensor | None = None
        body = own_modules(model.base_model)
        body.layers = nn.ModuleList([with_forward(model.base_model.layers[0], lambda *_, **__: self._given)])
        self._model = own_modules(model)
        setattr(self._model, model.base_model_prefix, body)

    def __call__(self, states: Tensor) -> Tensor:
        """Return logits (num_rows, vocab_size) in the model's dtype for ``states`` (num_rows, hidden_size)."""
        self._given = states[None]
        nothing = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        logits: Tensor = self._model(input_ids=nothing, position_ids=nothing, use_cache=False).logits[0]
        self._given = None
        return logits


class _KeysWritten(Exception):
    """Raised when a layer has reached its attention; the rest of the layer is not needed."""


@frozen
class _KeysOnly:
    """Replaces a step: writes keys and values, then ends the layer."""

    memory: KeyMemory

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, **_scores: Any) -> Tensor:
        """Implements :class:`enginehouse_hf.attention.AnyStep`; never returns."""
        self.memory.append(index, key, value)
        raise _KeysWritten


def run_to_keys(layer: Any, memory: KeyMemory, hidden: Tensor, *others: Any, **named: Any) -> None:
    """Run a layer up to its attention, which writes keys and values and stops there."""
    try:
        layer(hidden, *others, **{**named, "enginehouse_step": _KeysOnly(memory)})
    except _KeysWritten:
        return
    raise AssertionError("the layer has no attention of ours")


def states_of(result: Any) -> Tensor:
    """Return the states from a layer's result, which some layers wrap in a tuple."""
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states


def watched_module(model: Any, layer: int | None) -> nn.Module:
    """Return the module whose output are the states after a layer, counted from 0, or after the output norm (None)."""
    decoder = model.get_decoder()
    found: nn.Module = decoder.norm if layer is None else decoder.layers[layer]
    return found


def with_forward(layer: Any, forward: Callable[..., Any]) -> Any:
    """Return a copy of the layer that shares everything except its ``forward``."""
    own = own_modules(layer)
    own.forward = forward
    return own
