"""The model as a function of a step: transformers' own layers with our attention.

Supports every causal model that the plugin accepts. ``fused.py`` has a faster version for models of known parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn

from enginehouse_hf.adapters import adaptable_linears
from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.features import FeatureWriter
from enginehouse_hf.cuda.layered import LayeredNetwork, LayeredTransformers
from enginehouse_hf.cuda.lora import Stack, expand, shrink
from enginehouse_hf.cuda.mixers import PooledMixers
from enginehouse_hf.cuda.pool_step import PoolStep
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.cuda.structure import Modules
from enginehouse_hf.depth import Depths
from enginehouse_hf.layer_access import states_of, watched_module

__all__ = ["Adaptable", "Network", "TransformersNetwork"]


@frozen(eq=False)
class Adaptable:
    """A projection that adapters can change; ``width`` is the number of its inputs."""

    modules: Modules
    width: int
    device: torch.device


class Network(Protocol):
    """Appends the tokens of a step to the pool.

    Attributes:
        stacks: adapters by the projection that they change; filled by ``stacks.py``. A step reads those that it uses.
    """

    name: str
    stacks: dict[Any, Stack]

    def adaptable(self) -> Mapping[Any, Adaptable]:
        """Return the projections that adapters can change, by the keys of ``stacks``."""
        ...

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
        recurrent: their names; they are not adapted, since they see the tokens in another order.
    """

    name = "transformers layers"

    def __init__(
        self,
        model: Any,
        attention: PoolAttention,
        mixers: PooledMixers | None = None,
        recurrent: Collection[str] = (),
    ) -> None:
        self._mixers = mixers
        self._depths, self._attention = Depths(model), attention
        self._writer: FeatureWriter | None = None
        self._linears = adaptable_linears(model, recurrent)
        self.stacks: dict[str, Stack] = {}

    def adaptable(self) -> dict[str, Adaptable]:
        """See :class:`Network`."""
        return {
            name: Adaptable(((name, linear.out_features),), linear.in_features, linear.weight.device)
            for name, linear in self._linears.items()
        }

    def run(self, step: Step) -> Tensor:
        """See :class:`Network`."""
        step.begin()
        if self._mixers is not None:
            self._mixers.begin(step)
        model = self._depths.model(step.num_layers)
        rows = {} if step.rows is None else {"logits_to_keep": step.rows.long()}
        chunk = step.chunk
        given = {"input_ids": step.token_ids[None]} if chunk is None else {"inputs_embeds": chunk.embedding[None]}
        positions = step.rotary.long() if chunk is None or chunk.positions is None else chunk.positions
        with self._adapted(step.scales):
            logits: Tensor = model(
                **given,
                position_ids=positions.unsqueeze(-2),
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

    @contextmanager
    def _adapted(self, scales: Tensor | None) -> Iterator[None]:
        """Let the linear layers add the updates of adapters; ``scales`` is that of a step."""
        hooks = [] if scales is None else [
            self._linears[name].register_forward_hook(_hook(stack, scales)) for name, stack in self.stacks.items()
        ]  # fmt: skip
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def layered(self) -> LayeredTransformers:
        """See :class:`Network`."""
        return LayeredTransformers(self._depths.model(None), lambda step: PoolStep(step, self._attention))


def _hook(stack: Stack, scales: Tensor) -> Any:
    """Return a forward hook of a linear layer that sees the tokens of a step in order."""

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = inputs[0].reshape(-1, inputs[0].shape[-1]).contiguous()
        assert len(x) == scales.shape[1], "a layer with adapters sees the tokens of the step in order"
        expand(output.view(-1, output.shape[-1]), shrink(x, stack, scales), stack, scales)
        return output

    return add
