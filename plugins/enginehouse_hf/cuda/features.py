"""Features of a draft head, which networks write to the pool while all layers of the model run."""

from __future__ import annotations

from torch import Tensor

from enginehouse_hf.cuda.step import Step
from enginehouse_hf.heads.drafting import DraftHead

__all__ = ["FeatureWriter"]


class FeatureWriter:
    """Receives the states of a pass over all layers from a network, and writes the features of its tokens.

    Args:
        head: makes the features.
        layer: index of their layer in the pool.
    """

    def __init__(self, head: DraftHead, layer: int) -> None:
        self.reads = frozenset(head.reads)
        self._head, self._layer = head, layer
        self._seen: dict[int | None, Tensor] = {}

    def note(self, layer: int | None, states: Tensor) -> None:
        """Keep the states after a layer, or after the output norm (None): (T, hidden_size), not changed later."""
        self._seen[layer] = states

    def write(self, step: Step) -> None:
        """Write the features of all tokens of a step."""
        features = self._head.features([self._seen[layer] for layer in self._head.reads])
        kept, _ = step.state.layers[self._layer]
        kept.write(step.places.long(), features[:, None].to(kept.numbers.dtype))
        self._seen.clear()
