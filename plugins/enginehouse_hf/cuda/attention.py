"""Attention of one packed step over the pool: single tokens by our own kernel, longer spans by torch's flash attention.

Flash attention is a private operation of torch (``aten::_flash_attention_forward``), so it is tried on numbers first
(:func:`flash_is_right`); where it is missing, wrong, or cannot do what a layer asks for, each span is computed by
``scaled_dot_product_attention`` with a mask. Both networks call :meth:`PoolAttention.attend` once per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from enginehouse_hf.cuda.decode_attention import decode_attention
from enginehouse_hf.cuda.step import Lane, Step

__all__ = ["PoolAttention", "flash_is_right"]

_FLASH_MAX_DIM = 256


class PoolAttention:
    """Attends in any layer. ``uses_flash`` says whether flash attention may be used for longer spans."""

    def __init__(self, uses_flash: bool) -> None:
        self.uses_flash = uses_flash

    def attend(
        self, step: Step, layer: int, query: Tensor, *, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Attention of all new tokens, whose keys and values are in the pool already.

        Args:
            query: (T, num_query, head_dim), contiguous.
            layer: index of the layer.

        Returns:
            (T, num_query, head_dim of the values).
        """
        keys, values = step.state.layers[layer]
        num_decodes = step.num_decodes
        decoded = None
        if num_decodes:
            decoded = decode_attention(
                query[:num_decodes], keys, values, step.state.table, step.slots, step.lengths,
                scale=scale, window=window, softcap=softcap,
            )  # fmt: skip
            if num_decodes == step.num_tokens:
                return decoded
        rest = query[num_decodes:]
        seen_keys, seen_values = keys.index_select(0, step.gather), values.index_select(0, step.gather)
        if self.uses_flash and softcap is None and _fits_flash(rest, seen_values):
            longer = _flash(rest, seen_keys, seen_values, step, scale, window)
        else:
            longer = _span_by_span(rest, seen_keys, seen_values, step, scale, window, softcap)
        return longer if decoded is None else torch.cat([decoded, longer])


def _fits_flash(query: Tensor, values: Tensor) -> bool:
    dim = query.shape[2]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    return is_half and dim == values.shape[2] and dim <= _FLASH_MAX_DIM and dim % 8 == 0


def _flash(query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float, window: int | None) -> Tensor:
    longest_query = max(lane.end - lane.begin for lane in step.lanes)
    longest_key = max(lane.stop for lane in step.lanes)
    result: Tensor = torch.ops.aten._flash_attention_forward(
        query, keys, values, step.query_ends, step.key_ends, longest_query, longest_key, 0.0, True, False,
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return result


def _span_by_span(
    query: Tensor, keys: Tensor, values: Tensor, step: Step, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    results, seen = [], 0
    for lane in step.lanes:
        begin, end = lane.begin - step.num_decodes, lane.end - step.num_decodes
        parts = query[begin:end], keys[seen : seen + lane.stop], values[seen : seen + lane.stop]
        results.append(_span(lane, *parts, scale, window, softcap))
        seen += lane.stop
    return torch.cat(results)


def _span(
    lane: Lane, query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """One span: query (t, num_query, D) over everything that its sequence holds, (stop, num_kv, D)."""
    at_query = torch.arange(lane.start, lane.stop, device=query.device)[:, None]
    at_key = torch.arange(lane.stop, device=query.device)[None]
    mask = at_key <= at_query
    if window is not None:
        mask &= at_key > at_query - window
    group = query.shape[1] // keys.shape[1]
    q = query.transpose(0, 1)
    k, v = (part.transpose(0, 1).repeat_interleave(group, 0) for part in (keys, values))
    if softcap is None:
        result = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None, None], scale=scale)[0]
    else:
        scores = torch.tanh(q @ k.transpose(1, 2) * (scale / softcap)) * softcap
        result = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1, dtype=torch.float32).to(v.dtype) @ v
    return result.transpose(0, 1)


def flash_is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's flash attention agrees with its plain attention on ragged spans, windows and grouped heads."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    generator = torch.Generator(device).manual_seed(0)
    lanes = [Lane(0, 37, 0), Lane(37, 42, 85), Lane(42, 106, 0)]
    query, keys, values = (
        torch.randn(num, heads, 64, device=device, dtype=dtype, generator=generator)
        for num, heads in ((106, 4), (191, 2), (191, 2))
    )
    step = _Probe(lanes, device)
    for window in (None, 16):
        try:
            found = _flash(query, keys, values, step, 0.125, window).float()  # type: ignore[arg-type]
        except (RuntimeError, TypeError, AttributeError):
            return False
        expected = _span_by_span(query.float(), keys.float(), values.float(), step, 0.125, window, None)  # type: ignore[arg-type]
        if not bool((found - expected).norm() <= 0.02 * expected.norm()):
            return False
    return True


class _Probe:
    """As much of a step as attention over longer spans reads."""

    num_decodes = 0

    def __init__(self, lanes: list[Lane], device: torch.device) -> None:
        self.lanes = lanes
        queries, keys = [0], [0]
        for lane in lanes:
            queries.append(lane.end)
            keys.append(keys[-1] + lane.stop)
        self.query_ends = torch.tensor(queries, dtype=torch.int32, device=device)
        self.key_ends = torch.tensor(keys, dtype=torch.int32, device=device)
