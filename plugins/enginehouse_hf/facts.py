"""Properties of a model, measured by running a few tokens before its memory is allocated."""

from __future__ import annotations

import torch
from attrs import frozen

__all__ = ["ModelFacts", "Shape", "StateForm", "StateKey"]

Shape = tuple[int, int]
"""(num_heads, head_dim)."""

StateKey = tuple[int, str, int]
"""Part of the state of a sequence: layer, ``conv`` or ``recurrent``, and number in the layer."""


@frozen
class StateForm:
    """Shape, (1, ...), and type of a part of the state of a sequence."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the part."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@frozen
class ModelFacts:
    """Properties of a loaded model.

    Attributes:
        layers: per layer the shapes of keys and of values.
        windows: the sliding window of every layer in tokens, or None.
        vocab_size: width of a row of logits.
        max_context: longest supported sequence in tokens.
        has_sinks: a layer has attention sinks.
        states: parts of the state of a sequence in recurrent layers; those of the widest type first.
    """

    layers: tuple[tuple[Shape, Shape], ...]
    windows: dict[int, int | None]
    vocab_size: int
    max_context: int
    has_sinks: bool = False
    states: tuple[StateForm, ...] = ()

    @property
    def state_bytes(self) -> int:
        """Size of the state of a sequence."""
        return sum(form.num_bytes for form in self.states)
