"""Several tokens of a gated delta net per sequence, in Triton, over pools of states.

Called by ``recurrent_parts.py``. Three kernels: the convolution of all tokens; what the tokens of a chunk are to each
other, for all chunks at once; and the recurrence from chunk to chunk. A chunk has 16 tokens, so that its triangular
system is solved by four products without a loss of precision.

The recurrence ``S = S (a - b k k^T) + b k v^T`` of the tokens of a chunk is, with the decays since its beginning in
``c``, the triangular system ``(1 + L) u = b (v - c k S)``, ``L[i, j] = b[i] k[i] k[j] c[i] / c[j]`` for ``j < i``.

Source: the chunked form in Gated Delta Networks (Yang et al., 2024), section 3.3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from enginehouse_hf.cuda.delta_step import DeltaNet, gate_values, rates

__all__ = ["delta_spans"]

_CHUNK = 16


@triton.jit
def _convolve(
    projected, pool, sources, targets, ends, conv, out, stride,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr, BY_KEY_HEAD: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(2)
    begin, end = tl.load(ends + span), tl.load(ends + span + 1)
    first = begin + tl.program_id(0) * TOKENS
    if first >= end:
        return
    GROUP: tl.constexpr = NUM_VALUES // NUM_KEYS
    ALL_KEYS: tl.constexpr = NUM_KEYS * KEY_DIM
    ALL_VALUES: tl.constexpr = NUM_VALUES * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * ALL_KEYS + ALL_VALUES
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < NUM_CHANNELS
    column = channel
    if BY_KEY_HEAD:
        OWN: tl.constexpr = 2 * KEY_DIM + 2 * GROUP * VALUE_DIM
        of_key = (channel % ALL_KEYS) // KEY_DIM * OWN + channel % KEY_DIM + channel // ALL_KEYS * KEY_DIM
        of_value = channel - 2 * ALL_KEYS
        head = of_value // VALUE_DIM
        at_value = head // GROUP * OWN + 2 * KEY_DIM + head % GROUP * VALUE_DIM + of_value % VALUE_DIM
        column = tl.where(of_value < 0, of_key, at_value)
    token = first + tl.arange(0, TOKENS)
    kind: tl.constexpr = projected.dtype.element_ty
    source = tl.load(sources + span).to(tl.int64)
    at_state = pool + (source * NUM_CHANNELS + channel) * SIZE
    total = tl.zeros([TOKENS, BLOCK], tl.float32)
    for place in tl.static_range(SIZE):
        at = token - (SIZE - 1 - place)
        inside = (at < end)[:, None] & is_channel[None, :]
        is_new = (at >= begin)[:, None]
        at_new = projected + at.to(tl.int64)[:, None] * stride + column[None, :]
        value = tl.load(at_new, mask=inside & is_new, other=0.0)
        kept = tl.load(at_state[None, :] + (SIZE + at - begin)[:, None], mask=inside & ~is_new, other=0.0)
        value = tl.where(is_new, value, kept.to(kind))
        factor = tl.load(conv + channel * SIZE + place, mask=is_channel, other=0.0).to(tl.float32)
        total += factor[None, :] * value.to(tl.float32)
    total = total.to(kind).to(tl.float32)
    result = (total / (1.0 + tl.exp(-total))).to(kind)
    inside = (token < end)[:, None] & is_channel[None, :]
    tl.store(out + token.to(tl.int64)[:, None] * NUM_CHANNELS + channel[None, :], result, mask=inside)
    if first + TOKENS >= end:  # the last tokens of the span: keep what the next one sees of it
        at_target = pool + (tl.load(targets + span).to(tl.int64) * NUM_CHANNELS + channel) * SIZE
        for place in tl.static_range(SIZE):
            last = end - SIZE + place
            at_last = projected + last.to(tl.int64) * stride + column
            new_last = tl.load(at_last, mask=is_channel & (last >= begin), other=0.0)
            old_last = tl.load(at_state + SIZE + last - begin, mask=is_channel & (last < begin), other=0.0)
            tl.store(at_target + place, tl.where(last >= begin, new_last, old_last.to(kind)), mask=is_channel)


@triton.jit
def _unit(rows, DIM: tl.constexpr):
    """Normalise rows to the length of one, float32."""
    wide = rows.to(tl.float32)
    return wide * tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)[:, None]


@triton.jit
def _relate(
    mixed, projected, ends, decay, time_bias, systems, weights, decays, stride,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, BY_KEY_HEAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    span, head = tl.program_id(2), tl.program_id(1)
    begin, end = tl.load(ends + span), tl.load(ends + span + 1)
    first = begin + tl.program_id(0) * CHUNK
    if first >= end:
        return
    GROUP: tl.constexpr = NUM_VALUES // NUM_KEYS
    ALL_KEYS: tl.constexpr = NUM_KEYS * KEY_DIM
    ALL_VALUES: tl.constexpr = NUM_VALUES * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * ALL_KEYS + ALL_VALUES
    place = tl.arange(0, CHUNK)
    token = (first + place).to(tl.int64)
    is_token = token < end
    at_rate = projected + token * stride + NUM_CHANNELS + ALL_VALUES
    if BY_KEY_HEAD:
        at_rate += head // GROUP * 2 * GROUP + head % GROUP
        at_time = at_rate + GROUP
    else:
        at_rate += head
        at_time = at_rate + NUM_VALUES
    log_kept, learned = rates(at_rate, at_time, is_token, decay + head, time_bias + head)
    log_kept = tl.where(is_token, log_kept, 0.0)
    learned = tl.where(is_token, learned, 0.0)
    since = tl.cumsum(log_kept, 0)
    column = tl.arange(0, KEYS)
    inside = is_token[:, None] & (column < KEY_DIM)[None, :]
    at_query = mixed + token[:, None] * NUM_CHANNELS + (head // GROUP * KEY_DIM + column)[None, :]
    query = _unit(tl.load(at_query, mask=inside, other=0.0), KEY_DIM) / tl.sqrt(KEY_DIM * 1.0)
    key = _unit(tl.load(at_query + ALL_KEYS, mask=inside, other=0.0), KEY_DIM)
    apart = tl.exp(tl.minimum(since[:, None] - since[None, :], 0.0))
    transposed = tl.trans(key)
    is_before = place[:, None] > place[None, :]
    one = (place[:, None] == place[None, :]).to(tl.float32)
    power = -tl.where(is_before, tl.dot(key, transposed, input_precision=PRECISION) * apart, 0.0) * learned[:, None]
    # 1 / (1 + L) = (1 - L) (1 + L^2) (1 + L^4) (1 + L^8), as L^16 is zero.
    system = one + power
    for _ in tl.static_range(3):
        power = tl.dot(power, power, input_precision="ieee")
        system += tl.dot(system, power, input_precision="ieee")
    system *= learned[None, :]
    weight = tl.dot(query, transposed, input_precision=PRECISION) * apart
    weight = tl.where(place[:, None] >= place[None, :], weight, 0.0)
    slot = (begin // CHUNK + span + tl.program_id(0)).to(tl.int64) * NUM_VALUES + head
    at_cell = slot * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
    tl.store(systems + at_cell, system)
    tl.store(weights + at_cell, weight)
    tl.store(decays + slot * CHUNK + place, since)


@triton.jit
def _scan(
    mixed, pool, sources, targets, ends, systems, weights, decays, out,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    part, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin, end = tl.load(ends + span), tl.load(ends + span + 1)
    GROUP: tl.constexpr = NUM_VALUES // NUM_KEYS
    ALL_KEYS: tl.constexpr = NUM_KEYS * KEY_DIM
    NUM_CHANNELS: tl.constexpr = 2 * ALL_KEYS + NUM_VALUES * VALUE_DIM
    source = tl.load(sources + span).to(tl.int64)
    place, at_key = tl.arange(0, CHUNK), tl.arange(0, KEYS)
    at_value = part * VALUES + tl.arange(0, VALUES)
    is_key, is_value = at_key < KEY_DIM, at_value < VALUE_DIM
    STATE: tl.constexpr = NUM_VALUES * KEY_DIM * VALUE_DIM
    offsets = (head * KEY_DIM + at_key)[:, None] * VALUE_DIM + at_value[None, :]
    is_state = is_key[:, None] & is_value[None, :]
    state = tl.load(pool + source * STATE + offsets, mask=is_state, other=0.0)
    slot = (begin // CHUNK + span).to(tl.int64) * NUM_VALUES + head
    for first in range(begin, end, CHUNK):
        token = (first + place).to(tl.int64)
        is_token = token < end
        inside = is_token[:, None] & is_key[None, :]
        at_query = mixed + token[:, None] * NUM_CHANNELS + (head // GROUP * KEY_DIM + at_key)[None, :]
        query = _unit(tl.load(at_query, mask=inside, other=0.0), KEY_DIM) / tl.sqrt(KEY_DIM * 1.0)
        key = _unit(tl.load(at_query + ALL_KEYS, mask=inside, other=0.0), KEY_DIM)
        at_values = mixed + token[:, None] * NUM_CHANNELS + (2 * ALL_KEYS + head * VALUE_DIM + at_value)[None, :]
        value = tl.load(at_values, mask=is_token[:, None] & is_value[None, :], other=0.0).to(tl.float32)
        since = tl.load(decays + slot * CHUNK + place)
        last = tl.sum(tl.where(place == CHUNK - 1, since, 0.0), 0)
        at_cell = slot * CHUNK * CHUNK + place[:, None] * CHUNK + place[None, :]
        shrunk = tl.exp(since)[:, None]
        value -= tl.dot(key, state, input_precision=PRECISION) * shrunk
        update = tl.dot(tl.load(systems + at_cell), value, input_precision=PRECISION)
        result = tl.dot(query, state, input_precision=PRECISION) * shrunk
        result += tl.dot(tl.load(weights + at_cell), update, input_precision=PRECISION)
        at_out = out + (token[:, None] * NUM_VALUES + head) * VALUE_DIM + at_value[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=is_token[:, None] & is_value[None, :])
        key *= tl.exp(last - since)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(key), update, input_precision=PRECISION)
        slot += NUM_VALUES
    tl.store(pool + tl.load(targets + span).to(tl.int64) * STATE + offsets, state, mask=is_state)


def delta_spans(
    projected: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources: Tensor,
    targets: Tensor,
    ends: Tensor,
    longest: int,
    part: DeltaNet,
    *,
    columns: int = 32,
    warps: int = 4,
) -> Tensor:
    """Append spans of tokens to sequences.

    Args:
        projected: (T, width), see :func:`enginehouse_hf.cuda.delta_step.delta_step`; span by span.
        conv_pool, state_pool: states by row, as there.
        sources, targets: (num_spans,) rows that are read, and other rows, which are written.
        ends: (num_spans + 1,) int32, running sums of the numbers of tokens.
        longest: number of tokens of the longest span.
        columns: columns of a state per program of the recurrence.

    Returns:
        (T, num_values * value_dim), input of the output projection.
    """
    num_tokens, num_spans, size = len(projected), len(sources), part.conv.shape[1]
    num_channels = part.conv.shape[0]
    sizes = part.num_keys, part.num_values, part.key_dim, part.value_dim
    mixed = projected.new_empty(num_tokens, num_channels)
    grid = triton.cdiv(longest, 32), triton.cdiv(num_channels, 64), num_spans
    _convolve[grid](
        projected, conv_pool, sources, targets, ends, part.conv, mixed, projected.stride(0), *sizes, size,
        part.by_key_head, 32, 64, num_warps=4,
    )  # fmt: skip
    num_chunks = num_tokens // _CHUNK + num_spans + 1
    systems = torch.empty(2, num_chunks, part.num_values, _CHUNK, _CHUNK, dtype=torch.float32, device=projected.device)
    decays = torch.empty(num_chunks, part.num_values, _CHUNK, dtype=torch.float32, device=projected.device)
    keys = max(16, triton.next_power_of_2(part.key_dim))
    precision = "ieee" if projected.dtype == torch.float32 else "tf32"
    _relate[(triton.cdiv(longest, _CHUNK), part.num_values, num_spans)](
        mixed, projected, ends, part.decay, part.time_bias, systems[0], systems[1], decays, projected.stride(0), *sizes,
        keys, part.by_key_head, _CHUNK, precision, num_warps=1,
    )  # fmt: skip
    out = projected.new_empty(num_tokens, part.num_values * part.value_dim)
    columns = min(columns, max(16, triton.next_power_of_2(part.value_dim)))
    _scan[(triton.cdiv(part.value_dim, columns), part.num_values, num_spans)](
        mixed, state_pool, sources, targets, ends, systems[0], systems[1], decays, out, *sizes, keys, columns, _CHUNK,
        precision, num_warps=warps,
    )  # fmt: skip
    gate_values(out, projected, part)
    return out
