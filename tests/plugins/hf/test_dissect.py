"""Models taken apart: the known parts, computed in plain torch, give the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.nn.functional import gelu, linear, silu
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from enginehouse_hf.attention import ATTENTION_NAME
from enginehouse_hf.cuda.dissect import dissect
from enginehouse_hf.cuda.kinds import NotFusable
from enginehouse_hf.cuda.structure import (
    Attention,
    Clamped,
    Experts,
    Gated,
    Layer,
    Linear,
    Norm,
    Rotary,
    Structure,
    at_positions,
)

pytestmark = pytest.mark.hf

_NUM_TOKENS = 30  # more than the windows of the tiny models

RandomModel = Callable[[str], Path]


def _logits(parts: Structure, token_ids: Tensor) -> Tensor:
    """(T, vocab_size): what the parts mean, without a cache."""
    hidden = parts.embeddings[token_ids] * parts.embedding_scale
    for layer in parts.layers:
        update = _attend(_normed(hidden, layer.before_attention), layer.attention)
        hidden = hidden + layer.factor * _normed(update, layer.after_attention)
        update = _feed_forward(_normed(hidden, layer.before_mlp), layer.mlp)
        hidden = hidden + layer.factor * _normed(update, layer.after_mlp)
    logits = linear(_normed(hidden, parts.norm), parts.head.weight, parts.head.bias) / parts.divisor
    return logits if parts.softcap is None else torch.tanh(logits / parts.softcap) * parts.softcap


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight


def _attend(x: Tensor, part: Attention) -> Tensor:
    qkv = linear(x, part.qkv.weight, part.qkv.bias)
    num_query = part.output.weight.shape[1]
    query, key, value = qkv.split([num_query, *[(qkv.shape[1] - num_query) // 2] * 2], 1)
    if part.norms is not None:
        query, key = (
            _normed(one.unflatten(1, (-1, len(norm.weight))), norm).flatten(1)
            for one, norm in zip((query, key), part.norms, strict=True)
        )
    query, key, value = (one.unflatten(1, (-1, part.head_dim)).transpose(0, 1) for one in (query, key, value))
    query, key = _turned(query, part.rotary), _turned(key, part.rotary)
    key, value = (one.repeat_interleave(len(query) // len(key), 0) for one in (key, value))
    scores = query @ key.transpose(1, 2) * part.scale
    if part.softcap is not None:
        scores = torch.tanh(scores / part.softcap) * part.softcap
    age = torch.arange(len(x))[:, None] - torch.arange(len(x))[None]
    hides = (age < 0) | (age >= (part.window or len(x)))
    scores = scores.masked_fill(hides, float("-inf"))
    if part.sinks is not None:
        scores = torch.cat([scores, part.sinks[:, None, None].expand(-1, len(x), 1)], -1)
    attended = torch.softmax(scores, -1)[..., : len(x)] @ value
    return linear(attended.transpose(0, 1).flatten(1), part.output.weight, part.output.bias)


def _turned(x: Tensor, rotary: Rotary | None) -> Tensor:
    """``x`` is (heads, T, D)."""
    if rotary is None:
        return x
    half = rotary.cos.shape[1]
    cos, sin = rotary.cos[: x.shape[1]], rotary.sin[: x.shape[1]]
    pairs = torch.arange(2 * half).view(half, 2) if rotary.interleaved else torch.arange(2 * half).view(2, half).T
    turned = x.clone()
    left, right = x[..., pairs[:, 0]], x[..., pairs[:, 1]]
    turned[..., pairs[:, 0]], turned[..., pairs[:, 1]] = left * cos - right * sin, right * cos + left * sin
    return turned


def _feed_forward(x: Tensor, part: Gated | Experts) -> Tensor:
    if isinstance(part, Gated):
        return linear(_activated(*linear(x, part.gate_up.weight).chunk(2, 1), part), part.down.weight, part.down.bias)
    chances = torch.softmax(linear(x, part.router.weight, part.router.bias), -1)
    weights, ids = chances.topk(part.num_chosen, -1)
    if part.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    num_experts = len(part.router.weight)
    both = _product("th,tkih->tki", x, part.gate_up, ids, num_experts)
    gate, up = (both[..., ::2], both[..., 1::2]) if part.alternates else both.chunk(2, -1)
    update = _product("tki,tkhi->tkh", _activated(gate, up, part), part.down, ids, num_experts)
    result = torch.einsum("tkh,tk->th", update, weights)
    if part.shared is not None:
        shared = _feed_forward(x, part.shared)
        result += shared if part.shared_gate is None else torch.sigmoid(linear(x, part.shared_gate)) * shared
    return result


def _product(form: str, x: Tensor, part: Linear, ids: Tensor, num_experts: int) -> Tensor:
    """With the weights of the chosen experts."""
    product = torch.einsum(form, x, part.weight.unflatten(0, (num_experts, -1))[ids])
    return product if part.bias is None else product + part.bias.view(num_experts, -1)[ids]


def _activated(gate: Tensor, up: Tensor, part: Gated | Experts) -> Tensor:
    kind = part.activation
    if isinstance(kind, Clamped):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return (up + 1) * gate * torch.sigmoid(kind.alpha * gate)
    active: dict[str, Any] = {"silu": silu, "gelu": gelu, "gelu_tanh": lambda x: gelu(x, approximate="tanh")}
    return active[kind](gate) * up  # type: ignore[no-any-return]


def _load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()


def test_parts_of_a_family_give_its_logits(random_model: RandomModel, fused_family: str) -> None:
    model = _load(random_model(fused_family))
    parts = dissect(model, 64)
    token_ids = torch.arange(_NUM_TOKENS) * 37 % model.config.get_text_config().vocab_size
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(token_ids[None]).logits[0]  # whose weights are views of the joint projections by now
        found = _logits(parts, token_ids)

    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()
    for part, modules in parts.modules.items():
        weights = [model.get_submodule(name).weight for name, _ in modules]
        assert [len(weight) for weight in weights] == [num_rows for _, num_rows in modules]
        assert torch.equal(torch.cat(weights), part.weight)
    assert {parts.layers[0].attention.qkv, parts.layers[-1].attention.output} <= parts.modules.keys()


@pytest.mark.parametrize("family", ["idefics3", "llava", "gemma3", "qwen2_5_vl"])
def test_parts_of_a_model_that_reads_images_give_its_logits(vision_model: RandomModel, family: str) -> None:
    """Its text model, from states instead of token ids, and at positions of rows and columns where it has these."""
    kind = AutoModelForImageTextToText
    model = kind.from_pretrained(vision_model(family), dtype=torch.float32, attn_implementation=ATTENTION_NAME).eval()
    parts = dissect(model, 64)
    states = torch.randn(_NUM_TOKENS, parts.embeddings.shape[1], generator=torch.Generator().manual_seed(0))
    positions = torch.arange(_NUM_TOKENS)
    parts = evolve(parts, embeddings=states, embedding_scale=1.0)
    if family == "qwen2_5_vl":
        positions = torch.stack([torch.full_like(positions, 3), 3 + positions // 6, 3 + positions % 6])
        parts = evolve(parts, layers=[_at_positions(layer, positions) for layer in parts.layers])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(inputs_embeds=states[None], position_ids=positions.unsqueeze(-2)).logits[0]
        found = _logits(parts, torch.arange(_NUM_TOKENS))

    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def _at_positions(layer: Layer, positions: Tensor) -> Layer:
    attention = layer.attention
    assert isinstance(attention, Attention) and attention.rotary is not None
    rotary = at_positions(attention.rotary, positions)
    assert rotary.cos.is_contiguous() and rotary.sin.is_contiguous()  # as kernels read them
    return evolve(layer, attention=evolve(attention, rotary=rotary))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phi", "norms input_layernorm"),
        ("gpt_neox", "built in another way|norms"),
    ],
)
def test_a_model_with_an_unknown_part_is_not_taken_apart(random_model: RandomModel, name: str, reason: str) -> None:
    with pytest.raises(NotFusable, match=reason):
        dissect(_load(random_model(name)), 64)


def test_sinks_beside_an_unknown_weight_are_not_taken_apart(random_model: RandomModel) -> None:
    model = _load(random_model("gpt_oss"))
    model.model.layers[0].self_attn.register_parameter("other", torch.nn.Parameter(torch.zeros(4)))

    with pytest.raises(NotFusable, match="attention sinks are not the only weight"):
        dissect(model, 64)


def test_a_router_that_answers_in_another_way_is_not_taken_apart(random_model: RandomModel) -> None:
    """As those of other versions of transformers do; not even its results are of the expected types."""
    model = _load(random_model("mixtral"))
    for layer in model.model.layers:
        choose = layer.mlp.gate.forward
        layer.mlp.gate.forward = lambda x, choose=choose: (choose(x)[0], choose(x)[1], choose(x)[1])

    with pytest.raises(NotFusable, match=r"built in another way|unknown way"):
        dissect(model, 64)
