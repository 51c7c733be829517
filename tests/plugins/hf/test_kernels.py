"""Kernels of the fused layers beside plain torch, at sizes that tiny models do not have."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.hf,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_NEAR = {"float32": 1e-4, "float16": 0.003, "bfloat16": 0.01}


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


def _mxfp4(rows: int, width: int) -> Any:
    from enginehouse_hf.packed import Packed

    generator = torch.Generator(device="cuda").manual_seed(rows + width)
    codes = torch.randint(-(1 << 31), 1 << 31, (rows, width // 8), generator=generator, device="cuda")
    scales = torch.randint(120, 126, (rows, width // 32), generator=generator, device="cuda")
    return Packed(codes.to(torch.int32), scales.to(torch.uint8))


def _in_blocks(weight: Any) -> Any:
    """FP8 with a factor for 128 columns of a row."""
    from enginehouse_hf.packed import Packed, quantized

    parts = [quantized(columns, "fp8") for columns in weight.split(128, 1)]
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts], 1).view(torch.float8_e4m3fn)
    return Packed(codes, torch.cat([part.scales for part in parts], 1))


_FORMS = ("plain", "fp8", "fp8 in blocks", "int4", "int4, groups of 32", "mxfp4")


def _weights(form: str, dtype: str, rows: int, width: int, bias: bool) -> tuple[Any, Any]:
    """A projection, and what its weights are in float32."""
    from attrs import evolve

    from enginehouse_hf.cuda.structure import Linear
    from enginehouse_hf.packed import quantized, unpacked

    weight, added = _random(dtype, rows, width), _random(dtype, rows) if bias else None
    if form == "plain":
        return Linear(weight, added), weight.float()
    if form == "int4, groups of 32":
        narrow = quantized(weight.view(-1, 32), "int4")
        scales, zeros = (one.view(rows, -1) for one in (narrow.scales, narrow.zeros))
        part = evolve(narrow, codes=narrow.codes.view(rows, -1), scales=scales, zeros=zeros)
    elif form == "mxfp4":
        part = _mxfp4(rows, width)
    else:
        part = _in_blocks(weight) if form == "fp8 in blocks" else quantized(weight, form)  # type: ignore[arg-type]
    return evolve(part, bias=added), unpacked(part, torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("is_clamped", [False, True])
def test_experts_give_the_sum_of_the_chosen_ones(dtype: str, form: str, is_clamped: bool) -> None:
    """One token, few pairs of token and expert, some, and many; one expert that every token chooses."""
    from enginehouse_hf.cuda.experts import run_experts
    from enginehouse_hf.cuda.structure import Clamped, Experts, Linear

    num_experts, num_chosen = 12, 3
    hidden, width = (256, 384) if "blocks" in form else (320, 96) if "int4" not in form else (256, 128)
    gate_up, wide_gate_up = _weights(form, dtype, num_experts * 2 * width, hidden, is_clamped)
    down, wide_down = _weights(form, dtype, num_experts * hidden, width, is_clamped)
    router = Linear(_random(dtype, num_experts, hidden), _random(dtype, num_experts) if is_clamped else None)
    clamped = Clamped(1.702, 0.5)
    part = Experts(router, num_chosen, True, gate_up, down, clamped if is_clamped else "silu", alternates=is_clamped)
    for num_tokens in (1, 2, 40, 130, 600):
        x = _random(dtype, num_tokens, hidden) + router.weight[5]
        logits = torch.nn.functional.linear(x, router.weight, router.bias).float()
        weights, ids = torch.softmax(logits, -1).topk(num_chosen, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        both = torch.einsum("th,tkih->tki", x.float(), wide_gate_up.view(num_experts, 2 * width, hidden)[ids])
        if is_clamped:
            both += gate_up.bias.float().view(num_experts, -1)[ids]
            gate, up = both[..., ::2].clamp(max=0.5), both[..., 1::2].clamp(-0.5, 0.5)
            active = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            gate, up = both.chunk(2, -1)
            active = torch.nn.functional.silu(gate) * up
        result = torch.einsum("tki,tkhi->tkh", active, wide_down.view(num_experts, hidden, width)[ids])
        if is_clamped:
            result += down.bias.float().view(num_experts, -1)[ids]
        expected = (result * weights[:, :, None]).sum(1)

        found = run_experts(x, part).float().sum(1)
        assert (ids == 5).any(1).all()
        assert _difference(found, expected) < _NEAR[dtype]
        assert torch.equal(run_experts(x, part).float().sum(1), found)


def _stack(dtype: str, parts: tuple[int, ...], width: int, num_adapters: int, rank: int) -> Any:
    from enginehouse_hf.cuda.lora import Stack

    a = _random(dtype, len(parts) * num_adapters * rank, width)
    return Stack(a, _random(dtype, sum(parts), num_adapters * rank), parts, num_adapters, rank)


def _scales(num_adapters: int, num_tokens: int) -> Any:
    """Some tokens use no adapter, some one, some several."""
    is_used = _random("float32", num_adapters, num_tokens + 1)[:, 1:] > 0.2
    return _random("float32", num_adapters, num_tokens) * is_used


def _add_updates(before: Any, x: Any, stack: Any, scales: Any) -> Any:
    """``before`` and the updates, in float32."""
    low = (x.float() @ stack.a.float().T).view(len(x), len(stack.rows), stack.num_adapters, stack.rank)
    low, result = (low * scales.T[:, None, :, None]).flatten(2), before.float().clone()
    for index, (begin, end) in enumerate(pairwise(accumulate((0, *stack.rows)))):
        result[:, begin:end] += low[:, index] @ stack.b[begin:end].float().T
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("parts", "activation"), [((144, 40, 8), None), ((96,), None), ((104, 104), "silu"), ((208,), "gelu_tanh")]
)
@pytest.mark.parametrize(("num_adapters", "rank"), [(1, 16), (4, 32), (16, 16), (2, 256)])
def test_updates_of_adapters_are_those_of_each_token_alone(
    dtype: str, parts: tuple[int, ...], activation: str | None, num_adapters: int, rank: int
) -> None:
    """Tokens with no adapter, with one and with several; a token with none keeps its result to the bit."""
    from enginehouse_hf.cuda.layers import gated
    from enginehouse_hf.cuda.lora import expand, expand_gated, shrink

    width, num_rows, near = 1040, sum(parts), _NEAR.get(dtype, 0.01)
    stack = _stack(dtype, parts, width, num_adapters, rank)
    for num_tokens in (1, 7, 40, 150):
        x, before = _random(dtype, num_tokens, width), _random(dtype, num_tokens, num_rows)
        scales = _scales(num_adapters, num_tokens)
        expected, low = _add_updates(before, x, stack, scales), shrink(x, stack, scales)
        if activation is not None:
            assert _difference(expand_gated(before, low, stack, scales, activation), gated(expected, activation)) < near
            continue
        none = (scales == 0).all(0)
        apart = torch.randn(num_tokens, 3, num_rows, device="cuda")
        apart[:, 0] = before
        kept, whole = apart[:, 1:].clone(), before.clone()
        expand(apart[:, 0], low, stack, scales)
        expand(whole, low, stack, scales)

        assert _difference(apart[:, 0], expected) < near and _difference(whole, expected) < near
        assert torch.equal(apart[:, 1:], kept) and torch.equal(whole[none], before[none])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("parts", "activation"), [((256, 64, 64), None), ((128,), None), ((192, 192), "silu"), ((384,), "silu")]
)
@pytest.mark.parametrize(("num_adapters", "rank"), [(4, 16), (16, 16), (8, 64)])
def test_products_for_one_token_and_for_a_few_add_updates_of_adapters(
    dtype: str, parts: tuple[int, ...], activation: str | None, num_adapters: int, rank: int
) -> None:
    """Tokens with no adapter keep the product to the bit."""
    from enginehouse_hf.cuda.few import project_few
    from enginehouse_hf.cuda.joined import Update
    from enginehouse_hf.cuda.layers import gated
    from enginehouse_hf.cuda.structure import Linear
    from enginehouse_hf.cuda.vector import project

    width = 2560
    part = Linear(_random(dtype, sum(parts), width), None if activation else _random(dtype, sum(parts)))
    stack = _stack(dtype, parts, width, num_adapters, rank)
    for num_tokens in (1, 2, 7, 16, 32):
        x, scales = _random(dtype, num_tokens, width), _scales(num_adapters, num_tokens)
        update = Update(stack, scales, torch.zeros(1, dtype=torch.int32, device="cuda"))
        apply = project if num_tokens == 1 else project_few
        found, before = apply(x, part, activation, update), apply(x, part, activation)
        if found is None:
            assert dtype == "float32"
            continue
        product = x.float() @ part.weight.float().T + (0.0 if part.bias is None else part.bias.float())
        expected = _add_updates(product, x, stack, scales)
        expected = expected if activation is None else gated(expected, activation)
        none = (scales == 0).all(0)

        assert torch.equal(found[none], before[none])
        assert _difference(found.sum(1) if found.dim() == 3 else found, expected) < _NEAR[dtype]


@pytest.mark.parametrize("norm_width", [None, 32, 128])
def test_parts_of_a_product_are_summed_by_rotation_and_gate(norm_width: int | None) -> None:
    """As if they had been summed and rounded before; with norms of heads, of all together, and without."""
    from enginehouse_hf.cuda.kv_tensor import KvTensor
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
        pool = KvTensor(keys, None), KvTensor(values, None)
        query = rotate_and_store(qkv.clone(), *pool, positions, places, part, torch.bfloat16)  # changes it
        return torch.cat([query, keys, values])

    torch.testing.assert_close(rotated(parts), rotated(whole), rtol=0.02, atol=0.02)
    torch.testing.assert_close(gated(parts, "silu", torch.bfloat16), gated(whole, "silu"), rtol=0.02, atol=0.02)
