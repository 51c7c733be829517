"""BERT's layers in few operations, for float32 on the CPU.

A short text spends as much time between operations as in them. BERT, RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA have
layers of the same parts under the same names. Of these, one product makes query, key and value, and GELU and the
residual sums are computed with the products before them. Called when a model is opened; the caller compares the
numbers before it uses this.

Source: the architecture of Devlin et al. 2019, *BERT*, by the names that transformers gives its parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.activations import GELUActivation

from enginehouse_hf.linears import PreparedLinear, Replaced, is_supported
from enginehouse_hf.pooling.packing import PackedTexts

__all__ = ["fuse_layers"]

_PARTS = {
    "attention.self.query": nn.Linear,
    "attention.self.key": nn.Linear,
    "attention.self.value": nn.Linear,
    "attention.output.dense": nn.Linear,
    "attention.output.LayerNorm": nn.LayerNorm,
    "intermediate.dense": nn.Linear,
    "intermediate.intermediate_act_fn": GELUActivation,
    "output.dense": nn.Linear,
    "output.LayerNorm": nn.LayerNorm,
}
"""All parts of a layer but dropout."""


class _FusedLayer(nn.Module):
    """Replacement of a layer; keeps no copy of its weights in plain order."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention = layer.attention.self
        self._shape = attention.num_attention_heads, attention.attention_head_size
        self._project = PreparedLinear(_joined([attention.query, attention.key, attention.value]))
        self._mix, self._mix_norm = PreparedLinear(layer.attention.output.dense), layer.attention.output.LayerNorm
        self._widen = PreparedLinear(layer.intermediate.dense)
        self._narrow, self._norm = PreparedLinear(layer.output.dense), layer.output.LayerNorm

    def forward(self, states: Tensor, *_arguments: Any, enginehouse_texts: PackedTexts, **_named: Any) -> Tensor:
        """(1, T, hidden_size)."""
        enginehouse_texts.check()
        rows = states[0]
        rows = self._mix_norm(self._mix.plus(self._attend(self._project(rows), enginehouse_texts), rows))
        result: Tensor = self._norm(self._narrow.plus(self._widen.with_gelu(rows), rows))
        return result[None]

    def _attend(self, projected: Tensor, texts: PackedTexts) -> Tensor:
        """(T, hidden_size) from query, key and value side by side, (T, 3 x hidden_size)."""
        parts = []
        for run in texts.runs():
            shape = run.count, run.length, 3, *self._shape
            query, key, value = projected[run.columns].view(shape).permute(2, 0, 3, 1, 4)
            parts.append(scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2).flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _joined(linears: list[nn.Linear]) -> nn.Linear:
    """Return one layer whose output is those of several, side by side."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=linears[0].bias is not None, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), requires_grad=False)
    return joined


def fuse_layers(model: nn.Module) -> Replaced:
    """Replace the layers of a packed model that have exactly these parts; return those that were replaced."""
    replaced: Replaced = []
    if not is_supported():
        return replaced
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            replaced += [(parent, name, child) for name, child in parent.named_children() if _is_known(child)]
    for parent, name, child in replaced:
        setattr(parent, name, _FusedLayer(child))
    return replaced


def _is_known(layer: nn.Module) -> bool:
    found = {
        name: module
        for name, module in layer.named_modules()
        if not list(module.children()) and not isinstance(module, nn.Dropout)
    }
    if found.keys() != _PARTS.keys() or not all(type(found[name]) is kind for name, kind in _PARTS.items()):
        return False
    return not getattr(layer, "is_decoder", False) and all(one.dtype == torch.float32 for one in layer.parameters())
