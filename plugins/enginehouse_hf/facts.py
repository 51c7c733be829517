"""Properties of a model, measured by running a few tokens before its memory is allocated."""

from __future__ import annotations

from attrs import frozen

__all__ = ["ModelFacts", "Shape"]

Shape = tuple[int, int]
"""(num_heads, head_dim)."""


@frozen
class ModelFacts:
    """Properties of a loaded model.

    Attributes:
        layers: per layer the shapes of keys and of values.
        windows: the sliding window of every layer in tokens, or None.
        vocab_size: width of a row of logits.
        max_context: longest supported sequence in tokens.
        has_sinks: a layer has attention sinks.
    """

    layers: tuple[tuple[Shape, Shape], ...]
    windows: dict[int, int | None]
    vocab_size: int
    max_context: int
    has_sinks: bool = False
