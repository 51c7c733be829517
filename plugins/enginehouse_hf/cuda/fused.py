"""Llama-like models as a short list of kernels: the same arithmetic, an eighth of the launches.

Uses the weights and rotary tables of the loaded transformers model; joint projections are built in place, so that no
weight is in memory twice. :func:`fuse` refuses any deviation from the pattern, and the loader compares the logits with
those of transformers' own layers before it uses the result.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from enginehouse_hf.cuda.attention import PoolAttention
from enginehouse_hf.cuda.layered import States
from enginehouse_hf.cuda.layers import add_norm, rotate_and_store, silu_times
from enginehouse_hf.cuda.step import Step
from enginehouse_hf.cuda.vector import project

__all__ = ["FusedNetwork", "NotFusable", "fuse"]

_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class NotFusable(Exception):
    """The model differs from the pattern; the message describes the difference."""


@frozen(eq=False)
class _Norm:
    weight: Tensor
    eps: float


@frozen(eq=False)
class _Layer:
    """Weights of one layer; ``qkv`` and ``gate_up`` are joint projections. ``head_norms``: of queries and keys."""

    input_norm: _Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[Tensor, Tensor, float] | None
    output: Tensor
    mlp_norm: _Norm
    gate_up: Tensor
    down: Tensor
    scale: float
    window: int | None


class FusedNetwork:
    """Implements :class:`enginehouse_hf.cuda.networks.Network` and, by parts, ``LayeredNetwork``.

    Build it with :func:`fuse`.
    """

    name = "fused layers"

    def __init__(
        self,
        layers: list[_Layer],
        embeddings: Tensor,
        norm: _Norm,
        head: Tensor,
        rope: tuple[Tensor, Tensor],
        attention: PoolAttention,
    ) -> None:
        self._layers, self._embeddings, self._norm, self._head = layers, embeddings, norm, head
        self._rope, self._attention = rope, attention

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
        hidden = embedding(step.token_ids, self._embeddings)
        layers = range(len(self._layers))[: step.num_layers]
        if _is_single(step) and step.rows is None:
            self._run_single(step, hidden, layers)
            return self.head(hidden)
        update = self._run_many(step, hidden, layers)
        if step.rows is not None:
            hidden, update = hidden.index_select(0, step.rows), update.index_select(0, step.rows)
        if not len(hidden):
            return hidden.new_empty(0, self._head.shape[0])
        return linear(add_norm(hidden, update, self._norm.weight, self._norm.eps), self._head)

    def run_layers(self, step: Step, states: States, begin: int, end: int) -> None:
        """See :class:`enginehouse_hf.cuda.layered.LayeredNetwork`."""
        if not begin:
            step.begin()
            states.hidden.copy_(embedding(step.token_ids, self._embeddings))
        layers = range(begin, end)
        if _is_single(step):
            self._run_single(step, states.hidden, layers, states.before)
        else:
            states.hidden.add_(self._run_many(step, states.hidden, layers, states.before))

    def write_keys(self, step: Step, hidden: Tensor, begin: int) -> None:
        """See :class:`enginehouse_hf.cuda.layered.LayeredNetwork`."""
        for index, layer in enumerate(self._layers[begin:], begin):
            keys, values = step.state.layers[index]
            num_rows = 2 * keys.shape[1] * keys.shape[2]  # the joint projection ends with keys and values
            weight, norm = layer.qkv[-num_rows:], layer.input_norm
            bias = layer.qkv_bias[-num_rows:] if layer.qkv_bias is not None else None
            if _is_single(step):
                projected = project(hidden, weight, bias=bias, norm=(norm.weight, norm.eps))
            else:
                projected = linear(add_norm(hidden, None, norm.weight, norm.eps), weight, bias)
            rotate_and_store(projected, keys, values, step.positions, step.places, self._rope, layer.head_norms)

    def head(self, hidden: Tensor) -> Tensor:
        """See :class:`enginehouse_hf.cuda.layered.LayeredNetwork`."""
        norm = self._norm
        if len(hidden) == 1:
            return project(hidden, self._head, norm=(norm.weight, norm.eps))
        return linear(add_norm(hidden, None, norm.weight, norm.eps), self._head)

    def _run_many(self, step: Step, hidden: Tensor, layers: range, before: Tensor | None = None) -> Tensor:
        """Run some layers: the result is ``hidden``, which is changed, plus the returned tensor.

        The states before the last of the layers are written to ``before``.
        """
        update: Tensor | None = None
        for index in layers:
            layer = self._layers[index]
            normed = add_norm(hidden, update, layer.input_norm.weight, layer.input_norm.eps)
            if before is not None and index == layers[-1]:
                before.copy_(hidden)
            attended = self._attend(step, index, layer, linear(normed, layer.qkv, layer.qkv_bias))
            update = linear(attended, layer.output)
            normed = add_norm(hidden, update, layer.mlp_norm.weight, layer.mlp_norm.eps)
            update = linear(silu_times(linear(normed, layer.gate_up)), layer.down)
        assert update is not None
        return update

    def _run_single(self, step: Step, hidden: Tensor, layers: range, before: Tensor | None = None) -> None:
        """Run one token of one sequence with matrix-vector products only; ``hidden`` becomes the result."""
        for index in layers:
            layer = self._layers[index]
            if before is not None and index == layers[-1]:
                before.copy_(hidden)
            qkv = project(hidden, layer.qkv, bias=layer.qkv_bias, norm=(layer.input_norm.weight, layer.input_norm.eps))
            project(self._attend(step, index, layer, qkv), layer.output, residual=hidden)
            gated = project(hidden, layer.gate_up, norm=(layer.mlp_norm.weight, layer.mlp_norm.eps), is_gated=True)
            project(gated, layer.down, residual=hidden)

    def _attend(self, step: Step, index: int, layer: _Layer, qkv: Tensor) -> Tensor:
        keys, values = step.state.layers[index]
        query = rotate_and_store(qkv, keys, values, step.positions, step.places, self._rope, layer.head_norms)
        attended = self._attention.attend(step, index, query, scaling=layer.scale, window=layer.window, softcap=None)
        return attended.view(step.num_tokens, -1)


def _is_single(step: Step) -> bool:
    return step.num_tokens == 1 and step.num_decodes == 1


def fuse(model: Any, windows: dict[int, int | None], max_context: int, attention: PoolAttention) -> FusedNetwork:
    """Return the fused form of a loaded model.

    Args:
        model: on one CUDA device; its joint projections become views of one tensor each.
        windows: the sliding window observed in each layer.
        max_context: length of the rotary tables.
        attention: attention over the pool.

    Raises:
        NotFusable: the model differs from the pattern.
    """
    name = type(model).__name__
    if name not in _CLASSES:
        raise NotFusable(f"{name} is not one of the fused model classes")
    try:
        body = model.model
        checked = [_check_layer(layer) for layer in body.layers]
        rope = _rope(body, max_context, model.dtype, checked[0][2])
        layers = [_fuse_layer(layer, windows[index]) for index, layer in enumerate(body.layers)]
        embeddings, norm, head = body.embed_tokens.weight, _norm(body.norm), model.lm_head.weight
    except (AttributeError, IndexError, KeyError) as error:
        raise NotFusable(f"{name} is built in another way: {error}") from error
    return FusedNetwork(layers, embeddings, norm, head, rope, attention)


def _check_layer(layer: Any) -> tuple[int, int, int]:
    """Return the sizes of a layer that matches the pattern: query heads, key heads, head dimension. Changes nothing."""
    attention, mlp = layer.self_attn, layer.mlp
    for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj,
                 mlp.gate_proj, mlp.up_proj, mlp.down_proj):  # fmt: skip
        if type(part) is not nn.Linear:
            raise NotFusable(f"a projection is a {type(part).__name__}")
    if any(part.bias is not None for part in (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)):
        raise NotFusable("a projection has a bias where the pattern has none")
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise NotFusable(f"the activation is {type(mlp.act_fn).__name__}")
    dim = int(attention.head_dim)
    if dim & (dim - 1) or dim < 16:
        raise NotFusable(f"heads have {dim} dimensions, which is not a power of two")
    if attention.q_proj.weight.shape[0] % dim or attention.k_proj.weight.shape != attention.v_proj.weight.shape:
        raise NotFusable("keys and values have different sizes")
    return attention.q_proj.weight.shape[0] // dim, attention.k_proj.weight.shape[0] // dim, dim


def _fuse_layer(layer: Any, window: int | None) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    biases = [part.bias for part in projections]
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        raise NotFusable("only some projections of the attention have a bias")
    has_norms = hasattr(attention, "q_norm")
    return _Layer(
        input_norm=_norm(layer.input_layernorm),
        qkv=_joined(*projections),
        qkv_bias=None if biases[0] is None else torch.cat([bias.detach() for bias in biases]),
        head_norms=_head_norms(attention) if has_norms else None,
        output=attention.o_proj.weight.detach(),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_joined(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight.detach(),
        scale=float(attention.scaling),
        window=window,
    )


def _head_norms(attention: Any) -> tuple[Tensor, Tensor, float]:
    query, key = _norm(attention.q_norm), _norm(attention.k_norm)
    return query.weight, key.weight, query.eps


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.detach(), float(module.variance_epsilon))


def _joined(*parts: nn.Linear) -> Tensor:
    """Join weights; those of the modules become views of the result, so that transformers' layers still work."""
    weight = torch.cat([part.weight.detach() for part in parts])
    for part, own in zip(parts, weight.split([part.weight.shape[0] for part in parts]), strict=True):
        part.weight = nn.Parameter(own, requires_grad=False)
    return weight


def _rope(body: Any, max_context: int, dtype: torch.dtype, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, computed by the model itself; each (max_context, head_dim / 2)."""
    device = body.embed_tokens.weight.device
    positions = torch.arange(max_context, device=device)[None]
    with torch.inference_mode():
        tables = body.rotary_emb(torch.empty(1, 1, 1, dtype=dtype, device=device), positions)
    halves = []
    for table in tables:
        if table.shape != (1, max_context, head_dim) or table.dtype != dtype:
            raise NotFusable("rotary positions cover a part of each head only")
        left, right = table[0].chunk(2, -1)
        if not torch.equal(left, right):
            raise NotFusable("rotary positions turn other pairs of dimensions")
        halves.append(left.contiguous())
    return halves[0], halves[1]
