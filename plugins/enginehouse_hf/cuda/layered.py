"""Networks that run part by part, so that tokens can exit between their layers.

``fused.py`` implements such parts itself; :class:`LayeredTransformers` provides them for any transformers model that
our attention supports. Called by ``parts.py``, over single tokens, each a sequence of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn

from enginehouse_hf.cuda.pool_step import PoolStep
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.depth import own_modules
from enginehouse_hf.layer_access import Head, run_to_keys, states_of, with_forward

__all__ = ["LayeredNetwork", "LayeredTransformers", "States"]


@frozen(eq=False)
class States:
    """States of tokens between layers; written in place.

    Attributes:
        hidden: (T, hidden_size), after the last layer that ran.
        before: (T, hidden_size), before that layer.
    """

    hidden: Tensor
    before: Tensor


class LayeredNetwork(Protocol):
    """The parts of a network."""

    num_layers: int

    def run_layers(self, step: Step, states: States, begin: int, end: int) -> None:
        """Run layers ``begin`` to ``end``, from the token ids if ``begin`` is 0, else from ``states.hidden``."""
        ...

    def write_keys(self, step: Step, hidden: Tensor, begin: int) -> None:
        """Write keys and values of ``hidden``, (T, hidden_size), in all layers from ``begin`` on."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """(T, vocab_size) logits of ``hidden``, (T, hidden_size), by output norm and projection."""
        ...


class LayeredTransformers:
    """Implements :class:`LayeredNetwork` with the model's own loop; unselected layers return their input.

    Args:
        model: a model whose layers :func:`enginehouse_hf.depth.exit_layers` supports.
        on_pool: attention of its layers.
    """

    def __init__(self, model: Any, on_pool: Callable[[Step], PoolStep]) -> None:
        self._layers = list(model.base_model.layers)
        self.num_layers = len(self._layers)
        self._body = own_modules(model.base_model)
        self._on_pool = on_pool
        self.head = Head(model)

    def run_layers(self, step: Step, states: States, begin: int, end: int) -> None:
        """See :class:`LayeredNetwork`."""
        if not begin:
            step.begin()

        def run(index: int, layer: Any, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
            if not begin <= index < end:
                return hidden
            given = states.hidden[None] if index == begin and begin else hidden
            if index == end - 1:
                states.before.copy_(given[0])
            return states_of(layer(given, *others, **named))

        def keep(index: int, layer: Any, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
            outputs = run(index, layer, hidden, *others, **named)
            if index == end - 1:
                states.hidden.copy_(outputs[0])
            return outputs

        token_ids = torch.zeros_like(step.token_ids) if begin else step.token_ids  # its ``begin`` has not run
        self._loop(step, token_ids, keep, self._on_pool(step))

    def write_keys(self, step: Step, hidden: Tensor, begin: int) -> None:
        """See :class:`LayeredNetwork`."""
        pool_step = self._on_pool(step)

        def write(index: int, layer: Any, _hidden: Tensor, *others: Any, **named: Any) -> Tensor:
            if index >= begin:
                run_to_keys(layer, pool_step, hidden[None], *others, **named)
            return hidden[None]

        self._loop(step, torch.zeros_like(step.token_ids), write, pool_step)

    def _loop(self, step: Step, token_ids: Tensor, run_layer: Callable[..., Tensor], pool_step: PoolStep) -> None:
        """Run the model's loop over its layers, replacing each by ``run_layer(index, layer, ...)``."""
        self._body.layers = nn.ModuleList(
            with_forward(layer, partial(run_layer, index, layer)) for index, layer in enumerate(self._layers)
        )
        self._body(
            input_ids=token_ids[None],
            position_ids=step.positions.long()[None],
            use_cache=False,
            enginehouse_step=pool_step,
        )
