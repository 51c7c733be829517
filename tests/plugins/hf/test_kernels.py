"""Kernels of the fused layers beside plain torch, at sizes that tiny models do not have."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_NEAR = {"float32": 1e-4, "bfloat16": 0.01}


def _random(dtype: str, *shape: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").mul_(0.2).to(getattr(torch, dtype))


def _difference(found: Any, expected: Any) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 2560, 4096])
@pytest.mark.parametrize("is_gated", [False, True])
def test_products_for_one_token_and_for_a_few(dtype: str, width: int, is_gated: bool) -> None:
    from enginehouse_hf.cuda.few import project_few
    from enginehouse_hf.cuda.structure import Linear
    from enginehouse_hf.cuda.vector import project

    num_rows = 256
    bias = None if is_gated else _random(dtype, num_rows)
    part = Linear(_random(dtype, num_rows, width), bias)
    for num_tokens in (1, 2, 16, 32):
        x = _random(dtype, num_tokens, width)
        expected = torch.nn.functional.linear(x.float(), part.weight.float(), bias if bias is None else bias.float())
        if is_gated:
            gate, up = expected.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        activation = "silu" if is_gated else None
        found = project(x, part, activation) if num_tokens == 1 else project_few(x, part, activation)
        if found is None:
            assert dtype == "float32" or width == 64
            continue

        assert _difference(found.sum(1) if found.dim() == 3 else found, expected) < _NEAR[dtype]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_tokens", [1, 2, 40, 130, 600])
def test_experts_give_the_sum_of_the_chosen_ones(dtype: str, num_tokens: int) -> None:
    """Few pairs of token and expert, some, and many; one expert that every token chooses."""
    from enginehouse_hf.cuda.experts import run_experts
    from enginehouse_hf.cuda.structure import Experts

    num_experts, num_chosen, hidden, width = 12, 3, 128, 80
    part = Experts(
        router=_random(dtype, num_experts, hidden),
        num_chosen=num_chosen,
        normalises=True,
        gate_up=_random(dtype, num_experts, 2 * width, hidden),
        down=_random(dtype, num_experts, hidden, width),
        activation="silu",
    )
    x = _random(dtype, num_tokens, hidden) + part.router[5]
    chances = torch.softmax(torch.nn.functional.linear(x, part.router).float(), -1)
    weights, ids = chances.topk(num_chosen, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,tkih->tki", x.float(), part.gate_up.float()[ids]).chunk(2, -1)
    active = torch.nn.functional.silu(gate) * up
    expected = torch.einsum("tki,tkhi,tk->th", active, part.down.float()[ids], weights)

    found = run_experts(x, part).sum(1)
    assert (ids == 5).any(1).all()
    assert _difference(found, expected) < _NEAR[dtype]
    assert torch.equal(run_experts(x, part).sum(1), found)


@pytest.mark.parametrize("norm_width", [None, 32, 128])
def test_parts_of_a_product_are_summed_by_rotation_and_gate(norm_width: int | None) -> None:
    """As if they had been summed and rounded before; with norms of heads, of all together, and without."""
    from enginehouse_hf.cuda.layers import gated, rotate_and_store
    from enginehouse_hf.cuda.structure import Attention, Linear, Norm, Rotary

    num_tokens, num_query, num_kv, dim = 3, 4, 4, 32
    parts = torch.randn(num_tokens, 4, (num_query + 2 * num_kv) * dim, device="cuda")
    whole = parts.sum(1).to(torch.bfloat16)
    norm = None if norm_width is None else Norm(_random("bfloat16", norm_width), 1e-5, True)
    rotary = Rotary(_random("bfloat16", 10, dim // 2), _random("bfloat16", 10, dim // 2), False)
    part = Attention(
        qkv=Linear(whole),
        norms=None if norm is None else (norm, norm),
        rotary=rotary,
        output=Linear(whole),
        head_dim=dim,
        scale=1.0,
        window=None,
        softcap=None,
    )
    positions, places = (torch.tensor(numbers, dtype=torch.int32, device="cuda") for numbers in ([1, 2, 3], [5, 2, 1]))

    def rotated(qkv: Any) -> Any:
        keys, values = (torch.zeros(8, num_kv, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        return torch.cat([rotate_and_store(qkv, keys, values, positions, places, part), keys, values])

    torch.testing.assert_close(rotated(parts), rotated(whole), rtol=0.02, atol=0.02)
    torch.testing.assert_close(gated(parts, "silu", torch.bfloat16), gated(whole, "silu"), rtol=0.02, atol=0.02)
