"""Attention within each text of a packed row, plugged into transformers models; nothing is padded.

One SDPA call per run of texts of equal length; on CUDA in 16 bits one call of torch's kernel for texts of any length.
Bidirectional or causal, as the layer says, with sliding windows, grouped heads and soft-capped scores.

Source: the custom attention route that transformers documents under ``AttentionInterface``; the meaning of
``sliding_window`` (a token sees those less than a window away) is that of its masks.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from enginehouse_hf.attention import UnsupportedAttention
from enginehouse_hf.pooling.packing import PackedTexts, Run

__all__ = ["PACKED_ATTENTION", "packed_attention"]

PACKED_ATTENTION = "enginehouse_packed"

_MAX_DIM = 256


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    enginehouse_texts: PackedTexts,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **_ignored: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls in each layer, with its signature.

    Args:
        query: (1, num_heads, T, D); ``key`` and ``value`` may have fewer heads.

    Returns:
        (1, T, num_heads, D of the values), and None for the weights.

    Raises:
        UnsupportedAttention: attention sinks, or a mask or bias of the model's own.
        PassAborted: the pass was aborted.
    """
    if s_aux is not None:
        raise UnsupportedAttention("attention sinks")
    if attention_mask is not None:
        raise UnsupportedAttention("a mask of the model's own")
    enginehouse_texts.check()
    scores = _Scores(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        is_causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
    )
    if softcap is None and _fits(query, value):
        return _attend_together(enginehouse_texts, query, key, value, scores)[None], None
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
    for run in enginehouse_texts.runs():
        parts = (_rectangle(tensor, run) for tensor in (query, key, value))
        result = _attend(*parts, scores, _mask(enginehouse_texts, run.length, scores, query.device))
        output[0, run.columns] = result.transpose(1, 2).flatten(0, 1)
    return output, None


@frozen
class _Scores:
    """Rules of scores: the keys that a query sees, and the factors before the softmax."""

    scale: float
    window: int | None
    softcap: float | None
    is_causal: bool


def _rectangle(tensor: Tensor, run: Run) -> Tensor:
    """Return the columns of a run, of (1, H, T, D), as (count, H, length, D): a view."""
    return tensor[0, :, run.columns].unflatten(1, (run.count, run.length)).transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: _Scores, mask: Tensor | None) -> Tensor:
    """Attend within (n, H, L, D); ``mask`` is (L, L) bool, True where a query sees a key."""
    group = query.shape[1] // key.shape[1]
    if scores.softcap is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=scores.scale,
            is_causal=scores.is_causal and mask is None,
            enable_gqa=group > 1,
        )
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    capped = torch.tanh(query @ key.transpose(2, 3) * (scores.scale / scores.softcap)) * scores.softcap
    if mask is None and scores.is_causal:
        mask = torch.ones(capped.shape[-2:], dtype=torch.bool, device=capped.device).tril()
    capped = capped if mask is None else capped.masked_fill(~mask, float("-inf"))
    return torch.softmax(capped, -1, dtype=torch.float32).to(value.dtype) @ value


def _mask(texts: PackedTexts, length: int, scores: _Scores, device: torch.device) -> Tensor | None:
    """Return the (length, length) mask of a sliding window; None if every token sees all that its layer allows."""
    window = scores.window
    if window is None or length <= window:
        return None
    kind = length, window, scores.is_causal
    if kind not in texts.masks:
        at = torch.arange(length, device=device)
        ahead = at[None] - at[:, None]
        texts.masks[kind] = (ahead > -window) & (ahead <= 0 if scores.is_causal else ahead < window)
    return texts.masks[kind]


def _fits(query: Tensor, value: Tensor) -> bool:
    """True if torch's kernel for texts of different lengths takes such tensors."""
    dim = query.shape[3]
    is_small = dim == value.shape[3] and dim <= _MAX_DIM and dim % 8 == 0
    return is_small and query.is_cuda and query.dtype in {torch.bfloat16, torch.float16}


def _attend_together(texts: PackedTexts, query: Tensor, key: Tensor, value: Tensor, scores: _Scores) -> Tensor:
    """(T, H, D) of all texts in one call."""
    kernel, names = _kernel()
    rows = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    form: dict[str, Any] = {}
    if "num_splits" in names:
        form["num_splits"] = 1  # else the longest text of a pass decides how the sums of the others are split
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in names:
            form["enable_gqa"] = True
        else:
            rows[1:] = [row.repeat_interleave(query.shape[1] // key.shape[1], 1) for row in rows[1:]]
    ends, longest = texts.text_ends(), texts.lengths[-1]
    left = -1 if scores.window is None else scores.window - 1
    sides = (left, 0 if scores.is_causal else left)
    result: Tensor = kernel(*rows, ends, ends, longest, longest, scale=scores.scale, window_size=sides, **form)
    return result


@cache
def _kernel() -> tuple[Any, frozenset[str]]:
    """Return torch's attention over texts of different lengths, and the names of its parameters."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - for CUDA only

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
