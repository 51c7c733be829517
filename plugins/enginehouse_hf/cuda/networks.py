"""The model as one function of a step: transformers' own layers with our attention under them.

Works for every causal model that the plugin accepts. ``fused.py`` has a faster form for models built like Llama.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.depth import Depths

__all__ = ["Network", "TransformersNetwork"]


class Network(Protocol):
    """Appends the tokens of a step to the pool."""

    name: str

    def run(self, step: Step) -> Tensor:
        """(num_rows, vocab_size) logits in the dtype of the model."""
        ...


class _PoolStep:
    """What :func:`enginehouse_hf.attention.slot_attention` calls in each layer; fills the pool."""

    def __init__(self, step: Step, attention: PoolAttention) -> None:
        self._step, self._attention, self._places = step, attention, step.places.long()

    def attend(self, index: int, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """Query (1, H, T, D) gives (1, T, H, D)."""
        keys, values = self._step.state.layers[index]
        keys.index_copy_(0, self._places, key[0].transpose(0, 1))
        values.index_copy_(0, self._places, value[0].transpose(0, 1))
        packed = query[0].transpose(0, 1).contiguous()
        return self._attention.attend(self._step, index, packed, **scores)[None]


class TransformersNetwork:
    """Runs the layers of a transformers model.

    Args:
        model: a causal model that uses our attention.
        attention: over the pool.
        compiles: whether decode steps go through ``torch.compile``.
    """

    def __init__(self, model: Any, attention: PoolAttention, compiles: bool) -> None:
        self.name = "transformers layers, compiled" if compiles else "transformers layers"
        self._depths, self._attention = Depths(model), attention
        self._compiled = torch.compile(model, dynamic=False) if compiles else model

    def run(self, step: Step) -> Tensor:
        """See :class:`Network`."""
        step.begin()
        is_usual = step.num_decodes == step.num_tokens and step.num_layers is None
        model = self._compiled if is_usual else self._depths.model(step.num_layers)
        rows = {} if step.rows is None else {"logits_to_keep": step.rows.long()}
        logits: Tensor = model(
            input_ids=step.token_ids[None],
            position_ids=step.positions.long()[None],
            use_cache=False,
            enginehouse_step=_PoolStep(step, self._attention),
            **rows,
        ).logits[0]
        if step.rows is not None and len(logits) != len(step.rows):
            return logits[step.rows]  # old model classes give every column
        return logits
