"""Early exit: a forward pass in which a policy decides after which layer each token stops.

The hidden state of a token that exits is carried unchanged past the remaining layers, so the model's own output norm
and projection compute its logits from the state at the exit. The remaining layers still need keys and values for its
position: each runs up to its attention, which writes them and stops there. Early exit therefore works with every model
that our attention supports, regardless of its layer type.

Source: state propagation of CALM (Schuster et al., 2022, arXiv:2207.07061, section 3.3) and of LayerSkip (Elhoushi et
al., 2024, arXiv:2404.16710): keys and values of skipped layers are projected from the state at the exit. Like CALM, we
write them at once; the query projection, which the layer computes along with them, is wasted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from numpy.typing import NDArray
from torch import Tensor, nn

from enginehouse.contract.exit_policy import BoundExitPolicy
from enginehouse_hf.attention import Step
from enginehouse_hf.depth import own_modules
from enginehouse_hf.layer_access import Head, run_to_keys, states_of, with_forward

__all__ = ["EarlyExits", "Exited"]


@frozen(eq=False)
class Exited:
    """Result of one pass: logits (T, vocab_size), and the number of layers each token ran through."""

    logits: Tensor
    layers: list[int]


@frozen(eq=False)
class _View:
    """Implements :class:`enginehouse.contract.exit_policy.ExitView`; keeps the logits that the policy requested."""

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
    """State of one pass while it runs through the layers.

    Attributes:
        inside: columns that have not exited.
        layers: for each column, the number of layers it ran through.
        logits: logits of exited columns for which the policy had requested them.
        hidden: (1, T, hidden_size), the states after the last layer that has run.
    """

    step: Step
    inside: list[int]
    layers: list[int]
    logits: dict[int, Tensor] = field(factory=dict)
    hidden: Tensor | None = None

    @property
    def outside(self) -> list[int]:
        """Columns that have exited."""
        inside = set(self.inside)
        return [column for column in range(len(self.layers)) if column not in inside]


class EarlyExits:
    """A model with early exit; shares weights and KV memory with the original model.

    Args:
        model: a model whose layers :func:`enginehouse_hf.depth.exit_layers` supports.
        policy: decides the exits; its ``layers`` are a subset of those.
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
        """Run one pass over single tokens, each its own row of ``step``.

        Args:
            step: its rows have one column each.
            token_ids: (T,) int64.
        """
        num_tokens = len(token_ids)
        run = self._pass = _Pass(step, list(range(num_tokens)), [self._num_layers] * num_tokens)
        positions = torch.tensor([segment.start for segment in step.segments], device=token_ids.device)
        try:
            with torch.inference_mode():
                self._body(
                    input_ids=token_ids[None], position_ids=positions[None], use_cache=False, enginehouse_step=step
                )
                return Exited(self._logits(run), run.layers)
        finally:
            self._pass = None

    def _logits(self, run: _Pass) -> Tensor:
        """Return the logits (T, vocab_size); those already known are not recomputed."""
        assert run.hidden is not None
        wanted = [column for column in range(len(run.layers)) if column not in run.logits]
        if wanted:
            run.logits.update(zip(wanted, self._head(run.hidden[0, wanted]), strict=True))
        return torch.stack([run.logits[column] for column in range(len(run.layers))])

    def _run_layer(self, index: int, layer: Any, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """Replace a layer: run it for active columns, write keys and values of exited ones, call the policy."""
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
        """Let the policy decide which columns exit after ``layer``."""
        states = after[0, run.inside]
        view = _View(layer, states.float(), before[0, run.inside].float(), self._head, states)
        mask = _mask_on_host(self._policy.leaves(view))
        for row, column in enumerate(run.inside):
            if mask[row]:
                run.layers[column] = layer
                if view.computed:
                    run.logits[column] = view.computed[0][row]
        run.inside = [column for row, column in enumerate(run.inside) if not mask[row]]


def _mask_on_host(mask: Any) -> NDArray[np.bool_]:
    """(num_rows,) bool, the answer of a policy; waits for the device of a tensor."""
    return np.asarray(mask.cpu() if isinstance(mask, Tensor) else mask)


def _write_keys(layer: Any, hidden: Tensor, others: tuple[Any, ...], named: dict[str, Any], run: _Pass) -> None:
    """Run a layer up to its attention, for the columns that have exited."""
    step = run.step
    if run.inside:
        outside = run.outside
        hidden, step = hidden[:, outside], step.narrowed(outside)
        others, named = _narrowed((others, named), outside, len(run.layers))
    run_to_keys(layer, step, hidden, *others, **named)


def _narrowed(value: Any, columns: list[int], num_columns: int) -> Any:
    """Restrict a layer argument to some columns; values without a column dimension are returned unchanged."""
    if isinstance(value, Tensor):
        has_columns = value.ndim >= 2 and value.shape[0] == 1 and value.shape[1] == num_columns
        return value[:, columns] if has_columns else value
    if isinstance(value, tuple):
        return tuple(_narrowed(item, columns, num_columns) for item in value)
    if isinstance(value, dict):
        return {name: _narrowed(item, columns, num_columns) for name, item in value.items()}
    return value
