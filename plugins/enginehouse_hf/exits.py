"""Early exit: a pass in which each token may leave the layer loop, as a policy says.

A token that leaves carries its state unchanged past the layers above, so that the model's own output norm and
projection make its logits of the state it left with. The layers above still need keys and values for its position:
each is run up to its attention, which writes them and goes no further. So every model that our attention serves can be
left, whatever its layers are made of.

Source: state propagation of CALM (Schuster et al., 2022, arXiv:2207.07061, section 3.3) and of LayerSkip (Elhoushi et
al., 2024, arXiv:2404.16710): keys and values of skipped layers are projected from the state at the exit. We write
them at once, as CALM does; the projection of queries, which the layer makes beside them, is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse_hf.attention import Step
from enginehouse_hf.depth import own_modules
from enginehouse_hf.layer_access import Head, run_to_keys, states_of, with_forward

__all__ = ["EarlyExits", "Exited"]


@frozen(eq=False)
class Exited:
    """What one pass gave: logits (T, vocab_size), and for each token how many layers it ran through."""

    logits: Tensor
    layers: list[int]


@frozen(eq=False)
class _View:
    """See :class:`enginehouse.contract.exit_policy.ExitView`; keeps the logits that the policy has asked for."""

    layer: int
    hidden: Tensor
    previous_hidden: Tensor
    _head: Callable[[Tensor], Tensor]
    _states: Tensor
    computed: list[Tensor] = field(factory=list)

    def logits(self) -> Tensor:
        """(num_rows, vocab_size) float32."""
        if not self.computed:
            self.computed.append(self._head(self._states))
        return self.computed[0].float()


@define(eq=False)
class _Pass:
    """One pass on its way through the layers.

    Attributes:
        inside: columns that have not left.
        layers: for each column, how many layers it ran through.
        logits: of columns that left with logits that the policy had asked for.
        hidden: (1, T, hidden_size), the states behind the last layer that has run.
    """

    step: Step
    inside: list[int]
    layers: list[int]
    logits: dict[int, Tensor] = field(factory=dict)
    hidden: Tensor | None = None

    @property
    def outside(self) -> list[int]:
        """Columns that have left."""
        inside = set(self.inside)
        return [column for column in range(len(self.layers)) if column not in inside]


class EarlyExits:
    """A model that tokens may leave early; shares weights and KV memory with it.

    Args:
        model: one whose layers :func:`enginehouse_hf.depth.exit_layers` knows.
        policy: decides; its ``layers`` are some of those.
    """

    def __init__(self, model: Any, policy: BoundExitPolicy) -> None:
        self._policy = policy
        self._asked = frozenset(policy.layers)
        layers = list(model.base_model.layers)
        self._num_layers = len(layers)
        self._body = own_modules(model.base_model)
        self._body.layers = nn.ModuleList(
            with_forward(layer, partial(self._run_layer, index, layer)) for index, layer in enumerate(layers)
        )
        self._head = Head(model)
        self._pass: _Pass | None = None

    def run(self, step: Step, token_ids: Tensor) -> Exited:
        """One pass over single tokens, each its own lane of ``step``.

        Args:
            step: its lanes, one column each.
            token_ids: (T,) int64.
        """
        num_tokens = len(token_ids)
        run = self._pass = _Pass(step, list(range(num_tokens)), [self._num_layers] * num_tokens)
        positions = torch.tensor([lane.start for lane in step.lanes], device=token_ids.device)
        try:
            with torch.inference_mode():
                self._body(
                    input_ids=token_ids[None], position_ids=positions[None], use_cache=False, enginehouse_step=step
                )
                return Exited(self._logits(run), run.layers)
        finally:
            self._pass = None

    def _logits(self, run: _Pass) -> Tensor:
        """(T, vocab_size); those that are known are not computed again."""
        assert run.hidden is not None
        wanted = [column for column in range(len(run.layers)) if column not in run.logits]
        if wanted:
            run.logits.update(zip(wanted, self._head(run.hidden[0, wanted]), strict=True))
        return torch.stack([run.logits[column] for column in range(len(run.layers))])

    def _run_layer(self, index: int, layer: Any, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """In place of a layer: run it on what is inside, write keys and values of what has left, ask the policy."""
        run = self._pass
        assert run is not None
        if len(run.inside) == len(run.layers):
            states: Tensor = states_of(layer(hidden, *others, **named))
        else:
            _write_keys(layer, hidden, others, named, run)
            states = hidden
            if run.inside:
                states = hidden.clone()
                step = run.step.narrowed(run.inside)
                arguments, keywords = _narrowed((others, named), run.inside, len(run.layers))
                ran = layer(hidden[:, run.inside], *arguments, **{**keywords, "enginehouse_step": step})
                states[:, run.inside] = states_of(ran)
        run.hidden = states
        if run.inside and index + 1 in self._asked:
            self._ask(run, index + 1, hidden, states)
        return states

    def _ask(self, run: _Pass, layer: int, before: Tensor, after: Tensor) -> None:
        """Let the policy decide who leaves behind ``layer``."""
        states = after[0, run.inside]
        view = _View(layer, states.float(), before[0, run.inside].float(), self._head, states)
        mask = np.asarray(self._policy.leaves(view))
        for row, column in enumerate(run.inside):
            if mask[row]:
                run.layers[column] = layer
                if view.computed:
                    run.logits[column] = view.computed[0][row]
        run.inside = [column for row, column in enumerate(run.inside) if not mask[row]]


def _write_keys(layer: Any, hidden: Tensor, others: tuple[Any, ...], named: dict[str, Any], run: _Pass) -> None:
    """Run a layer up to its attention, for the columns that have left."""
    step = run.step
    if run.inside:
        outside = run.outside
        hidden, step = hidden[:, outside], step.narrowed(outside)
        others, named = _narrowed((others, named), outside, len(run.layers))
    run_to_keys(layer, step, hidden, *others, **named)


def _narrowed(value: Any, columns: list[int], num_columns: int) -> Any:
    """The same arguments of a layer for some of the columns only; what has no columns stays."""
    if isinstance(value, Tensor):
        has_columns = value.ndim >= 2 and value.shape[0] == 1 and value.shape[1] == num_columns
        return value[:, columns] if has_columns else value
    if isinstance(value, tuple):
        return tuple(_narrowed(item, columns, num_columns) for item in value)
    if isinstance(value, dict):
        return {name: _narrowed(item, columns, num_columns) for name, item in value.items()}
    return value
