"""One token of a gated delta net per sequence, in Triton: convolution, recurrence and gated norm over pools of states.

Called by ``mixers.py``. A program computes some columns of the state of one head of one sequence; it reads a row of
the pools and writes another one. The arithmetic and its rounding are those of transformers' module: everything
in float32 but the results of the convolution and of the recurrence, which have the type of the model.

Source: Gated Delta Networks (Yang et al., 2024), equation 10.
"""

from __future__ import annotations

import triton
import triton.language as tl
from attrs import frozen
from torch import Tensor

from enginehouse_hf.cuda.overlap import OVERLAPPING, await_previous

__all__ = ["DeltaNet", "delta_step", "gate_values", "rates"]


@frozen(eq=False)
class DeltaNet:
    """Parts of a gated delta net besides its projections.

    Attributes:
        conv: (channels, kernel size) weights of the convolution over queries, keys and values.
        decay, time_bias: (num_value_heads,), ``A_log`` and ``dt_bias``.
        norm: (value_dim,) weights of the norm of each head.
        num_keys, num_values: numbers of heads; a key head serves ``num_values / num_keys`` value heads.
        by_key_head: the order of the projected numbers; see :func:`delta_step`.
    """

    conv: Tensor
    decay: Tensor
    time_bias: Tensor
    norm: Tensor
    norm_eps: float
    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    by_key_head: bool = False


@triton.jit
def _convolved(
    at_new, pool, weight, source, target, channels, inside, writes, NUM_CHANNELS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of one new token, apply SiLU, and write their last inputs to the target row."""
    kind: tl.constexpr = at_new.dtype.element_ty
    new = tl.load(at_new, mask=inside, other=0.0)
    total = tl.zeros([channels.shape[0]], tl.float32)
    at_source = pool + source * NUM_CHANNELS * SIZE + channels * SIZE
    at_target = pool + target * NUM_CHANNELS * SIZE + channels * SIZE
    for place in tl.static_range(SIZE):
        value = new
        if place < SIZE - 1:
            value = tl.load(at_source + place + 1, mask=inside, other=0.0)
        factor = tl.load(weight + channels * SIZE + place, mask=inside, other=0.0).to(tl.float32)
        total += factor * value.to(tl.float32)
        tl.store(at_target + place, value, mask=inside & writes)
    total = total.to(kind).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(kind).to(tl.float32)


@triton.jit
def rates(at_rate, at_time, inside, decay, time_bias):
    """Return the logarithm of how much of the state one head keeps, and how much it learns, float32."""
    projected = tl.load(at_rate, mask=inside, other=0.0)
    learned = (1.0 / (1.0 + tl.exp(-projected.to(tl.float32)))).to(projected.dtype).to(tl.float32)
    time = tl.load(at_time, mask=inside, other=0.0).to(tl.float32) + tl.load(time_bias).to(tl.float32)
    softplus = tl.where(time > 20.0, time, tl.log(1.0 + tl.exp(tl.minimum(time, 20.0))))
    return -tl.exp(tl.load(decay).to(tl.float32)) * softplus, learned


@triton.jit
def _normed_gated(wide, factor, gate, eps, WIDTH: tl.constexpr, kind: tl.constexpr):
    """RMS norm of the values of one head, float32, times SiLU of their gates."""
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = (factor.to(tl.float32) * scaled.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    gate = gate.to(tl.float32)
    return (scaled * gate / (1.0 + tl.exp(-gate))).to(kind)


@triton.jit
def _delta_step(
    projected, conv_pool, state_pool, sources, targets, conv, decay, time_bias, norm, out, norm_eps, stride,
    NUM_KEYS: tl.constexpr, NUM_VALUES: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SIZE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BY_KEY_HEAD: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    await_previous()
    head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    kind: tl.constexpr = projected.dtype.element_ty
    source = tl.load(sources + sequence).to(tl.int64)
    target = tl.load(targets + sequence).to(tl.int64)
    GROUP: tl.constexpr = NUM_VALUES // NUM_KEYS
    ALL_KEYS: tl.constexpr = NUM_KEYS * KEY_DIM
    ALL_VALUES: tl.constexpr = NUM_VALUES * VALUE_DIM
    NUM_CHANNELS: tl.constexpr = 2 * ALL_KEYS + ALL_VALUES
    row = projected + sequence * stride
    at_key = tl.arange(0, KEYS)
    at_value = part * VALUES + tl.arange(0, VALUES)
    is_key, is_value = at_key < KEY_DIM, at_value < VALUE_DIM
    key_head = head // GROUP
    is_first = (head % GROUP == 0) & (part == 0)
    channel = key_head * KEY_DIM + at_key
    value_channel = 2 * ALL_KEYS + head * VALUE_DIM + at_value
    if BY_KEY_HEAD:
        own = row + key_head * (2 * KEY_DIM + 2 * GROUP * VALUE_DIM)
        at_queries, at_keys = own + at_key, own + KEY_DIM + at_key
        at_values = own + 2 * KEY_DIM + (head % GROUP) * VALUE_DIM + at_value
        at_gates = at_values + GROUP * VALUE_DIM
        at_rate = row + NUM_CHANNELS + ALL_VALUES + key_head * 2 * GROUP + head % GROUP
        at_time = at_rate + GROUP
    else:
        at_queries, at_keys, at_values = row + channel, row + ALL_KEYS + channel, row + value_channel
        at_gates = at_values + ALL_VALUES
        at_rate = row + NUM_CHANNELS + ALL_VALUES + head
        at_time = at_rate + NUM_VALUES
    query = _convolved(at_queries, conv_pool, conv, source, target, channel, is_key, is_first, NUM_CHANNELS, SIZE)
    key = _convolved(at_keys, conv_pool, conv, source, target, ALL_KEYS + channel, is_key, is_first, NUM_CHANNELS, SIZE)
    value = _convolved(at_values, conv_pool, conv, source, target, value_channel, is_value, True, NUM_CHANNELS, SIZE)
    query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6) / tl.sqrt(KEY_DIM * 1.0)
    key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
    log_kept, learned = rates(at_rate, at_time, True, decay + head, time_bias + head)
    inside = is_key[:, None] & is_value[None, :]
    offsets = (head * KEY_DIM + at_key)[:, None] * VALUE_DIM + at_value[None, :]
    STATE: tl.constexpr = NUM_VALUES * KEY_DIM * VALUE_DIM
    state = tl.load(state_pool + source * STATE + offsets, mask=inside, other=0.0) * tl.exp(log_kept)
    change = (value - tl.sum(state * key[:, None], 0)) * learned
    state += key[:, None] * change[None, :]
    tl.store(state_pool + target * STATE + offsets, state, mask=inside)
    result = tl.sum(state * query[:, None], 0).to(kind)
    if HAS_NORM:
        gate = tl.load(at_gates, mask=is_value, other=0.0)
        factor = tl.load(norm + at_value, mask=is_value, other=0.0)
        result = _normed_gated(result.to(tl.float32), factor, gate, norm_eps, VALUE_DIM, kind)
    tl.store(out + (sequence * NUM_VALUES + head) * VALUE_DIM + at_value, result, mask=is_value)


@triton.jit
def _norm_gate(
    out, projected, norm, norm_eps, stride, begin, group_stride, NUM_VALUES: tl.constexpr, VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    await_previous()
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = out.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < VALUE_DIM
    at_out = out + (sequence * NUM_VALUES + head) * VALUE_DIM + column
    own = projected + sequence * stride + begin + (head // GROUP) * group_stride + (head % GROUP) * VALUE_DIM
    gate = tl.load(own + column, mask=inside, other=0.0)
    wide = tl.load(at_out, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(norm + column, mask=inside, other=0.0)
    tl.store(at_out, _normed_gated(wide, factor, gate, norm_eps, VALUE_DIM, kind), mask=inside)


def delta_step(
    projected: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    sources: Tensor,
    targets: Tensor,
    part: DeltaNet,
    *,
    columns: int | None = None,
    warps: int = 4,
) -> Tensor:
    """Append one token to each sequence.

    Args:
        projected: (N, width), a row is contiguous: queries, keys, values and gates of the values of all heads, then
            rates of learning and of time of each value head. With ``by_key_head`` queries, keys, values and gates of
            each key head, then rates of learning and of time of the value heads of each key head.
        conv_pool: (num_rows, channels, kernel size), the last inputs of the convolution; changed.
        state_pool: (num_rows, num_values, key_dim, value_dim) float32, the states; changed.
        sources, targets: (N,) int32 or int64, rows that are read, and other rows, which are written.
        columns: columns of a state per program.

    Returns:
        (N, num_values * value_dim), input of the output projection.
    """
    num_sequences, size = len(projected), part.conv.shape[1]
    out = projected.new_empty(num_sequences, part.num_values * part.value_dim)
    whole = triton.next_power_of_2(part.value_dim)
    columns = min(columns or (32 if num_sequences * part.num_values < 256 else whole), whole)
    num_parts = triton.cdiv(whole, columns)
    _delta_step[(part.num_values, num_parts, num_sequences)](
        projected, conv_pool, state_pool, sources, targets, part.conv, part.decay, part.time_bias, part.norm, out,
        part.norm_eps, projected.stride(0), part.num_keys, part.num_values, part.key_dim, part.value_dim,
        size, triton.next_power_of_2(part.key_dim), columns, part.by_key_head, num_parts == 1,
        num_warps=warps, **OVERLAPPING,
    )  # fmt: skip
    if num_parts > 1:
        gate_values(out, projected, part)
    return out


def gate_values(out: Tensor, projected: Tensor, part: DeltaNet) -> None:
    """Normalise the values of each head in ``out``, (T, num_values * value_dim), and multiply with gates, in place.

    Args:
        projected: (T, width), see :func:`delta_step`.
    """
    group = part.num_values // part.num_keys
    of_group = group * part.value_dim
    if part.by_key_head:
        begin, group_stride = 2 * part.key_dim + of_group, 2 * (part.key_dim + of_group)
    else:
        begin, group_stride = 2 * part.num_keys * part.key_dim + part.num_values * part.value_dim, of_group
    _norm_gate[(part.num_values, len(out))](
        out, projected, part.norm, part.norm_eps, projected.stride(0), begin, group_stride, part.num_values,
        part.value_dim, group, triton.next_power_of_2(part.value_dim), num_warps=1, **OVERLAPPING,
    )  # fmt: skip
