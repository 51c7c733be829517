"""Finds the kind of a part of a transformers model by running its module on a few numbers.

Called by ``dissect.py``. A kind is what ``structure.py`` calls it, or a function of this module computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from enginehouse_hf.cuda.structure import Activation, Clamped, Norm, Rotary
from enginehouse_hf.packed import PackedExperts

__all__ = [
    "NEAR",
    "NotFusable",
    "difference",
    "find_activation",
    "find_gating",
    "find_normalises",
    "find_rotary",
    "first_of",
    "normed",
]

_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}

NEAR = 0.02
"""Relative difference of results of one part that rounding in bfloat16 explains."""


class NotFusable(Exception):
    """The model has a part that is not known; the message names it."""


def first_of(owner: Any, names: Sequence[str]) -> Any:
    """Return the first attribute that exists, of several names of the same part."""
    name = next((name for name in names if hasattr(owner, name)), None)
    if name is None:
        raise NotFusable(f"{type(owner).__name__} has no {' or '.join(names)}")
    return getattr(owner, name)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative difference; infinite for different shapes."""
    if found.shape != expected.shape:
        return math.inf
    return float((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30))


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Compute the norm of (T, width) states."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    if norm.rounds_first:
        wide = wide.to(x.dtype).float()
    return (wide * norm.weight.float()).to(x.dtype)


def find_rotary(tables: tuple[Tensor, Tensor] | None, key: Tensor, expected: Tensor) -> Rotary | None:
    """Return the kind of rotary positions that turns ``key`` into the one that the layer attends with."""
    kinds: list[Rotary | None] = [*_rotary_kinds(tables, key.shape[2]), None]
    best = min(kinds, key=lambda kind: difference(_turned(key, kind), expected))
    if not difference(_turned(key, best), expected) < NEAR:
        raise NotFusable("positions are encoded in an unknown way")
    return best


def _rotary_kinds(tables: tuple[Tensor, Tensor] | None, head_dim: int) -> Iterator[Rotary]:
    if tables is None:
        return
    cos, sin = tables
    half = cos.shape[-1] // 2
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * half > head_dim:
        return
    if 2 * cos.shape[-1] == head_dim:  # each angle once
        yield from (Rotary(cos.contiguous(), sin.contiguous(), interleaved) for interleaved in (False, True))
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        cos, sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
    elif torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        cos, sin = cos[:, ::2].contiguous(), sin[:, ::2].contiguous()
    elif 2 * cos.shape[-1] > head_dim:
        return
    else:
        cos, sin = cos.contiguous(), sin.contiguous()  # one number for each pair already
    yield from (Rotary(cos, sin, interleaved) for interleaved in (False, True))


def _turned(key: Tensor, kind: Rotary | None) -> Tensor:
    """Apply rotary positions to ``key``, (T, H, D), at the positions from 0 on."""
    if kind is None:
        return key
    half = kind.cos.shape[1]
    cos, sin = (table[: len(key), None].float() for table in (kind.cos, kind.sin))
    wide, rest = key[..., : 2 * half].float(), key[..., 2 * half :]
    left, right = (wide[..., ::2], wide[..., 1::2]) if kind.interleaved else wide.chunk(2, -1)
    turned = left * cos - right * sin, right * cos + left * sin
    both = torch.stack(turned, -1).flatten(-2) if kind.interleaved else torch.cat(turned, -1)
    return torch.cat([both.to(key.dtype), rest], -1)


def find_activation(module: Any) -> Activation:
    """Return the name of the function that does what the module's activation does."""
    if not hasattr(module, "act_fn") and hasattr(module, "w1"):
        return "silu"  # written out in such modules
    function = first_of(module, ("act_fn", "activation_fn"))
    sample = torch.linspace(-4.0, 4.0, 257)
    name = next((name for name, one in _ACTIVATIONS.items() if torch.allclose(function(sample), one(sample))), None)
    if name is None:
        raise NotFusable(f"the activation {type(function).__name__} is not known")
    return name


def find_gating(experts: Any) -> tuple[Activation | Clamped, bool]:
    """Return what the experts do with the products of gate and up, and whether the rows of both alternate."""
    plain = experts.plain if isinstance(experts, PackedExperts) else experts
    kinds: list[Activation | Clamped] = [*_ACTIVATIONS]
    if hasattr(plain, "alpha") and hasattr(plain, "limit"):
        kinds.append(Clamped(float(plain.alpha), float(plain.limit)))
    sample = 4.0 * torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    expected = plain._apply_gate(sample)
    for alternates in (False, True):
        gate, up = (sample[:, ::2], sample[:, 1::2]) if alternates else sample.chunk(2, -1)
        for kind in kinds:
            if torch.allclose(_activated(gate, up, kind), expected, rtol=1e-4, atol=1e-5):
                return kind, alternates
    raise NotFusable(f"the activation of {type(plain).__name__} is not known")


def _activated(gate: Tensor, up: Tensor, kind: Activation | Clamped) -> Tensor:
    if not isinstance(kind, Clamped):
        return _ACTIVATIONS[kind](gate) * up
    gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
    return (up + 1.0) * gate * torch.sigmoid(kind.alpha * gate)


def find_normalises(router: Any, hidden_size: int) -> bool:
    """True if the router divides the weights of the chosen experts by their sum; checks that it is a known one."""
    weight = router.weight.detach()
    sample = torch.randn(5, hidden_size, generator=torch.Generator().manual_seed(0)).to(weight)
    _, scores, ids = router(sample)
    logits = linear(sample, weight, getattr(router, "bias", None))
    chances = torch.softmax(logits.float(), -1).gather(1, ids)
    for normalises in (True, False):
        expected = chances / chances.sum(-1, keepdim=True) if normalises else chances
        if difference(scores, expected) < NEAR:
            return normalises
    raise NotFusable(f"{type(router).__name__} chooses experts in an unknown way")
