"""The model as a function of a step: transformers' own layers with our attention.

Supports every causal model that the plugin accepts. ``fused.py`` has a faster version for models of known parts.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.layered import LayeredNetwork, LayeredTransformers
from enginehouse_hf.cuda.pool_step import PoolStep
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.depth import Depths

__all__ = ["Network", "TransformersNetwork"]


class Network(Protocol):
    """Appends the tokens of a step to the pool."""

    name: str

    def run(self, step: Step) -> Tensor:
        """(num_rows, vocab_size) logits in the dtype of the model."""
        ...

    def layered(self) -> LayeredNetwork:
        """The same network, split into parts; only for models that have ``exit_layers``."""
        ...


class TransformersNetwork:
    """Runs the layers of a transformers model.

    Args:
        model: a causal model that uses our attention.
        attention: attention over the pool.
    """

    name = "transformers layers"

    def __init__(self, model: Any, attention: PoolAttention) -> None:
        self._depths, self._attention = Depths(model), attention

    def run(self, step: Step) -> Tensor:
        """See :class:`Network`."""
        step.begin()
        model = self._depths.model(step.num_layers)
        rows = {} if step.rows is None else {"logits_to_keep": step.rows.long()}
        logits: Tensor = model(
            input_ids=step.token_ids[None],
            position_ids=step.positions.long()[None],
            use_cache=False,
            enginehouse_step=PoolStep(step, self._attention),
            **rows,
        ).logits[0]
        if step.rows is not None and len(logits) != len(step.rows):
            return logits[step.rows]  # old model classes return every column
        return logits

    def layered(self) -> LayeredTransformers:
        """See :class:`Network`."""
        return LayeredTransformers(self._depths.model(None), lambda step: PoolStep(step, self._attention))
