"""The parts of a transformer model as values: weights and kinds, without transformers and without kernels.

``dissect.py`` makes them from a loaded model; ``fused.py`` runs them. Layouts of weights are those of ``nn.Linear``:
(outputs, inputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from attrs import frozen
from torch import Tensor

from enginehouse_hf.packed import Packed

__all__ = [
    "Activation",
    "Attention",
    "Clamped",
    "Experts",
    "Gated",
    "Layer",
    "Linear",
    "Modules",
    "Norm",
    "Projection",
    "Recurrent",
    "Rotary",
    "Structure",
    "at_positions",
]

Activation = Literal["silu", "gelu", "gelu_tanh"]


@frozen
class Clamped:
    """Activation of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Attributes:
        limit: largest gate, and largest distance of ``up`` from zero, before.
    """

    alpha: float
    limit: float


@frozen(eq=False)
class Norm:
    """RMS norm.

    Attributes:
        weight: (width,) factors. An offset of one is already added to them, in float32.
        rounds_first: the normalised values are rounded to the type of the model before they are multiplied.
    """

    weight: Tensor
    eps: float
    rounds_first: bool


@frozen(eq=False)
class Linear:
    """Projection: ``weight`` (outputs, inputs), ``bias`` (outputs,)."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]


Projection = Linear | Packed
"""A projection with weights of the type of the model, or of few bits."""


Modules = tuple[tuple[str, int], ...]
"""Names and numbers of outputs of the modules of which a projection consists, in order."""


@frozen(eq=False)
class Rotary:
    """Rotary positions of the first dimensions of each head, the rest is kept.

    Attributes:
        cos, sin: (max_context, rotated dimensions / 2).
        interleaved: neighbouring dimensions are a pair; otherwise those half of the rotated dimensions apart.
        axes: (rotated dimensions / 2,) int64, by which position each pair of dimensions is turned in an image: its time
            (0), row (1) or column (2); None if an image is numbered as text is.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool
    axes: Tensor | None = None


def at_positions(rotary: Rotary, positions: Tensor) -> Rotary:
    """Return the tables of the tokens of an image, (T, rotated dimensions / 2), from (3, T) int64 positions."""
    assert rotary.axes is not None, "the model numbers images as text"
    rows = positions[rotary.axes].T.contiguous()  # the tables are as their indices are
    pairs = torch.arange(rotary.cos.shape[1], device=positions.device)
    return Rotary(rotary.cos[rows, pairs], rotary.sin[rows, pairs], rotary.interleaved)


@frozen(eq=False)
class Attention:
    """Attention of one layer.

    Attributes:
        qkv: joint projection to queries, keys and values.
        norms: of queries and keys; their width is that of a head, or of all heads together.
        window: number of visible positions; None is all.
        softcap: bound of the scores; None is none.
        sinks: (num_query,), for each head the score of a further key whose value is zero; None is none.
        is_gated: the rows of each query head in ``qkv`` are followed by those of its gate, whose sigmoid is a factor of
            the result of the head.
    """

    qkv: Projection
    norms: tuple[Norm, Norm] | None
    rotary: Rotary | None
    output: Projection
    head_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None = None
    is_gated: bool = False


@frozen(eq=False)
class Recurrent:
    """Recurrent module of a layer, in place of attention: ``PooledMixers`` runs it by the ``index`` of the layer."""

    index: int


@frozen(eq=False)
class Gated:
    """Feed-forward part ``down(activation(gate) * up)``; ``gate_up`` is the joint projection."""

    gate_up: Projection
    down: Projection
    activation: Activation


@frozen(eq=False)
class Experts:
    """Feed-forward parts of which a router chooses some for each token, by the softmax of its logits.

    Attributes:
        router: (num_experts, hidden_size).
        num_chosen: experts per token.
        normalises: the weights of the chosen experts are divided by their sum.
        gate_up: (num_experts * 2 * width, hidden_size), expert by expert: the rows of the gate, then as many of the
            other factor; or both in turn, if ``alternates``.
        down: (num_experts * hidden_size, width).
        shared: a part for every token, with the weight of the sigmoid of ``shared_gate``, (1, hidden_size), if given.
    """

    router: Linear
    num_chosen: int
    normalises: bool
    gate_up: Projection
    down: Projection
    activation: Activation | Clamped
    alternates: bool = False
    shared: Gated | None = None
    shared_gate: Tensor | None = None


@frozen(eq=False)
class Layer:
    """``hidden += factor * after(part(before(hidden)))``, first for the attention, then for the feed-forward part."""

    before_attention: Norm | None
    attention: Attention | Recurrent
    after_attention: Norm | None
    before_mlp: Norm | None
    mlp: Gated | Experts
    after_mlp: Norm | None
    factor: float = 1.0


@frozen(eq=False)
class Structure:
    """A causal model.

    Attributes:
        embedding_scale: factor of the embeddings.
        head: projection of the normalised states to logits.
        modules: those of the layers' projections; experts are not among them.
        divisor: of the logits.
        softcap: bound of the logits; None is none.
    """

    embeddings: Tensor
    embedding_scale: float
    layers: list[Layer]
    norm: Norm
    head: Projection
    modules: Mapping[Projection, Modules]
    divisor: float = 1.0
    softcap: float | None = None
