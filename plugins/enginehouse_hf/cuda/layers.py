"""Small Triton kernels between the matrix products of a transformer layer.

Called by ``fused.py`` and ``step.py`` with contiguous tensors on one device. They round where transformers rounds
(after the residual sum, after the normalisation), so that both give the same text; in between, they compute in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.kv_tensor import KvTensor, store_heads
from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous, await_results, start_next
from enginehouse_hf.cuda.structure import Activation, Attention, Norm

__all__ = [
    "activate",
    "add_norm",
    "begin_step",
    "gate_heads",
    "gated",
    "load_inside",
    "normed",
    "rotate_and_store",
    "sum_of_parts",
]


@triton.jit
def load_inside(at, mask, IS_WHOLE: tl.constexpr, POLICY: tl.constexpr):
    """Load numbers; zeros where ``mask`` is false, which costs more even if nothing is masked, unless ``IS_WHOLE``."""
    if IS_WHOLE:
        return tl.load(at, eviction_policy=POLICY)
    else:
        return tl.load(at, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Activation of a gated part, float32 to float32; the kinds are those of ``structure.py``."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "gelu_tanh":
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # x sigmoid(2 sqrt(2 / pi) ...)
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def normed(wide, factor, eps, WIDTH: tl.constexpr, ROUNDS_FIRST: tl.constexpr, kind: tl.constexpr):
    """RMS norm of the last axis of ``wide``, float32, which is zero outside of ``WIDTH``; rounded to ``kind``."""
    axis: tl.constexpr = len(wide.shape) - 1
    scale = tl.rsqrt(tl.sum(wide * wide, axis, keep_dims=True) / WIDTH + eps)
    scaled = wide * scale
    if ROUNDS_FIRST:
        scaled = scaled.to(kind).to(tl.float32)
    return (scaled * factor).to(kind)


@triton.jit
def sum_of_parts(at, mask, stride, PARTS: tl.constexpr, kind: tl.constexpr):
    """Sum of numbers ``stride`` apart, rounded to ``kind``."""
    added = tl.load(at, mask=mask, other=0.0)
    for index in tl.static_range(1, PARTS):
        added += tl.load(at + index * stride, mask=mask, other=0.0)
    return added.to(kind)


@triton.jit
def _add_norm(
    hidden, update, after, weight, out, factor, after_eps, eps, hidden_stride, out_stride,
    WIDTH: tl.constexpr, NUM_UPDATES: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_AFTER: tl.constexpr,
    AFTER_ROUNDS_FIRST: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start_next()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    kind: tl.constexpr = hidden.dtype.element_ty
    if HAS_AFTER:
        after_factor = tl.load(after + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        norm_factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    await_results()
    value = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0)
    if NUM_UPDATES > 0:
        added = tl.zeros([BLOCK], tl.float32)
        for index in tl.static_range(NUM_UPDATES):
            at_update = update + (row * NUM_UPDATES + index) * WIDTH + columns
            added += tl.load(at_update, mask=inside, other=0.0).to(tl.float32)
        if HAS_AFTER:
            added = normed(added.to(kind).to(tl.float32), after_factor, after_eps, WIDTH, AFTER_ROUNDS_FIRST, kind)
        added = added.to(kind).to(tl.float32)
        if HAS_FACTOR:
            added = (added * factor).to(kind).to(tl.float32)
        value = (value.to(tl.float32) + added).to(kind)
        tl.store(hidden + row * hidden_stride + columns, value, mask=inside)
    if HAS_NORM:
        result = normed(value.to(tl.float32), norm_factor, eps, WIDTH, ROUNDS_FIRST, kind)
        tl.store(out + row * out_stride + columns, result, mask=inside)


def add_norm(
    hidden: Tensor,
    update: Tensor | None,
    norm: Norm | None,
    *,
    after: Norm | None = None,
    factor: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """Add ``factor * after(update)`` to ``hidden`` in place, and return the norm of the sum.

    Args:
        hidden: (T, width); rows may be apart.
        update: (T, width), or (T, n, width), whose n rows are added up; None adds nothing.
        norm: of the result; None returns ``hidden`` itself.
        after: norm of the update.
        out: the memory of the result, which may be that of ``hidden``.
    """
    num_tokens, width = hidden.shape
    out = (hidden.new_empty(num_tokens, width) if norm is not None else hidden) if out is None else out
    num_updates = 0 if update is None else update.numel() // (num_tokens * width)
    block = triton.next_power_of_2(width)
    _add_norm[(num_tokens,)](
        hidden,
        hidden if update is None else update,
        hidden if after is None else after.weight,
        hidden if norm is None else norm.weight,
        out,
        factor,
        0.0 if after is None else after.eps,
        0.0 if norm is None else norm.eps,
        hidden.stride(0),
        out.stride(0),
        width,
        num_updates,
        factor != 1.0,
        after is not None,
        after is not None and after.rounds_first,
        norm is not None,
        norm is not None and norm.rounds_first,
        block,
        num_warps=4 if block <= 2048 else 16 if num_tokens == 1 else 8,
        **OVERLAPPING,
    )
    return out


@triton.jit
def _norm_factors(query_weight, key_weight, column, is_dim, is_query):
    """(HEADS, COLUMNS) factors of the norms of queries and keys, float32."""
    of_query = tl.load(query_weight + column[None, :], mask=is_dim, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + column[None, :], mask=is_dim, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query, of_key)


@triton.jit
def _rotate_and_store(
    qkv, query, keys, values, key_scales, value_scales, positions, targets, cos, sin, query_weight, key_weight,
    query_eps, key_eps,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr, NUM_GATES: tl.constexpr,
    BLOCK: tl.constexpr, PACKS_KEYS: tl.constexpr, PACKS_VALUES: tl.constexpr, PARTS: tl.constexpr,
    HAS_OWN_TABLES: tl.constexpr,
):  # fmt: skip
    start_next()
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    is_query = (heads < NUM_QUERY)[:, None]
    is_dim = (column < DIM)[None, :]
    inside = (heads < NUM_QUERY + 2 * NUM_KV)[:, None] & is_dim
    WIDTH: tl.constexpr = (NUM_QUERY + NUM_GATES + 2 * NUM_KV) * DIM
    place = heads + tl.minimum(heads, NUM_GATES)  # a gate follows each query, if there are gates
    source = qkv + token * PARTS * WIDTH + place[:, None] * DIM
    kind: tl.constexpr = query.dtype.element_ty
    # The other dimension of the pair that is turned together, and the number of the pair.
    is_turned = column < 2 * HALF
    if INTERLEAVED:
        partner = tl.where(is_turned, column ^ 1, column)
        pair = column // 2
        is_left = column % 2 == 0
    else:
        is_left = column < HALF
        partner = tl.where(is_turned, tl.where(is_left, column + HALF, column - HALF), column)
        pair = tl.where(is_left, column, column - HALF)
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
    is_key = (key_head >= 0) & (key_head < NUM_KV)
    is_value = (key_head >= NUM_KV) & (key_head < 2 * NUM_KV)
    cell = target * NUM_KV + key_head
    tl.store(query + (token * NUM_QUERY + heads)[:, None] * DIM + column[None, :], turned, mask=is_query & is_dim)
    store_heads(turned, keys, key_scales, cell, is_key, column, DIM, PACKS_KEYS)
    store_heads(raw, values, value_scales, cell - NUM_KV, is_value, column, DIM, PACKS_VALUES)


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
    num_kv, head_dim = keys.numbers.shape[1:]
    num_heads = qkv.shape[-1] // head_dim
    num_query = num_heads - 2 * num_kv
    num_gates = num_query // 2 if part.is_gated else 0
    num_query -= num_gates
    num_heads -= num_gates
    query = torch.empty(len(qkv), num_query, head_dim, dtype=dtype or qkv.dtype, device=qkv.device)
    norms, rotary = part.norms, part.rotary
    if norms is not None and len(norms[0].weight) != head_dim:
        qkv = qkv if qkv.dim() == 2 else qkv.sum(1).to(query.dtype)
        ends = num_query * head_dim, (num_query + num_kv) * head_dim
        for norm, columns in zip(norms, (qkv[:, : ends[0]], qkv[:, ends[0] : ends[1]]), strict=True):
            if columns.shape[1]:  # none if only keys and values are computed
                add_norm(columns, None, norm, out=columns)
        norms = None
    block, columns = 8, max(16, triton.next_power_of_2(head_dim))
    _rotate_and_store[(len(qkv), triton.cdiv(num_heads, block))](
        qkv, query, keys.numbers, values.numbers, qkv if keys.scales is None else keys.scales,
        qkv if values.scales is None else values.scales, positions, targets,
        qkv if rotary is None else rotary.cos, qkv if rotary is None else rotary.sin,
        qkv if norms is None else norms[0].weight, qkv if norms is None else norms[1].weight,
        0.0 if norms is None else norms[0].eps, 0.0 if norms is None else norms[1].eps,
        num_query, num_kv, head_dim, columns, 0 if rotary is None else rotary.cos.shape[1],
        rotary is not None and rotary.interleaved, norms is not None, norms is not None and norms[0].rounds_first,
        num_gates, block, keys.scales is not None, values.scales is not None, 1 if qkv.dim() == 2 else qkv.shape[1],
        has_own_tables,
        num_warps=4 if columns > 64 else 2, **OVERLAPPING,
    )  # fmt: skip
    return query


@triton.jit
def _gate_heads(attended, qkv, NUM_QUERY: tl.constexpr, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < NUM_QUERY * DIM
    gate = tl.load(qkv + token * STRIDE + (2 * (place // DIM) + 1) * DIM + place % DIM, mask=inside, other=0.0)
    at_value = attended + token * NUM_QUERY * DIM + place
    value = tl.load(at_value, mask=inside, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-gate.to(tl.float32)))).to(gate.dtype).to(tl.float32)
    tl.store(at_value, (value.to(tl.float32) * share).to(value.dtype), mask=inside)


def gate_heads(attended: Tensor, qkv: Tensor) -> None:
    """Multiply ``attended``, (T, num_query, head_dim), with the sigmoid of the gates in ``qkv``, in place.

    Args:
        qkv: (T, ...), result of the joint projection, in which a gate follows each query.
    """
    num_tokens, num_query, head_dim = attended.shape
    block = min(1024, triton.next_power_of_2(num_query * head_dim))
    grid = num_tokens, triton.cdiv(num_query * head_dim, block)
    _gate_heads[grid](attended, qkv, num_query, qkv.shape[1], head_dim, block, num_warps=4, **OVERLAPPING)


@triton.jit
def _gated(gate_up, out, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    await_previous()
    kind: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at_gate = gate_up + row * PARTS * 2 * WIDTH + columns
    gate = sum_of_parts(at_gate, inside, 2 * WIDTH, PARTS, kind)
    up = sum_of_parts(at_gate + WIDTH, inside, 2 * WIDTH, PARTS, kind)
    active = activate(gate.to(tl.float32), KIND).to(kind).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (active * up.to(tl.float32)).to(kind), mask=inside)


def gated(gate_up: Tensor, activation: Activation, dtype: torch.dtype | None = None) -> Tensor:
    """``activation(gate) * up`` of (T, 2 * width), which contains both side by side; (T, width).

    ``gate_up`` may be (T, n, 2 * width) float32, whose n rows add up to it; then ``dtype`` is the type of the result.
    """
    num_tokens, width = gate_up.shape[0], gate_up.shape[-1] // 2
    out = torch.empty(num_tokens, width, dtype=dtype or gate_up.dtype, device=gate_up.device)
    block = min(2048, triton.next_power_of_2(width))
    grid = num_tokens, triton.cdiv(width, block)
    parts = 1 if gate_up.dim() == 2 else gate_up.shape[1]
    _gated[grid](gate_up, out, width, activation, block, parts, num_warps=4, **OVERLAPPING)
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
