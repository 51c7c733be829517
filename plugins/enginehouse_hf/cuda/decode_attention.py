"""Attention of single new tokens over keys and values anywhere in the pool: flash-decoding in Triton.

Every program reads part of one sequence for one key head: all query heads that share the key head are columns of the
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

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_results, start_next

__all__ = ["decode_attention", "num_parts"]

_PROGRAMS_WANTED = 528  # four for each of an H100's 132 multiprocessors
_MAX_PARTS = 64
_LARGEST_CODE = tl.constexpr(448.0)
_HAS_ASSEMBLY = tl.constexpr(torch.cuda.is_available())


def num_parts(num_sequences: int, num_kv_heads: int, max_context: int, is_wide: bool = False) -> int:
    """Number of parts per sequence: a power of two, the same for the whole batch.

    Args:
        is_wide: heads have more than 128 dimensions, of 16 bits.
    """
    wanted = _PROGRAMS_WANTED // (num_sequences * num_kv_heads)
    wanted = wanted // 2 if is_wide and wanted >= 16 else wanted
    useful = max_context // (64 if is_wide else 128)
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


_UNPAIR = tl.constexpr(
    "{.reg .b32 t; .reg .b16 even, odd; prmt.b32 t, $2, $2, 0x3120; mov.b32 {even, odd}, t;"
    "cvt.rn.f16x2.e4m3x2 $0, even; cvt.rn.f16x2.e4m3x2 $1, odd;}"
)


@triton.jit
def _unpaired(pairs):
    """Float16 numbers of the lower and of the higher 8-bit float of each int16 number."""
    if _HAS_ASSEMBLY:
        return tl.inline_asm_elementwise(
            _UNPAIR, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )  # fmt: skip
    even, odd = pairs.to(tl.int8), (pairs >> 8).to(tl.int8)
    return even.to(tl.float8e4nv, bitcast=True).to(tl.float16), odd.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _scores(
    q, keys, scales, cell, inside, column, scale, softcap,
    DIM: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(BLOCK, ROWS) float32 in units of log 2, for the queries ``q``, (COLUMNS, ROWS)."""
    mask = inside[:, None] & (column < DIM)[None, :]
    k = tl.load(keys + cell[:, None] * DIM + column[None, :], mask=mask, other=0.0)
    if HAS_SCALES:
        k = k.to(q.dtype)
    scores = tl.dot(k, q, input_precision=PRECISION) * scale
    if HAS_SCALES:
        scores *= tl.load(scales + cell, mask=inside, other=0.0)[:, None]
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores / softcap)))
    return tl.where(inside[:, None], scores * 1.4426950408889634, float("-inf"))


@triton.jit
def _attend(
    query, keys, values, key_scales, value_scales, table, slots, lengths, sinks, out, part_out, part_lse, scale,
    softcap, window, table_stride,
    NUM_QUERY: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_KEY_SCALES: tl.constexpr, HAS_VALUE_SCALES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    start_next()
    kv_head, sequence, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end = _bounds(tl.load(lengths + sequence), window, part, PARTS, BLOCK)
    if begin >= end:
        return
    GROUP: tl.constexpr = NUM_QUERY // NUM_KV
    group, column, offsets = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    places = table + tl.load(slots + sequence).to(tl.int64) * table_stride
    # Values of 8 bits are read in pairs, of even and odd columns: the units in which tensor cores can be fed.
    EACH: tl.constexpr = 2 if HAS_VALUE_SCALES else 1
    await_results()
    is_head, heads = group < GROUP, sequence * NUM_QUERY + kv_head * GROUP + group
    is_query = is_head[None, :] & (column < DIM)[:, None]
    q = tl.load(query + heads[None, :] * DIM + column[:, None], mask=is_query, other=0.0)
    if HAS_KEY_SCALES:
        q = q.to(WIDE)
    unit = tl.arange(0, COLUMNS // EACH)
    best, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([COLUMNS // EACH, ROWS], tl.float32)
    odd_sums = sums
    for start in tl.range(begin, end, BLOCK, num_stages=STAGES):
        inside = start + offsets < end
        cell = tl.load(places + start + offsets, mask=inside, other=0).to(tl.int64) * NUM_KV + kv_head
        scores = _scores(
            q, keys, key_scales, cell, inside, column, scale, softcap, DIM, HAS_KEY_SCALES, HAS_SOFTCAP, PRECISION
        )
        higher = tl.maximum(best, tl.max(scores, 0))
        shrink = tl.exp2(best - higher)
        weights = tl.exp2(scores - higher[None, :])
        total = total * shrink + tl.sum(weights, 0)
        mask = inside[None, :] & (unit < DIM_V // EACH)[:, None]
        v = tl.load(values + cell[None, :] * (DIM_V // EACH) + unit[:, None], mask=mask, other=0)
        if HAS_VALUE_SCALES:
            even, odd = _unpaired(v)
            value_scale = tl.load(value_scales + cell, mask=inside, other=0.0)
            scaled = (weights * (value_scale * _LARGEST_CODE)[:, None]).to(WIDE)  # largest values: fit float16
            sums = sums * shrink[None, :] + tl.dot(even.to(WIDE), scaled, input_precision=PRECISION)
            odd_sums = odd_sums * shrink[None, :] + tl.dot(odd.to(WIDE), scaled, input_precision=PRECISION)
        else:
            sums = sums * shrink[None, :] + tl.dot(v, weights.to(v.dtype), input_precision=PRECISION)
        best = higher
    if PARTS > 1:
        heads = heads * PARTS + part
        tl.store(part_lse + heads, best + tl.log2(total), mask=is_head)
    elif HAS_SINKS:
        at_sinks = sinks + kv_head * GROUP + group
        total += tl.exp2(tl.load(at_sinks, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
    at_target = (out if PARTS == 1 else part_out) + heads[None, :] * DIM_V + unit[:, None] * EACH
    is_target = is_head[None, :] & (unit < DIM_V // EACH)[:, None]
    total *= _LARGEST_CODE if HAS_VALUE_SCALES else 1.0
    tl.store(at_target, sums / total[None, :], mask=is_target)
    if HAS_VALUE_SCALES:
        tl.store(at_target + 1, odd_sums / total[None, :], mask=is_target)


@triton.jit
def _join(
    part_out, part_lse, lengths, sinks, out, window,
    NUM_QUERY: tl.constexpr, DIM_V: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    start_next()
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, COLUMNS)
    is_dim_v = column < DIM_V
    begin, end = _bounds(tl.load(lengths + sequence), window, part, PARTS, BLOCK)
    is_used = begin < end
    await_results()
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


def _usual_sizes(is_exact: bool, columns: int, parts: int, is_packed: bool) -> tuple[int, int, int]:
    """Positions of a block, warps, and stages, as measured on an H200. Every second stage loads another block ahead."""
    if is_exact:
        return 32, 4, 2
    if columns > 128:
        return (32, 2, 5) if is_packed else (16, 1, 5) if parts == 8 else (32, 2, 2)
    if is_packed:
        return 32, 1, 7 if parts == 1 else 5
    return (32, 1, 3) if parts == 1 else (32, 1, 5) if parts == 8 else (64, 2 if parts > 8 else 4, 3)


def _part_results(query: Tensor, parts: int, dim_v: int) -> tuple[Tensor, Tensor]:
    """Memory of the results of all parts, and of the logarithms of their sums to base 2."""
    shape = *query.shape[:2], parts
    return query.new_empty(*shape, dim_v, dtype=torch.float32), query.new_empty(shape, dtype=torch.float32)


_JOINING = {"num_warps": 4, **OVERLAPPING}


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
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    parts: int | None = None,
    block: int | None = None,
    warps: int | None = None,
    stages: int | None = None,
) -> Tensor:
    """Attend with one query token per sequence.

    Args:
        query: (num_sequences, num_query, head_dim), contiguous.
        keys: one layer of the pool, (num_positions, num_kv, head_dim), with scales float8_e4m3fn; ``values`` alike.
        table: (num_slots, max_context) int32, the index in the pool of every position.
        slots: (num_sequences,) int32, rows of ``table``.
        lengths: (num_sequences,) int32, length of each sequence, the new position included.
        scale: factor of the scores.
        window: number of visible positions, the new one included; None is all.
        softcap: bound of the scores; None is none.
        sinks: (num_query,), for each head the score of a further key whose value is zero; None is none.
        key_scales: (num_positions, num_kv), factors of the keys; ``value_scales`` alike.
        parts: number of parts per sequence; None selects it automatically.

    Returns:
        (num_sequences, num_query, head_dim of the values).
    """
    num_sequences, num_query, dim = query.shape
    num_kv, dim_v, is_exact = keys.shape[1], values.shape[2], query.dtype == torch.float32
    out = query.new_empty(num_sequences, num_query, dim_v)
    rows = max(8, triton.next_power_of_2(num_query // num_kv))
    columns = max(32, triton.next_power_of_2(max(dim, dim_v)))
    is_wide = columns > 128 and not is_exact and value_scales is None
    parts = num_parts(num_sequences, num_kv, table.shape[1], is_wide) if parts is None else parts
    part_out, part_lse = (out, out) if parts == 1 else _part_results(query, parts, dim_v)
    usual = _usual_sizes(is_exact, columns, parts, value_scales is not None)
    block, warps, stages = (given or own for given, own in zip((block, warps, stages), usual, strict=True))
    packed_values = values if value_scales is None else values.view(torch.int16)
    scales = [query if one is None else one for one in (key_scales, value_scales)]
    given_sinks = query if sinks is None else sinks
    _attend[(num_kv, num_sequences, parts)](
        query, keys, packed_values, *scales, table, slots, lengths, given_sinks, out, part_out, part_lse, scale,
        softcap or 1.0, window or 0, table.stride(0), num_query, num_kv, dim, dim_v, columns, rows, block, parts,
        softcap is not None, sinks is not None, key_scales is not None, value_scales is not None,
        tl.float32 if is_exact else tl.float16, "ieee" if is_exact else "tf32", stages, num_warps=warps,
        **OVERLAPPING,
    )  # fmt: skip
    if parts > 1:
        sizes = num_query, dim_v, columns, block, parts, sinks is not None
        _join[query.shape[:2]](part_out, part_lse, lengths, given_sinks, out, window or 0, *sizes, **_JOINING)
    return out
