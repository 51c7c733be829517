"""Early exit: a pass over single tokens in which a policy decides after which layer each token stops.

Every layer of the model is replaced by a switch. It runs the layer for the active tokens, and passes the states of the
others on unchanged, so that the model's own output norm and projection compute their logits from the state at the exit.
The remaining layers still need keys and values for exited tokens: the switch calls the layer for these tokens, too, and
drops its result. MLX evaluates lazily, here only keys and values; attention and all later operations never run.

Source: state propagation of CALM (Schuster et al., 2022, arXiv:2207.07061, section 3.3): keys and values of skipped
layers are projected from the state at the exit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from attrs import define, field, frozen

from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse_mlx.batch import Batch
from enginehouse_mlx.cache import LayerCache, SlotMemory
from enginehouse_mlx.depth import LayeredModel, LayerSwitch

__all__ = ["EarlyExits", "Exited"]


@frozen(eq=False)
class Exited:
    """Result of one pass: logits (num_sequences, vocab_size), and the number of layers each token ran through."""

    logits: mx.array
    layers: list[int]


@frozen(eq=False)
class _View:
    """Implements :class:`enginehouse.contract.exit_policy.ExitView`; keeps the logits that the policy requested."""

    layer: int
    hidden: mx.array
    previous_hidden: mx.array
    _head: Callable[[mx.array], mx.array]
    _states: mx.array
    computed: list[mx.array] = field(factory=list)

    def logits(self) -> mx.array:
        """(num_rows, vocab_size) float32."""
        if not self.computed:
            self.computed.append(self._head(self._states))
        return self.computed[0]


@define(eq=False)
class _Pass:
    """State of one pass while it runs through the layers.

    Attributes:
        inside: rows of the batch that have not exited.
        layers: for each row, the number of layers it ran through.
        logits: (vocab_size,) of each exited row for which the policy had requested logits.
    """

    batch: Batch
    inside: list[int]
    layers: list[int]
    logits: dict[int, mx.array] = field(factory=dict)

    @property
    def outside(self) -> list[int]:
        """Rows that have exited."""
        inside = set(self.inside)
        return [row for row in range(len(self.layers)) if row not in inside]


class EarlyExits:
    """A model with early exit; shares weights and KV memory with the original model.

    Args:
        model: a model that offers exits.
        memory: memory of the sequences.
        policy: decides the exits; its ``layers`` are a subset of the model's ``exit_layers``.
    """

    def __init__(self, model: LayeredModel, memory: SlotMemory, policy: BoundExitPolicy) -> None:
        self._model = model
        self._memory = memory
        self._policy = policy
        self._asked = frozenset(policy.layers)
        self._body = model.with_layers(
            [
                LayerSwitch(layer, partial(self._run_layer, number, layer))
                for number, layer in enumerate(model.layers, start=1)
            ]
        )
        self._given: mx.array | None = None
        self._head_body = model.with_layers([LayerSwitch(model.layers[0], self._give)])
        self._pass: _Pass | None = None

    def run(self, batch: Batch, token_ids: mx.array) -> Exited:
        """Run one pass over one token of each sequence; evaluated only as far as the policy requires.

        Args:
            batch: slots and positions of the tokens.
            token_ids: (num_sequences, 1) int32.
        """
        num_rows = len(batch.slots)
        run = self._pass = _Pass(batch, list(range(num_rows)), [len(self._model.layers)] * num_rows)
        try:
            output = self._body(token_ids, self._memory.begin(batch))
        finally:
            self._pass = None
        return Exited(self._logits(run, output), run.layers)

    def _logits(self, run: _Pass, output: mx.array) -> mx.array:
        """(num_rows, vocab_size) float32; logits already known are not recomputed."""
        rows = dict(run.logits)
        wanted = [row for row in range(len(run.layers)) if row not in rows]
        if wanted:
            logits = self._model.halves.head(output[mx.array(wanted), 0]).astype(mx.float32)
            rows.update((row, logits[place]) for place, row in enumerate(wanted))
        return mx.stack([row for _, row in sorted(rows.items())])

    def _run_layer(self, number: int, layer: Any, hidden: mx.array, *others: Any, **named: Any) -> mx.array:
        """Replace a layer: run it for active rows, write keys and values of exited ones, call the policy."""
        run = self._pass
        assert run is not None
        call = partial(_call_for, run.batch, layer, hidden, others, named)
        states, outside = hidden, run.outside
        if not outside:
            states = layer(hidden, *others, **named)
        else:
            call(rows=outside)
            if run.inside:
                states = mx.array(hidden)  # a new handle: the assignment must not change ``hidden``
                states[mx.array(run.inside)] = call(rows=run.inside)
        if run.inside and number in self._asked:
            self._ask(run, number, hidden, states)
        return states

    def _ask(self, run: _Pass, number: int, before: mx.array, after: mx.array) -> None:
        """Let the policy decide which rows exit after a layer."""
        rows = mx.array(run.inside)
        states = after[rows, 0]
        view = _View(number, states.astype(mx.float32), before[rows, 0].astype(mx.float32), self._head, states)
        mask = np.asarray(self._policy.leaves(view))
        for place, row in enumerate(run.inside):
            if mask[place]:
                run.layers[row] = number
                if view.computed:
                    run.logits[row] = view.computed[0][place]
        run.inside = [row for place, row in enumerate(run.inside) if not mask[place]]

    def _head(self, states: mx.array) -> mx.array:
        """(num_rows, vocab_size) float32 of (num_rows, hidden_size), by output norm and projection.

        The model is called with one layer, which returns the given states.
        """
        self._given = states[:, None]
        nothing = mx.zeros((len(states), 1), mx.int32)
        output = self._head_body(nothing, self._memory.caches)
        self._given = None
        return self._model.halves.head(output[:, 0]).astype(mx.float32)

    def _give(self, *_: Any, **__: Any) -> mx.array:
        assert self._given is not None
        return self._given


def _call_for(
    batch: Batch, layer: Any, hidden: mx.array, others: Sequence[Any], named: dict[str, Any], *, rows: list[int]
) -> mx.array:
    """Call a layer for some rows of the batch; its cache must not see the others."""
    if len(rows) == len(batch.slots):
        return layer(hidden, *others, **named)
    chosen = mx.array(rows)
    caches = [value for value in (*others, *named.values()) if isinstance(value, LayerCache)]

    def narrowed(value: Any) -> Any:
        has_rows = isinstance(value, mx.array) and value.ndim > 1 and value.shape[0] == len(batch.slots)
        return value[chosen] if has_rows else value

    for cache in caches:
        cache.batch = batch.narrowed(rows)
    try:
        return layer(hidden[chosen], *map(narrowed, others), **{name: narrowed(value) for name, value in named.items()})
    finally:
        for cache in caches:
            cache.batch = batch
