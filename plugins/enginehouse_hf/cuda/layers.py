"""Small Triton kernels between the matrix products of a transformer layer.

Called by ``fused.py`` and ``step.py`` with contiguous tensors on one device. They round where transformers rounds
(after the residual sum, after the normalisation), so that both give the same text; in between, they compute in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["add_norm", "begin_step", "rotate_and_store", "silu_times"]


@triton.jit
def _add_norm(hidden, update, weight, out, eps, WIDTH: tl.constexpr, HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    value = tl.load(hidden + row * WIDTH + columns, mask=inside, other=0.0)
    if HAS_UPDATE:
        added = tl.load(update + row * WIDTH + columns, mask=inside, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(hidden + row * WIDTH + columns, value, mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    normed = (wide * scale).to(value.dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (normed * factor).to(value.dtype), mask=inside)


def add_norm(hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of ``hidden + update``; the sum is written back to ``hidden``, (T, width)."""
    num_tokens, width = hidden.shape
    out = torch.empty_like(hidden)
    block = triton.next_power_of_2(width)
    warps = 4 if block <= 2048 else 8
    _add_norm[(num_tokens,)](
        hidden,
        hidden if update is None else update,
        weight,
        out,
        eps,
        width,
        update is not None,
        block,
        num_warps=warps,
    )
    return out


@triton.jit
def _rotate_and_store(
    qkv, query, keys, values, positions, targets, cos, sin, query_weight, key_weight, eps,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    is_query = heads < NUM_QUERY
    is_key = (heads >= NUM_QUERY) & (heads < NUM_QUERY + NUM_KV)
    is_value = (heads >= NUM_QUERY + NUM_KV) & (heads < NUM_QUERY + 2 * NUM_KV)
    inside = (heads < NUM_QUERY + 2 * NUM_KV)[:, None]
    source = qkv + token * (NUM_QUERY + 2 * NUM_KV) * 2 * HALF + heads[:, None] * 2 * HALF + half[None, :]
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + HALF, mask=inside, other=0.0)
    kind = low.dtype
    left, right = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(left * left, 1) + tl.sum(right * right, 1)) / (2 * HALF)
        scale = tl.rsqrt(mean + eps)[:, None]
        low_weight = tl.where(
            is_query[:, None], tl.load(query_weight + half)[None, :], tl.load(key_weight + half)[None, :]
        ).to(tl.float32)
        high_weight = tl.where(
            is_query[:, None], tl.load(query_weight + HALF + half)[None, :], tl.load(key_weight + HALF + half)[None, :]
        ).to(tl.float32)
        left = ((left * scale).to(kind).to(tl.float32) * low_weight).to(kind).to(tl.float32)
        right = ((right * scale).to(kind).to(tl.float32) * high_weight).to(kind).to(tl.float32)
    position = tl.load(positions + token).to(tl.int64)
    target = tl.load(targets + token).to(tl.int64)
    cosine = tl.load(cos + position * HALF + half).to(tl.float32)[None, :]
    sine = tl.load(sin + position * HALF + half).to(tl.float32)[None, :]
    turned_low = (left * cosine - right * sine).to(kind)
    turned_high = (right * cosine + left * sine).to(kind)
    at_query = query + (token * NUM_QUERY + heads)[:, None] * 2 * HALF + half[None, :]
    tl.store(at_query, turned_low, mask=is_query[:, None])
    tl.store(at_query + HALF, turned_high, mask=is_query[:, None])
    at_key = keys + (target * NUM_KV + heads - NUM_QUERY)[:, None] * 2 * HALF + half[None, :]
    tl.store(at_key, turned_low, mask=is_key[:, None])
    tl.store(at_key + HALF, turned_high, mask=is_key[:, None])
    at_value = values + (target * NUM_KV + heads - NUM_QUERY - NUM_KV)[:, None] * 2 * HALF + half[None, :]
    tl.store(at_value, low, mask=is_value[:, None])
    tl.store(at_value + HALF, high, mask=is_value[:, None])


def rotate_and_store(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    targets: Tensor,
    rope: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Apply rotary embeddings to queries and keys, store keys and values in the pool; returns the queries.

    Args:
        qkv: (T, (num_query + 2 num_kv) * head_dim), result of the joint projection.
        keys: one layer of the pool, (num_positions, num_kv, head_dim); ``values`` alike.
        positions: (T,) int32, positions in their sequences.
        targets: (T,) int32, places in the pool.
        rope: cosines and sines, each (max_context, head_dim / 2).
        norms: weights of the RMS norms of queries and keys, (head_dim,), and their epsilon; None without norms.

    Returns:
        (T, num_query, head_dim).
    """
    num_kv, head_dim = keys.shape[1:]
    num_heads = qkv.shape[1] // head_dim
    num_query = num_heads - 2 * num_kv
    query = qkv.new_empty(qkv.shape[0], num_query, head_dim)
    query_weight, key_weight, eps = norms if norms is not None else (qkv, qkv, 0.0)
    block = 8
    _rotate_and_store[(qkv.shape[0], triton.cdiv(num_heads, block))](
        qkv, query, keys, values, positions, targets, *rope, query_weight, key_weight, eps,
        num_query, num_kv, head_dim // 2, norms is not None, block, num_warps=4 if head_dim > 64 else 2,
    )  # fmt: skip
    return query


@triton.jit
def _silu_times(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * 2 * WIDTH + columns, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * WIDTH + WIDTH + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_times(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of (T, 2 * width), which contains both side by side; (T, width)."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, width)
    block = min(2048, triton.next_power_of_2(width))
    _silu_times[(num_tokens, triton.cdiv(width, block))](gate_up, out, width, block, num_warps=4)
    return out


@triton.jit(do_not_specialize=["num_tokens", "stride"])
def _begin_step(tokens, last, table, token_ids, num_tokens, stride, table_stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_tokens
    given = tl.load(tokens + index, mask=inside, other=0)
    slot = tl.load(tokens + stride + index, mask=inside, other=0).to(tl.int64)
    position = tl.load(tokens + 2 * stride + index, mask=inside, other=0)
    place = tl.load(tokens + 3 * stride + index, mask=inside, other=0)
    drawn = tl.load(last + slot, mask=inside, other=0)
    tl.store(token_ids + index, tl.where(given < 0, drawn, given).to(tl.int64), mask=inside)
    tl.store(table + slot * table_stride + position, place, mask=inside)


def begin_step(tokens: Tensor, last: Tensor, table: Tensor, token_ids: Tensor) -> None:
    """Write the places of new tokens to the table, and look up token ids that were drawn on the device.

    Args:
        tokens: (4, at least T) int32: token ids (-1: the last one drawn for the slot), slots, positions, places.
        last: (num_slots,) int32, the last token drawn for each slot.
        table: (num_slots, max_context) int32, the place of every position; changed.
        token_ids: (T,) int64, filled.
    """
    num_tokens = token_ids.shape[0]
    _begin_step[(triton.cdiv(num_tokens, 256),)](
        tokens, last, table, token_ids, num_tokens, tokens.stride(0), table.stride(0), 256
    )
