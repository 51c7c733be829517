"""Norms and rotary positions of queries and keys, and storing keys and values in the pool.

A kernel for any number of tokens, called by ``fused.py``; for one token that of ``decode_attention.py`` does the same,
without another launch. They round where transformers rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.kv_tensor import KvTensor, store_heads
from enginehouse_hf.cuda.layers import add_norm, sum_of_parts
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_results, start_next
from enginehouse_hf.cuda.structure import Attention

__all__ = ["Rotation", "rotate_and_store", "rotate_heads", "rotation_of"]


@triton.jit
def _norm_factors(query_weight, key_weight, column, is_dim, is_query):
    """(HEADS, COLUMNS) factors of the norms of queries and keys, float32."""
    of_query = tl.load(query_weight + column[None, :], mask=is_dim, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column[None, :], mask=is_dim, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _partners(column, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """If columns are turned, if they are the first of their pair, the other of the pair, and its number."""
    is_turned = column < 2 * HALF
    if INTERLEAVED:
        return is_turned, column % 2 == 0, tl.where(is_turned, column ^ 1, column), column // 2
    else:
        is_left = column < HALF
        partner = tl.where(is_turned, tl.where(is_left, column + HALF, column - HALF), column)
        return is_turned, is_left, partner, tl.where(is_left, column, column - HALF)


@triton.jit
def rotate_heads(
    qkv, keys, values, key_scales, value_scales, positions, targets, cos, sin, query_weight, key_weight, query_eps,
    key_eps, token, heads, column, stores,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr, NUM_GATES: tl.constexpr, PACKS_KEYS: tl.constexpr,
    PACKS_VALUES: tl.constexpr, PARTS: tl.constexpr, HAS_OWN_TABLES: tl.constexpr, kind: tl.constexpr,
):  # fmt: skip
    """Wait for ``qkv``; norm and turn some heads of a token, and store keys and values among them if ``stores``.

    Args:
        heads: (HEADS,), queries, then keys, then values; others are ignored.
        column: (COLUMNS,), from 0 on, at least ``DIM``.

    Returns:
        (HEADS, COLUMNS) of ``kind``.
    """
    is_query = (heads < NUM_QUERY)[:, None]
    is_dim = (column < DIM)[None, :]
    inside = (heads < NUM_QUERY + 2 * NUM_KV)[:, None] & is_dim
    WIDTH: tl.constexpr = (NUM_QUERY + NUM_GATES + 2 * NUM_KV) * DIM
    place = heads + tl.minimum(heads, NUM_GATES)  # a gate follows each query, if there are gates
    source = qkv + token * PARTS * WIDTH + place[:, None] * DIM
    is_turned, is_left, partner, pair = _partners(column, HALF, INTERLEAVED)
    if HAS_OWN_TABLES:
        await_results()
    target = tl.load(targets + token).to(tl.int64)
    if HALF > 0:
        angle = tl.load(positions + token).to(tl.int64) * HALF + pair
        cosine = tl.load(cos + angle, mask=is_turned, other=1.0).to(tl.float32)
        sine = tl.load(sin + angle, mask=is_turned, other=0.0).to(tl.float32)
    if HAS_NORM:
        own_factor = _norm_factors(query_weight, key_weight, column, is_dim, is_query)
        other_factor = _norm_factors(query_weight, key_weight, partner, is_dim, is_query)
    await_results()
    raw = sum_of_parts(source + column[None, :], inside, WIDTH, PARTS, kind)
    own = raw.to(tl.float32)
    other = sum_of_parts(source + partner[None, :], inside, WIDTH, PARTS, kind).to(tl.float32)
    if HAS_NORM:
        eps = tl.where(is_query, query_eps, key_eps)
        scale = tl.rsqrt(tl.sum(own * own, 1)[:, None] / DIM + eps)
        own, other = own * scale, other * scale
        if ROUNDS_FIRST:
            own, other = own.to(kind).to(tl.float32), other.to(kind).to(tl.float32)
        own = (own * own_factor).to(kind).to(tl.float32)
        other = (other * other_factor).to(kind).to(tl.float32)
    if HALF > 0:
        own = own * cosine[None, :] + other * tl.where(is_left, -sine, sine)[None, :]
    turned, key_head = own.to(kind), heads - NUM_QUERY
    is_key = (key_head >= 0) & (key_head < NUM_KV) & stores
    is_value = (key_head >= NUM_KV) & (key_head < 2 * NUM_KV) & stores
    cell = target * NUM_KV + key_head
    store_heads(turned, keys, key_scales, cell, is_key, column, DIM, PACKS_KEYS)
    store_heads(raw, values, value_scales, cell - NUM_KV, is_value, column, DIM, PACKS_VALUES)
    return turned


@triton.jit
def _rotate_and_store(
    query, qkv, keys, values, key_scales, value_scales, positions, targets, cos, sin, query_weight, key_weight,
    query_eps, key_eps, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr, NUM_GATES: tl.constexpr, PACKS_KEYS: tl.constexpr,
    PACKS_VALUES: tl.constexpr, PARTS: tl.constexpr, HAS_OWN_TABLES: tl.constexpr,
):  # fmt: skip
    start_next()
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    turned = rotate_heads(
        qkv, keys, values, key_scales, value_scales, positions, targets, cos, sin, query_weight, key_weight, query_eps,
        key_eps, token, heads, column, True, NUM_QUERY, NUM_KV, DIM, HALF, INTERLEAVED, HAS_NORM, ROUNDS_FIRST,
        NUM_GATES, PACKS_KEYS, PACKS_VALUES, PARTS, HAS_OWN_TABLES, query.dtype.element_ty,
    )  # fmt: skip
    is_query = (heads < NUM_QUERY)[:, None] & (column < DIM)[None, :]
    tl.store(query + (token * NUM_QUERY + heads)[:, None] * DIM + column[None, :], turned, mask=is_query)


@frozen(eq=False)
class Rotation:
    """Arguments of :func:`rotate_heads`: result of a joint projection, and how its heads are turned and stored.

    Attributes:
        numbers: its first arguments, tensors and the eps of norms.
        constants: its constants.
        shape: (T, num_query, head_dim) of the queries.
        dtype: type of the queries.
        num_heads: of queries, keys and values together.
    """

    numbers: tuple[Tensor | float, ...]
    constants: tuple[int, ...]
    shape: tuple[int, int, int]
    dtype: torch.dtype
    num_heads: int


def rotation_of(
    qkv: Tensor,
    keys: KvTensor,
    values: KvTensor,
    positions: Tensor,
    targets: Tensor,
    part: Attention,
    dtype: torch.dtype | None = None,
    *,
    has_own_tables: bool = False,
) -> Rotation:
    """Return what :func:`rotate_and_store` does with the same arguments; norms as wide as all heads are applied."""
    num_kv, head_dim = keys.numbers.shape[1:]
    num_heads = qkv.shape[-1] // head_dim
    num_query = num_heads - 2 * num_kv
    num_gates = num_query // 2 if part.is_gated else 0
    num_query -= num_gates
    norms, rotary = part.norms, part.rotary
    if norms is not None and len(norms[0].weight) != head_dim:
        qkv = qkv if qkv.dim() == 2 else qkv.sum(1).to(dtype or qkv.dtype)
        ends = num_query * head_dim, (num_query + num_kv) * head_dim
        for norm, columns in zip(norms, (qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]), strict=True):
            if columns.shape[1]:  # none if only keys and values are computed
                add_norm(columns, None, norm, out=columns)
        norms = None
    numbers = (
        qkv, keys.numbers, values.numbers, qkv if keys.scales is None else keys.scales,
        qkv if values.scales is None else values.scales, positions, targets,
        qkv if rotary is None else rotary.cos, qkv if rotary is None else rotary.sin,
        qkv if norms is None else norms[0].weight, qkv if norms is None else norms[1].weight,
        0.0 if norms is None else norms[0].eps, 0.0 if norms is None else norms[1].eps,
    )  # fmt: skip
    constants = (
        num_query, num_kv, head_dim, 0 if rotary is None else rotary.cos.shape[1],
        rotary is not None and rotary.interleaved, norms is not None, norms is not None and norms[0].rounds_first,
        num_gates, keys.scales is not None, values.scales is not None, 1 if qkv.dim() == 2 else qkv.shape[1],
        has_own_tables,
    )  # fmt: skip
    shape = len(qkv), num_query, head_dim
    return Rotation(numbers, constants, shape, dtype or qkv.dtype, num_heads - num_gates)


def rotate_and_store(
    qkv: Tensor,
    keys: KvTensor,
    values: KvTensor,
    positions: Tensor,
    targets: Tensor,
    part: Attention,
    dtype: torch.dtype | None = None,
    *,
    has_own_tables: bool = False,
) -> Tensor:
    """Apply norms and rotary positions to queries and keys, store keys and values in the pool; returns the queries.

    Args:
        qkv: (T, (num_query + 2 num_kv) * head_dim), result of the joint projection; changed if norms are as wide as it.
            With gates (T, 2 (num_query + num_kv) * head_dim). Or (T, n, ...) float32, whose n rows add up to it.
        keys, values: one layer of the pool.
        positions: (T,) int32, positions in their sequences.
        targets: (T,) int32, places in the pool.
        dtype: type of the result, if it is not that of ``qkv``.
        has_own_tables: the positions or rotary tables were computed in this step.

    Returns:
        (T, num_query, head_dim).
    """
    rotation = rotation_of(qkv, keys, values, positions, targets, part, dtype, has_own_tables=has_own_tables)
    query = torch.empty(rotation.shape, dtype=rotation.dtype, device=qkv.device)
    block, columns = 8, max(16, triton.next_power_of_2(rotation.shape[2]))
    _rotate_and_store[(len(qkv), triton.cdiv(rotation.num_heads, block))](
        query, *rotation.numbers, columns, block, *rotation.constants, num_warps=4 if columns > 64 else 2, **OVERLAPPING
    )
    return query
