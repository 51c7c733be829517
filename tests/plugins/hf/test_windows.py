"""Attention of vision towers in windows: that of each window alone, whatever computes it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from enginehouse_hf.images.windows import window_attention  # noqa: E402 - imports torch

pytestmark = pytest.mark.hf


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")])
def test_tokens_attend_to_their_window(device: str, dtype: str) -> None:
    """Windows of several sizes, heads of 80 dimensions as in Qwen2.5-VL."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(3, 1, 2, 144, 80, generator=generator).to(device, getattr(torch, dtype))
    bounds = torch.tensor([0, 64, 128, 144], dtype=torch.int32, device=device)
    query, key, value = states.transpose(3, 2).contiguous().transpose(3, 2)  # the layout that transformers has
    found, _ = window_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.1, cu_seq_lens_q=bounds, max_length_q=64
    )
    number = torch.bucketize(torch.arange(144, device=device), bounds.long(), right=True)
    scores = (query.float() @ key.float().transpose(2, 3) * 0.1).masked_fill(number[:, None] != number, float("-inf"))
    expected = (scores.softmax(-1) @ value.float()).transpose(1, 2)

    assert found.shape == (1, 144, 2, 80)
    assert (found.float() - expected).norm() < (1e-4 if dtype == "float32" else 1e-2) * expected.norm()
