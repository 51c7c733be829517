"""Attention of one packed step over the pool: single tokens by our own kernel, longer spans by another kernel.

Both networks call :meth:`PoolAttention.attend` once per layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from enginehouse_hf.cuda.decode_attention import decode_attention
from enginehouse_hf.cuda.long_spans import Kernel, fits, span_by_span
from enginehouse_hf.cuda.step import Step

__all__ = ["PoolAttention"]


class PoolAttention:
    """Attention for all layers. ``kernel`` is used for longer spans; None computes them one by one."""

    def __init__(self, kernel: Kernel | None) -> None:
        self.kernel = kernel

    def attend(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend with all new tokens, whose keys and values are already in the pool.

        Args:
            query: (T, num_query, head_dim), contiguous.
            layer: index of the layer.
            sinks: (num_query,), for each head the score of a further key whose value is zero.

        Returns:
            (T, num_query, head_dim of the values).
        """
        keys, values = step.state.layers[layer]
        num_decodes = step.num_decodes
        decoded = None
        if num_decodes:
            decoded = decode_attention(
                query[:num_decodes], keys.numbers, values.numbers, step.state.table, step.slots, step.lengths,
                key_scales=keys.scales, value_scales=values.scales,
                scale=scaling, window=window, softcap=softcap, sinks=sinks,
            )  # fmt: skip
            if num_decodes == step.num_tokens:
                return decoded
        rest = query[num_decodes:]
        seen_keys, seen_values = (part.gather(step.gather, query.dtype) for part in (keys, values))
        sees_ahead = any(segment.sees_ahead for segment in step.segments)
        fitting = softcap is None and not sees_ahead and fits(rest.dtype, rest.shape[2], seen_values.shape[2])
        if self.kernel is not None and fitting:
            longer = self.kernel.attend(rest, seen_keys, seen_values, step, scaling, window, sinks)
        else:
            longer = span_by_span(rest, seen_keys, seen_values, step, scaling, window, softcap, sinks)
        return longer if decoded is None else torch.cat([decoded, longer])
