"""Attention of a vision tower in windows, all at once on a GPU: Qwen2.5-VL's is else computed window by window.

transformers gives the bounds of the windows only to attention functions with ``flash`` in their name; others get one
window per call, in some 10,000 calls for a large image. Registered when it is imported; see ``Family.attention``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

__all__ = ["WINDOW_ATTENTION_NAME", "window_attention"]

WINDOW_ATTENTION_NAME = "enginehouse_flash_windows"


def window_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Attention function that transformers calls, with its signature; (1, H, T, D) gives (1, T, H, D).

    Args:
        attention_mask: always None.
        cu_seq_lens_q: (num_windows + 1,) int32, bounds of the windows, whose tokens attend to each other.
        max_length_q: tokens of the longest one.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        packed = (part[0].transpose(0, 1) for part in (query, key, value))
        bounds = cu_seq_lens_q.to(torch.int32)
        longest = int(max_length_q)
        found, *_ = torch.ops.aten._flash_attention_forward(
            *packed, bounds, bounds, longest, longest, 0.0, False, False, scale=scaling
        )
        return found[None], None
    sizes = cu_seq_lens_q.diff().tolist()
    windows = zip(*(part.split(sizes, 2) for part in (query, key, value)), strict=True)
    return torch.cat([scaled_dot_product_attention(*parts, scale=scaling) for parts in windows], 2).transpose(
        1, 2
    ), None


AttentionInterface.register(WINDOW_ATTENTION_NAME, window_attention)
