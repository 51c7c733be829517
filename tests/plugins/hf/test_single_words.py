"""The kernel for one token and packed weights beside unpacked ones: on a GPU, or in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
from attrs import evolve

torch = pytest.importorskip("torch")

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        _DEVICE == "cpu" and not os.environ.get("TRITON_INTERPRET"), reason="needs a CUDA device or TRITON_INTERPRET=1"
    ),
]

_NEAR = {"float32": 3e-4, "float16": 0.005, "bfloat16": 0.02}


def _packed(kind: str, num_rows: int, width: int) -> Any:
    """Weights of four or eight bits, with one factor per row or per group of 32 columns."""
    from enginehouse_hf.packed import Packed, PackedLinear, quantized, quantized_head

    weight = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)) * 0.1
    if kind == "fp8 groups":
        groups = weight.view(num_rows, -1, 32)
        scales = groups.abs().amax(2) / 448.0
        codes = (groups / scales[:, :, None]).view(weight.shape).to(torch.float8_e4m3fn)
        return Packed(codes.to(_DEVICE), scales.to(_DEVICE))
    weight = weight.to(_DEVICE)
    return quantized_head(weight) if kind == "int8" else PackedLinear(quantized(weight, kind)).packed


@pytest.mark.parametrize("kind", ["fp8", "fp8 groups", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_rows", "width"), [(72, 1440), (32, 4096), (48, 64), (16, 8192)])
@pytest.mark.parametrize("may_split", [False, True])
def test_one_token_is_multiplied_as_by_the_unpacked_weights(
    kind: str, dtype: str, num_rows: int, width: int, may_split: bool
) -> None:
    """Also where columns and rows do not fill the last program; a few states are large."""
    from enginehouse_hf.cuda.packed import project_packed
    from enginehouse_hf.cuda.single_words import has_words
    from enginehouse_hf.packed import unpacked

    x = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    x[:, 7] *= 50.0
    x = x.to(_DEVICE, getattr(torch, dtype))
    bias = torch.randn(num_rows, generator=torch.Generator().manual_seed(1)).to(x)
    packed = evolve(_packed(kind, num_rows, width), bias=bias)
    expected = torch.nn.functional.linear(x.float(), unpacked(packed, torch.float32), bias.float())
    found = project_packed(x, packed, may_split=may_split)

    assert has_words(packed)
    assert found.dim() == 2 or may_split
    found = found.float() if found.dim() == 2 else found.sum(1)
    assert (found - expected).norm() < _NEAR[dtype] * expected.norm()


@pytest.mark.parametrize("kind", ["fp8", "fp8 groups", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("may_split", [False, True])
def test_what_is_activated_is_never_split(kind: str, dtype: str, may_split: bool) -> None:
    from enginehouse_hf.cuda.packed import project_packed
    from enginehouse_hf.packed import unpacked

    packed = _packed(kind, 2 * 41, 8192)
    x = torch.randn(1, 8192, generator=torch.Generator().manual_seed(0)).to(_DEVICE, getattr(torch, dtype))
    gate, up = torch.nn.functional.linear(x.float(), unpacked(packed, torch.float32)).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up
    found = project_packed(x, packed, "silu", may_split=may_split)

    assert found.shape == (1, 41)
    assert (found.float() - expected).norm() < _NEAR[dtype] * expected.norm()
