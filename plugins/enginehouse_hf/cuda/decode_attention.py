"""Attention of single new tokens over keys and values anywhere in the pool: flash-decoding in Triton.

Every program reads part of one sequence for one key head: all query heads that share the key head are rows of the
same small matrix product, so each key and value is read once. Long sequences are split into parts, which a second
kernel combines; that keeps all multiprocessors busy if there are few sequences. The key heads of a sequence are
processed consecutively, as they are stored, and sequences should be sorted longest first, so that none of the long ones
is left for the end.

Source: the split over the sequence is "Flash-Decoding" (Dao et al., 2023); indices per position as in SGLang's pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous

__all__ = ["decode_attention", "num_parts"]

_PROGRAMS_WANTED = 528  # four for each of an H100's 132 multiprocessors
_MAX_PARTS = 64


def num_parts(num_sequences: int, num_kv_heads: int, max_context: int) -> int:
    """Number of parts per sequence: a power of two, the same for the whole batch."""
    wanted = _PROGRAMS_WANTED // (num_sequences * num_kv_heads)
    useful = max_context // 128
    return 1 << (max(1, min(_MAX_PARTS, wanted, useful)).bit_length() - 1)


@triton.jit
def _bounds(length, window, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the range of positions of a part; empty parts begin at or after their end."""
    low = length - length
    if window > 0:
        low = tl.maximum(length - window, 0)
    size = tl.cdiv(tl.cdiv(length - low, PARTS), BLOCK) * BLOCK
    begin = low + part * size
    return begin, tl.minimum(begin + size, length)


@triton.jit
def _attend(
    query, keys, values, table, slots, lengths, sinks, out, part_out, part_lse, scale, softcap, window, table_stride,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        await_previous()
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    length = tl.load(lengths + sequence)
    begin, end = _bounds(length, window, part, PARTS, BLOCK)
    if begin >= end:
        return
    GROUP: tl.constexpr = NUM_QUERY // NUM_KV
    group = tl.arange(0, ROWS)
    is_head = group < GROUP
    heads = kv_head * GROUP + group
    column = tl.arange(0, COLUMNS)
    is_dim = (column < DIM)[None, :]
    is_dim_v = (column < DIM_V)[None, :]
    at_query = query + (sequence * NUM_QUERY + heads)[:, None] * DIM + column[None, :]
    q = tl.load(at_query, mask=is_head[:, None] & is_dim, other=0.0)
    places = table + tl.load(slots + sequence).to(tl.int64) * table_stride
    offsets = tl.arange(0, BLOCK)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        inside = start + offsets < end
        place = tl.load(places + start + offsets, mask=inside, other=0).to(tl.int64)
        at_keys = keys + ((place * NUM_KV + kv_head) * DIM)[:, None] + column[None, :]
        k = tl.load(at_keys, mask=inside[:, None] & is_dim, other=0.0)
        # The conversions are for torch.compile, which passes plain numbers as float64.
        scores = (tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale).to(tl.float32)
        if HAS_SOFTCAP:
            scores = (softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))).to(tl.float32)
        scores = tl.where(inside[None, :], scores * 1.4426950408889634, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        at_values = values + ((place * NUM_KV + kv_head) * DIM_V)[:, None] + column[None, :]
        v = tl.load(at_values, mask=inside[:, None] & is_dim_v, other=0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    if HAS_SINKS and PARTS == 1:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - best)
    sums = sums / total[:, None]
    if PARTS == 1:
        at_out = out + (sequence * NUM_QUERY + heads)[:, None] * DIM_V + column[None, :]
        tl.store(at_out, sums.to(out.dtype.element_ty), mask=is_head[:, None] & is_dim_v)
    else:
        cell = (sequence * NUM_QUERY + heads) * PARTS + part
        tl.store(part_out + cell[:, None] * DIM_V + column[None, :], sums, mask=is_head[:, None] & is_dim_v)
        tl.store(part_lse + cell, best + tl.log2(total), mask=is_head)


@triton.jit
def _join(
    part_out, part_lse, lengths, sinks, out, window,
    NUM_QUERY: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    if OVERLAPS:
        await_previous()
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, COLUMNS)
    is_dim_v = column < DIM_V
    begin, end = _bounds(tl.load(lengths + sequence), window, part, PARTS, BLOCK)
    is_used = begin < end
    cell = (sequence * NUM_QUERY + head) * PARTS + part
    lse = tl.load(part_lse + cell, mask=is_used, other=float("-inf"))
    highest = tl.max(lse, 0)
    weights = tl.exp2(lse - highest)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634 - highest)
    at_part = part_out + cell[:, None] * DIM_V + column[None, :]
    rows = tl.load(at_part, mask=is_used[:, None] & is_dim_v[None, :], other=0.0)
    joined = tl.sum(rows * weights[:, None], 0) / total
    tl.store(out + (sequence * NUM_QUERY + head) * DIM_V + column, joined.to(out.dtype.element_ty), mask=is_dim_v)


def decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    parts: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """Attend with one query token per sequence.

    Args:
        query: (num_sequences, num_query, head_dim), contiguous.
        keys: one layer of the pool, (num_positions, num_kv, head_dim); ``values`` alike.
        table: (num_slots, max_context) int32, the index in the pool of every position.
        slots: (num_sequences,) int32, rows of ``table``.
        lengths: (num_sequences,) int32, length of each sequence, the new position included.
        scale: factor of the scores.
        window: number of visible positions, the new one included; None is all.
        softcap: bound of the scores; None is none.
        sinks: (num_query,), for each head the score of a further key whose value is zero; None is none.
        parts: number of parts per sequence; None selects it automatically.

    Returns:
        (num_sequences, num_query, head_dim of the values).
    """
    num_sequences, num_query, dim = query.shape
    num_kv, dim_v = keys.shape[1], values.shape[2]
    out = query.new_empty(num_sequences, num_query, dim_v)
    parts = num_parts(num_sequences, num_kv, table.shape[1]) if parts is None else parts
    part_out, part_lse = out, out
    if parts > 1:
        part_out = torch.empty(num_sequences, num_query, parts, dim_v, dtype=torch.float32, device=query.device)
        part_lse = torch.empty(num_sequences, num_query, parts, dtype=torch.float32, device=query.device)
    warps = warps or (2 if parts == 1 else 4)
    is_exact = query.dtype == torch.float32
    rows = max(16, triton.next_power_of_2(num_query // num_kv))
    columns = max(16, triton.next_power_of_2(max(dim, dim_v)))
    overlapping = {} if torch.compiler.is_compiling() else OVERLAPPING  # inductor does not know such launches
    usual_block, usual_stages = (32, 2) if is_exact or columns > 128 else (64, 3)
    block, stages = block or usual_block, stages or usual_stages
    given_sinks = query if sinks is None else sinks
    _attend[(num_kv, num_sequences, parts)](
        query, keys, values, table, slots, lengths, given_sinks, out, part_out, part_lse, scale, softcap or 1.0,
        window or 0, table.stride(0), num_query, num_kv, dim, dim_v, columns, rows, block, parts, softcap is not None,
        sinks is not None, "ieee" if is_exact else "tf32", stages, bool(overlapping), num_warps=warps, **overlapping,
    )  # fmt: skip
    if parts > 1:
        _join[(num_sequences, num_query)](
            part_out, part_lse, lengths, given_sinks, out, window or 0, num_query, dim_v, columns, block, parts,
            sinks is not None, bool(overlapping), num_warps=4, **overlapping,
        )  # fmt: skip
    return out
