"""Keys and values in 8 bits: stored by each network, read back; on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        _DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs a CUDA device or TRITON_INTERPRET=1"
    ),
]

_NUM_QUERY, _NUM_KV, _DIM = 6, 3, 48
_PLACES = [7, 0, 5, 2]


def _tokens(dtype: str) -> Any:
    """(T, num_kv, head_dim) with heads of very different sizes, and one of zeros."""
    torch.manual_seed(0)
    heads = torch.randn(len(_PLACES), _NUM_KV, _DIM) * torch.tensor([1e-3, 1.0, 500.0, 1e4])[:, None, None]
    heads[1, 1] = 0.0
    return heads.to(getattr(torch, dtype)).to(_DEVICE)


def _is_near(found: Any, expected: Any) -> Any:
    """Three bits of a mantissa, and a least step of 2**-9 in units of the largest / 448."""
    allowed = (expected.abs() / 15).clamp_min(expected.abs().amax(-1, keepdim=True) * 2.0**-9 / 448)
    return ((found.float() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kinds", [("fp8", "fp8"), ("fp8", None), (None, "fp8")])
def test_what_is_stored_is_read_back(dtype: str, kinds: tuple[Any, Any]) -> None:
    """By the kernel of the fused layers, and by that of transformers' layers: the same bytes but for ties."""
    from enginehouse_hf.cuda.kv_tensor import KvTensor
    from enginehouse_hf.cuda.layers import rotate_and_store
    from enginehouse_hf.cuda.structure import Attention, Linear

    keys = _tokens(dtype)
    values = keys.flip(0)
    layers = [
        [KvTensor.allocate(9, (_NUM_KV, _DIM), keys.dtype, keys.device, kind) for kind in kinds] for _ in range(2)
    ]
    places = torch.tensor(_PLACES, dtype=torch.int32, device=_DEVICE)
    query = torch.randn(len(_PLACES), _NUM_QUERY, _DIM).to(keys)
    nothing = Linear(keys)
    part = Attention(
        qkv=nothing, norms=None, rotary=None, output=nothing, head_dim=_DIM, scale=1.0, window=None, softcap=None
    )
    found = rotate_and_store(torch.cat([query, keys, values], 1).flatten(1), *layers[0], places, places, part)
    for tensor, new in zip(layers[1], (keys, values), strict=True):
        tensor.write(places.long(), new)

    assert torch.equal(found, query)
    for layer in layers:
        for tensor, new in zip(layer, (keys, values), strict=True):
            kept = tensor.gather(places, keys.dtype)
            assert kept.dtype == keys.dtype
            assert _is_near(kept, new.float()) if tensor.scales is not None else torch.equal(kept, new)
            assert not tensor.numbers[3].float().any()  # a place that was not written
    for fused, plain in zip(*layers, strict=True):
        for one, other in zip(fused.tensors, plain.tensors, strict=True):
            assert (one == other).float().mean() > 0.98


def test_a_place_takes_half_the_bytes_and_four_for_each_head() -> None:
    from enginehouse_hf.cuda.kv_tensor import KvTensor

    whole, packed = (
        sum(
            tensor[0].nbytes
            for tensor in KvTensor.allocate(9, (_NUM_KV, _DIM), torch.bfloat16, torch.device("cpu"), kind).tensors
        )
        for kind in (None, "fp8")
    )
    assert (whole, packed) == (_NUM_KV * _DIM * 2, _NUM_KV * (_DIM + 4))
