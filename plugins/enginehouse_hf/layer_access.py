"""What early exit does with the layers of a transformers model: take their places, stop them, skip to the end.

Nothing of the model is copied: what is made here shares every weight with it. Used by ``exits.py``, and on one CUDA
device by ``cuda/layered.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn

from enginehouse_hf.depth import own_modules

__all__ = ["Head", "KeyMemory", "run_to_keys", "states_of", "with_forward"]


class KeyMemory(Protocol):
    """A step, as far as keys and values are concerned."""

    def append(self, index: int, key: Tensor, value: Tensor) -> Any:
        """Write the keys and values of layer ``index``, (1, H, T, D)."""
        ...


class Head:
    """Output norm and projection, with all around them: the model with one layer, which hands on what it is given."""

    def __init__(self, model: Any) -> None:
        self._given: Tensor | None = None
        body = own_modules(model.base_model)
        body.layers = nn.ModuleList([with_forward(model.base_model.layers[0], lambda *_, **__: self._given)])
        self._model = own_modules(model)
        setattr(self._model, model.base_model_prefix, body)

    def __call__(self, states: Tensor) -> Tensor:
        """(num_rows, vocab_size) in the model's dtype, of ``states`` (num_rows, hidden_size)."""
        self._given = states[None]
        nothing = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        logits: Tensor = self._model(input_ids=nothing, position_ids=nothing, use_cache=False).logits[0]
        self._given = None
        return logits


class _KeysWritten(Exception):
    """The layer has come to its attention; the rest of it is not wanted."""


@frozen
class _KeysOnly:
    """Takes the place of a step: writes keys and values, and ends the layer."""

    memory: KeyMemory

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, **_scores: Any) -> Tensor:
        """See :class:`enginehouse_hf.attention.AnyStep`; never returns."""
        self.memory.append(index, key, value)
        raise _KeysWritten


def run_to_keys(layer: Any, memory: KeyMemory, hidden: Tensor, *others: Any, **named: Any) -> None:
    """Run a layer up to its attention, which writes keys and values and goes no further."""
    try:
        layer(hidden, *others, **{**named, "enginehouse_step": _KeysOnly(memory)})
    except _KeysWritten:
        return
    raise AssertionError("the layer has no attention of ours")


def states_of(result: Any) -> Tensor:
    """Some layers return their states in a tuple."""
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states


def with_forward(layer: Any, forward: Callable[..., Any]) -> Any:
    """A copy of the layer that shares everything with it but what it does."""
    own = own_modules(layer)
    own.forward = forward
    return own
