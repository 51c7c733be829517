"""The model as a function of a step: transformers' own layers with our attention.

Supports every causal model that the plugin accepts. ``fused.py`` has a faster version for models of known parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

from torch import Tensor

from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.features import FeatureWriter
from enginehouse_hf.cuda.layered import LayeredNetwork, LayeredTransformers
from enginehouse_hf.cuda.mixers import PooledMixers
from enginehouse_hf.cuda.pool_step import PoolStep
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.depth import Depths
from enginehouse_hf.layer_access import states_of, watched_module

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

    def write_features(self, writer: FeatureWriter) -> None:
        """Let a draft head write features in each later pass over all layers. Raises ModelLoadError if it cannot."""
        ...


class TransformersNetwork:
    """Runs the layers of a transformers model.

    Args:
        model: a causal model that uses our attention.
        attention: attention over the pool.
        mixers: its recurrent modules, if it has some.
    """

    name = "transformers layers"

    def __init__(self, model: Any, attention: PoolAttention, mixers: PooledMixers | None = None) -> None:
        self._mixers = mixers
        self._depths, self._attention = Depths(model), attention
        self._writer: FeatureWriter | None = None

    def run(self, step: Step) -> Tensor:
        """See :class:`Network`."""
        step.begin()
        if self._mixers is not None:
            self._mixers.begin(step)
        model = self._depths.model(step.num_layers)
        rows = {} if step.rows is None else {"logits_to_keep": step.rows.long()}
        logits: Tensor = model(
            input_ids=step.token_ids[None],
            position_ids=step.positions.long()[None],
            use_cache=False,
            enginehouse_step=PoolStep(step, self._attention),
            **rows,
        ).logits[0]
        if self._writer is not None and step.num_layers is None:
            self._writer.write(step)
        if step.rows is not None and len(logits) != len(step.rows):
            return logits[step.rows]  # old model classes return every column
        return logits

    def write_features(self, writer: FeatureWriter) -> None:
        """See :class:`Network`."""
        model = self._depths.model(None)
        for layer in writer.reads:

            def note(_module: Any, _arguments: Any, result: Any, *, at: int | None) -> None:
                writer.note(at, states_of(result)[0])

            watched_module(model, layer).register_forward_hook(partial(note, at=layer))
        self._writer = writer

    def layered(self) -> LayeredTransformers:
        """See :class:`Network`."""
        return LayeredTransformers(self._depths.model(None), lambda step: PoolStep(step, self._attention))
