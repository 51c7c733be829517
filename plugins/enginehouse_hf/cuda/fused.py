"""A model that was taken apart, as a short list of kernels: the same arithmetic, an eighth of the launches.

Every part has a kernel for one token of one sequence and one for many tokens. The loader compares the logits with those
of transformers' own layers before it uses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from attrs import evolve
from torch import Tensor
from torch.nn.functional import embedding, linear

from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.experts import run_experts
from enginehouse_hf.cuda.features import FeatureWriter
from enginehouse_hf.cuda.few import MAX_FEW, project_few
from enginehouse_hf.cuda.joined import Update
from enginehouse_hf.cuda.layered import States
from enginehouse_hf.cuda.layers import add_norm, gate_heads, gated, rotate_and_store
from enginehouse_hf.cuda.lora import Stack, expand, expand_gated, shrink
from enginehouse_hf.cuda.mixers import PooledMixers
from enginehouse_hf.cuda.networks import Adaptable
from enginehouse_hf.cuda.packed import project_packed
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.cuda.structure import (
    Activation,
    Attention,
    Experts,
    Gated,
    Linear,
    Projection,
    Recurrent,
    Structure,
)
from enginehouse_hf.cuda.vector import project
from enginehouse_hf.packed import Packed, rows_from

__all__ = ["FusedNetwork"]


class FusedNetwork:
    """Implements :class:`enginehouse_hf.cuda.networks.Network` and, by parts, ``LayeredNetwork``.

    Args:
        structure: the parts of the model.
        attention: attention over the pool.
        mixers: its recurrent modules, if it has some.
    """

    name = "fused layers"

    def __init__(self, structure: Structure, attention: PoolAttention, mixers: PooledMixers | None = None) -> None:
        self._mixers = mixers
        self.structure, self._layers, self._attention = structure, structure.layers, attention
        self.stacks: dict[Projection, Stack] = {}
        self._counts: Iterator[Tensor]
        self._side: torch.cuda.Stream | None = None
        self._writer: FeatureWriter | None = None

    def adaptable(self) -> dict[Projection, Adaptable]:
        """See :class:`enginehouse_hf.cuda.networks.Network`."""
        return {
            part: Adaptable(modules, *((part.width, part.codes.device) if isinstance(part, Packed) else
                                       (part.weight.shape[1], part.weight.device)))
            for part, modules in self.structure.modules.items()
        }  # fmt: skip

    @property
    def num_layers(self) -> int:
        """Number of layers of the whole model."""
        return len(self._layers)

    def layered(self) -> FusedNetwork:
        """See :class:`Network`."""
        return self

    def run(self, step: Step) -> Tensor:
        """See :class:`Network`."""
        step.begin()
        if step.scales is not None:
            counts = torch.zeros(len(self.stacks), dtype=torch.int32, device=step.scales.device)
            self._counts = iter(counts.split(1))
        if self._mixers is not None:
            self._mixers.begin(step)
        hidden = self._embed(step)
        num_layers = step.num_layers or self.num_layers
        update, last = self._run(step, hidden, range(num_layers)), self._layers[num_layers - 1]
        if self._writer is not None and step.num_layers is None:
            return self._run_head(step, self._writer, hidden, update)
        if step.rows is not None:
            hidden, update = hidden.index_select(0, step.rows), update.index_select(0, step.rows)
        if not len(hidden):
            return hidden.new_empty(0, self.structure.head.num_rows)
        return self._logits(add_norm(hidden, update, self.structure.norm, after=last.after_mlp, factor=last.factor))

    def _run_head(self, step: Step, writer: FeatureWriter, hidden: Tensor, update: Tensor) -> Tensor:
        """Norm all tokens, write their features, and return the logits that a step requests."""
        last = self._layers[-1]
        normed = add_norm(hidden, update, self.structure.norm, after=last.after_mlp, factor=last.factor)
        writer.note(self.num_layers - 1, hidden)
        writer.note(None, normed)
        writer.write(step)
        if step.rows is not None:
            normed = normed.index_select(0, step.rows)
        return self._logits(normed) if len(normed) else normed.new_empty(0, self.structure.head.num_rows)

    def write_features(self, writer: FeatureWriter) -> None:
        """See :class:`Network`."""
        self._writer = writer

    def run_layers(self, step: Step, states: States, begin: int, end: int) -> None:
        """See :class:`enginehouse_hf.cuda.layered.LayeredNetwork`."""
        if not begin:
            step.begin()
            states.hidden.copy_(self._embed(step))
        update, last = self._run(step, states.hidden, range(begin, end), states.before), self._layers[end - 1]
        add_norm(states.hidden, update, None, after=last.after_mlp, factor=last.factor)

    def write_keys(self, step: Step, hidden: Tensor, begin: int) -> None:
        """See :class:`enginehouse_hf.cuda.layered.LayeredNetwork`."""
        for index, layer in enumerate(self._layers[begin:], begin):
            keys, values = step.state.layers[index]
            assert isinstance(layer.attention, Attention), "no token skips a recurrent layer"
            # The joint projection ends with keys and values.
            num_rows = 2 * keys.numbers.shape[1] * keys.numbers.shape[2]
            projected = _linear(add_norm(hidden, None, layer.before_attention), _end(layer.attention.qkv, num_rows))
            rotate_and_store(projected, keys, values, step.positions, step.places, layer.attention)

    def head(self, hidden: Tensor) -> Tensor:
        """See :class:`enginehouse_hf.cuda.layered.LayeredNetwork`."""
        return self._logits(add_norm(hidden, None, self.structure.norm))

    def _embed(self, step: Step) -> Tensor:
        if step.chunk is not None:
            return step.chunk.embedding
        hidden = embedding(step.token_ids, self.structure.embeddings)
        return hidden if self.structure.embedding_scale == 1.0 else hidden.mul_(self.structure.embedding_scale)

    def _run(self, step: Step, hidden: Tensor, layers: range, before: Tensor | None = None) -> Tensor:
        """Run some layers, and return the update of the last: ``hidden``, which is changed, lacks only that.

        The states before the last of the layers are written to ``before``.
        """
        update: Tensor | None = None
        after, factor = None, 1.0
        for index in layers:
            layer = self._layers[index]
            normed = add_norm(hidden, update, layer.before_attention, after=after, factor=factor)
            if self._writer is not None and index - 1 in self._writer.reads:
                self._writer.note(index - 1, hidden.clone())
            if before is not None and index == layers[-1]:
                before.copy_(hidden)
            update, after, factor = self._mix(step, index, layer.attention, normed), layer.after_attention, layer.factor
            normed = add_norm(hidden, update, layer.before_mlp, after=after, factor=factor)
            update = self._feed_forward(step, normed, layer.mlp)
            after = layer.after_mlp
        assert update is not None
        return update

    def _mix(self, step: Step, index: int, part: Attention | Recurrent, normed: Tensor) -> Tensor:
        """Return the update of the attention, or of the recurrent module in its place."""
        if isinstance(part, Recurrent):
            assert self._mixers is not None
            return self._mixers.run(part.index, normed)
        project = _linear if part.is_gated else _parts
        attended = self._attend(step, index, part, self._adapted(project, normed, part.qkv, step))
        return self._adapted(_update, attended, part.output, step)

    def _feed_forward(self, step: Step, normed: Tensor, mlp: Gated | Experts) -> Tensor:
        if isinstance(mlp, Experts):
            return run_experts(normed, mlp)
        scales, stack = step.scales, self.stacks.get(mlp.gate_up)
        if scales is None or stack is None:
            inner = _gated(normed, mlp)
        else:
            joined = self._joined(normed, mlp.gate_up, stack, scales, mlp.activation)
            inner = self._gated_apart(normed, mlp, stack, scales) if joined is None else joined
        return self._adapted(_update, inner, mlp.down, step)

    def _gated_apart(self, normed: Tensor, mlp: Gated, stack: Stack, scales: Tensor) -> Tensor:
        """A gated part and its update in several kernels."""
        low, out = self._beside(partial(shrink, normed, stack, scales), partial(_linear, normed, mlp.gate_up))
        return expand_gated(out, low, stack, scales, mlp.activation)

    def _adapted(
        self, apply: Callable[[Tensor, Projection], Tensor], x: Tensor, part: Projection, step: Step
    ) -> Tensor:
        """``apply(x, part)``, and the updates of the adapters of a step."""
        scales, stack = step.scales, self.stacks.get(part)
        if scales is None or stack is None:
            return apply(x, part)
        joined = self._joined(x, part, stack, scales) if apply is not _linear or len(x) == 1 else None
        if joined is not None:
            return joined
        low, out = self._beside(partial(shrink, x, stack, scales), partial(apply, x, part))
        expand(out if out.dim() == 2 else out[:, 0], low, stack, scales)  # of rows that add up, to the first
        return out

    def _joined(
        self, x: Tensor, part: Projection, stack: Stack, scales: Tensor, activation: Activation | None = None
    ) -> Tensor | None:
        """Product and update in one kernel; None if the sizes or types do not suit."""
        if isinstance(part, Packed) or len(x) > MAX_FEW:
            return None
        update = Update(stack, scales, next(self._counts))
        return project(x, part, activation, update) if len(x) == 1 else project_few(x, part, activation, update)

    def _beside(self, shrinks: Callable[[], Tensor], applies: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """The results of both; in a recorded step, the first is a branch of its own."""
        side = self._side = self._side or torch.cuda.Stream()
        if not torch.cuda.is_current_stream_capturing():
            return shrinks(), applies()
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            low = shrinks()
        out = applies()
        current.wait_stream(side)
        return low, out

    def _attend(self, step: Step, index: int, part: Attention, qkv: Tensor) -> Tensor:
        keys, values = step.state.layers[index]
        dtype = self.structure.embeddings.dtype
        turned, positions = _turned(part, step)
        query = rotate_and_store(
            qkv, keys, values, positions, step.places, turned, dtype, has_own_tables=turned is not part
        )
        attended = self._attention.attend(
            step, index, query, scaling=part.scale, window=part.window, softcap=part.softcap, sinks=part.sinks
        )
        if part.is_gated:
            gate_heads(attended, qkv)
        return attended.view(step.num_tokens, -1)

    def _logits(self, normed: Tensor) -> Tensor:
        logits, structure = _linear(normed, self.structure.head), self.structure
        if structure.divisor != 1.0:
            logits = logits / structure.divisor
        return logits if structure.softcap is None else torch.tanh(logits / structure.softcap) * structure.softcap


def _turned(part: Attention, step: Step) -> tuple[Attention, Tensor]:
    """Return the attention with the rotary tables of a step, and (T,) int32, the row of each token in them."""
    chunk, rotary = step.chunk, part.rotary
    if chunk is None or chunk.positions is None or rotary is None:
        return part, step.rotary
    rows = torch.arange(step.num_tokens, dtype=torch.int32, device=rotary.cos.device)
    return evolve(part, rotary=chunk.turned(rotary)), rows


def _end(part: Projection, num_rows: int) -> Projection:
    """The last rows of a projection."""
    if isinstance(part, Packed):
        return rows_from(part, -num_rows)
    return Linear(part.weight[-num_rows:], None if part.bias is None else part.bias[-num_rows:])


def _linear(x: Tensor, part: Projection) -> Tensor:
    if isinstance(part, Packed):
        return project_packed(x, part)
    return project(x, part) if len(x) == 1 else linear(x, part.weight, part.bias)


def _parts(x: Tensor, part: Projection) -> Tensor:
    """(T, num_rows), or (T, n, num_rows) float32, whose n rows add up to the result."""
    return _linear(x, part) if len(x) == 1 else _update(x, part)


def _update(x: Tensor, part: Projection) -> Tensor:
    """(T, width), or (T, n, width), whose n rows add up to the result."""
    if isinstance(part, Packed):
        return project_packed(x, part, may_split=True)
    few = project_few(x, part) if len(x) > 1 else None
    return _linear(x, part) if few is None else few


def _gated(x: Tensor, part: Gated) -> Tensor:
    if isinstance(part.gate_up, Packed):
        return project_packed(x, part.gate_up, part.activation)
    if len(x) == 1:
        return project(x, part.gate_up, part.activation)
    few = project_few(x, part.gate_up, part.activation)
    return gated(linear(x, part.gate_up.weight), part.activation) if few is None else few
