"""What is found out about a model while a few tokens run through it, before its memory is laid out."""

from __future__ import annotations

from attrs import frozen

__all__ = ["ModelFacts", "Shape"]

Shape = tuple[int, int]
"""Numbers of heads and of dimensions."""


@frozen
class ModelFacts:
    """A loaded model in numbers.

    Attributes:
        layers: per layer the shapes of keys and of values.
        windows: the sliding window of every layer in tokens, or None.
        vocab_size: width of a row of logits.
        max_context: longest sequence that is served.
    """

    layers: tuple[tuple[Shape, Shape], ...]
    windows: dict[int, int | None]
    vocab_size: int
    max_context: int
