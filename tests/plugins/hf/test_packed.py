"""Quantised weights: files of each format, quantising at load, and what is refused, against weights unpacked here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from safetensors.torch import load_file, save_file
from torch import Tensor

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.packed import Packed, pack_four_bits, quantized, unpacked
from enginehouse_hf.stored import pack_tensors

pytestmark = pytest.mark.hf

RandomModel = Callable[[str], Path]

_AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's order: the output of each place of four bits, from the lowest."""


def _words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(rows, columns / 8) int32: eight neighbours of a row in each."""
    places = codes.to(torch.int64).unflatten(1, (-1, 8))[:, :, list(order)]
    words = (places << torch.arange(0, 32, 4)).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).contiguous()


def _fp8(weight: Tensor, down: int, across: int) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 weights, factors of blocks, and what they stand for."""
    blocks = weight.unflatten(0, (-1, down)).unflatten(2, (-1, across))
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return codes.view(weight.shape), scales, (codes.float() * scales[:, None, :, None]).view(weight.shape)


def _int4(weight: Tensor, is_symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, factors (rows, groups of 32), zeros, and what they stand for."""
    groups = weight.unflatten(1, (-1, 32))
    if is_symmetric:
        scales, zeros = groups.abs().amax(2) / 7, torch.full(groups.shape[:2], 8)
    else:
        scales = (groups.amax(2) - groups.amin(2)) / 15
        zeros = (-groups.amin(2) / scales).round().clamp(1, 15)
    codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, 15)
    return codes.flatten(1), scales, zeros, ((codes - zeros[:, :, None]) * scales[:, :, None]).flatten(1)


def _compressed(kind: str, bits: int, form: str) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


def _store(form: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of one projection as the files hold them, and what they stand for."""
    rows, width = weight.shape
    if form.startswith("fp8"):
        blocks = {"fp8 blocks": (32, 32), "fp8 rows": (1, width), "fp8 tensor": (rows, width)}[form]
        codes, scales, exact = _fp8(weight, *blocks)
        shape = {"fp8 blocks": scales.shape, "fp8 rows": (rows, 1), "fp8 tensor": (1,)}[form]
        name = "weight_scale_inv" if form == "fp8 blocks" else "weight_scale"
        return {"weight": codes, name: scales.reshape(shape)}, exact
    codes, scales, zeros, exact = _int4(weight, form == "packed")
    if form == "packed":
        return {
            "weight_packed": _words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, width]),
        }, exact
    if form == "awq":
        return {
            "qweight": _words(codes.T, _AWQ),
            "qzeros": _words(zeros.T, _AWQ),
            "scales": scales.T.contiguous(),
        }, exact
    words = _words(codes).T.contiguous()
    columns = (torch.arange(width) // 32).to(torch.int32)
    return {"qweight": words, "qzeros": _words(zeros.T - 1), "scales": scales.T.contiguous(), "g_idx": columns}, exact


_FORMATS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8 rows": _compressed("float", 8, "float-quantized"),
    "fp8 tensor": _compressed("float", 8, "naive-quantized"),
    "packed": _compressed("int", 4, "pack-quantized"),
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False},
}


def _write(source: Path, folder: Path, settings: dict[str, Any] | None, form: str | None) -> Path:
    """A copy of a model: with quantised projections of its layers, or with what these stand for."""
    shutil.copytree(source, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if form is None or not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        stored, exact = _store(form, tensor)
        prefix = name.removesuffix("weight")
        tensors |= {name: exact} if settings is None else {prefix + key: value for key, value in stored.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    if settings is not None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def _logits(folder: Path, **options: Any) -> np.ndarray:
    settings = HfOptions(**{"device": "cpu", "dtype": "float32", "threads": 1, "context": 64, **options})
    runner: Any = HfBackend().open(ModelSource(str(folder), folder), settings, lambda _share, _what: None)
    rows = runner.forward([Span(runner.open_sequence(), 0, np.arange(3, 33, dtype=np.int32), "all")]).host()
    runner.close()
    return np.array(rows)


@pytest.mark.parametrize("form", _FORMATS)
def test_a_quantised_checkpoint_gives_the_logits_of_its_weights(
    random_model: RandomModel, tmp_path: Path, form: str
) -> None:
    source = random_model("qwen2")  # whose projections have biases
    stored = _logits(_write(source, tmp_path / "stored", _FORMATS[form], form))
    exact = _logits(_write(source, tmp_path / "exact", None, form))

    assert np.abs(stored - exact).max() < 1e-4 * np.abs(exact).max()
    assert np.abs(exact - _logits(source)).max() > 1e-3 * np.abs(exact).max(), "the weights were rounded"


@pytest.mark.parametrize(("kind", "bound"), [("fp8", 0.2), ("int4", 0.9)])
def test_quantising_at_load_moves_the_logits_by_little(random_model: RandomModel, kind: str, bound: float) -> None:
    """Of random weights, which have no directions that matter more than others."""
    exact, rounded = _logits(random_model("qwen3")), _logits(random_model("qwen3"), quantize=kind)

    assert 0.001 < np.linalg.norm(rounded - exact) / np.linalg.norm(exact) < bound


def test_rounding_is_to_the_nearest_code() -> None:
    weight = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    error = (unpacked(quantized(weight, "fp8"), torch.float32) - weight).abs()
    assert (error <= weight.abs() / 16 + 1e-3).all()
    step = (weight.view(16, 2, 128).amax(2) - weight.view(16, 2, 128).amin(2)) / 15
    error = (unpacked(quantized(weight, "int4"), torch.float32) - weight).abs().view(16, 2, 128)
    assert (error <= 0.51 * step[:, :, None] + 0.01 * weight.view(16, 2, 128).abs()).all()


@pytest.mark.parametrize("group", [32, 96, 128, 384])
def test_four_bits_of_any_group_are_unpacked_to_what_was_packed(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(16, (5, 768), generator=generator)
    scales = torch.rand(5, 768 // group, generator=generator) + 0.1
    zeros = torch.randint(17, scales.shape, generator=generator)
    exact = ((codes.view(5, -1, group) - zeros[:, :, None]) * scales[:, :, None]).flatten(1)

    packed = pack_four_bits(codes, scales, zeros)
    assert packed.width == 768
    assert packed.group <= 128
    torch.testing.assert_close(unpacked(packed, torch.float32), exact, rtol=2**-16, atol=0)
    plain = pack_four_bits(codes, scales)
    assert torch.equal(unpacked(plain, torch.float32) == 0, codes == 8)


@pytest.mark.parametrize(("across", "group"), [(96, 32), (256, 128), (768, 768)])
def test_blocks_of_fp8_get_a_size_that_kernels_have(across: int, group: int) -> None:
    codes, scales, exact = _fp8(torch.randn(64, 768, generator=torch.Generator().manual_seed(0)), 32, across)
    packed = pack_tensors("fp8", {"weight": codes, "weight_scale_inv": scales})

    assert packed.group == group
    torch.testing.assert_close(unpacked(packed, torch.float32), exact)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "hqq", "bits": 3}, "quantised by 'hqq' with 3 bits have no kernel"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act = true"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "layout 'gemv'"),
        (_compressed("int", 8, "int-quantized"), "int of 8 bits, format 'int-quantized'"),
    ],
)
def test_a_format_without_a_kernel_is_refused(
    random_model: RandomModel, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        _logits(_write(random_model("qwen3"), tmp_path / "model", settings, "gptq"))


def test_factors_that_belong_to_no_projection_are_refused(random_model: RandomModel, tmp_path: Path) -> None:
    folder = _write(random_model("qwen3"), tmp_path / "model", _FORMATS["fp8 rows"], "fp8 rows")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.other.weight_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"not a projection of a Qwen3ForCausalLM, such as .*0\.other"):
        _logits(folder)


@pytest.mark.parametrize(("name", "options"), [("mixtral", {}), ("qwen3", {"quantization": "torchao-int8"})])
def test_what_cannot_be_quantised_is_refused(random_model: RandomModel, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match="quantize = 'fp8'"):
        _logits(random_model(name), quantize="fp8", **options)


# -- on a GPU ------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _product_error(packed: Packed, num_tokens: int, dtype: torch.dtype) -> float:
    """Difference of a kernel's product from that of the unpacked weights, relative to its norm."""
    from enginehouse_hf.cuda.packed import project_packed

    generator = torch.Generator("cuda").manual_seed(num_tokens)
    x = torch.randn(num_tokens, packed.width, generator=generator, device="cuda").to(dtype)
    x[:, 7] *= 50.0  # states have a few large columns
    bias = None if packed.bias is None else packed.bias.float()
    expected = torch.nn.functional.linear(x.float(), unpacked(packed, torch.float32), bias)
    found = project_packed(x, packed, may_split=num_tokens % 2 == 0)
    found = (found.sum(1) if found.dim() == 3 else found).float()
    return float((found - expected).norm() / expected.norm())


_NUM_TOKENS = (1, 2, 9, 20, 40, 100, 300)


@needs_gpu
@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_rows", "width"), [(48, 64), (251, 2560), (4096, 14336), (20480, 256)])
def test_kernels_give_the_products_of_the_unpacked_weights(kind: Any, dtype: str, num_rows: int, width: int) -> None:
    """FP8 rounds the states of more than one token in bfloat16, too."""
    generator = torch.Generator("cuda").manual_seed(width)
    weight = torch.randn(num_rows, width, generator=generator, device="cuda") * 0.05
    bias = torch.randn(num_rows, generator=generator, device="cuda").to(getattr(torch, dtype))
    packed = evolve(quantized(weight, kind), bias=bias)
    for num_tokens in _NUM_TOKENS:
        rounds = kind == "fp8" and dtype == "bfloat16" and num_tokens > 1
        bound = 0.05 if rounds else 0.01 if dtype != "float32" else 3e-4

        assert _product_error(packed, num_tokens, bias.dtype) < bound, num_tokens


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [32, 64, 96, 128, 256, 1536])
def test_kernels_for_four_bits_in_groups_of_any_size(group: int, dtype: torch.dtype) -> None:
    """With zeros up to 16, as GPTQ stores 15 for that; a number of rows that no tile divides."""
    num_rows, width = 75, 1536
    generator = torch.Generator("cuda").manual_seed(group)
    size = num_rows, width // group
    codes = torch.randint(16, (num_rows, width), generator=generator, device="cuda")
    zeros = torch.randint(17, size, generator=generator, device="cuda")
    packed = pack_four_bits(codes, torch.rand(size, generator=generator, device="cuda") * 0.01, zeros)
    for num_tokens in _NUM_TOKENS:
        assert _product_error(packed, num_tokens, dtype) < (3e-4 if dtype == torch.float32 else 0.01), num_tokens


@needs_gpu
@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_of_gate_and_up_for_one_token(kind: Any, dtype: torch.dtype) -> None:
    from enginehouse_hf.cuda.packed import project_packed

    generator = torch.Generator("cuda").manual_seed(0)
    packed = quantized(torch.randn(2 * 205, 512, generator=generator, device="cuda") * 0.1, kind)
    x = torch.randn(1, 512, generator=generator, device="cuda").to(dtype)
    gate, up = torch.nn.functional.linear(x.float(), unpacked(packed, torch.float32)).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up

    found = project_packed(x, packed, "silu").float()
    assert (found - expected).norm() < (3e-4 if dtype == torch.float32 else 0.02) * expected.norm()


@needs_gpu
@pytest.mark.parametrize("form", _FORMATS)
def test_fused_layers_run_a_quantised_checkpoint(random_model: RandomModel, tmp_path: Path, form: str) -> None:
    folder = _write(random_model("qwen2"), tmp_path / "stored", _FORMATS[form], form)
    options = {"device": "cuda:0", "cache_tokens": 256, "slots": 2}
    exact = _logits(folder)
    assert np.linalg.norm(_logits(folder, **options) - exact) < 1e-3 * np.linalg.norm(exact)
    assert np.linalg.norm(_logits(folder, **options, dtype="bfloat16") - exact) < 0.3 * np.linalg.norm(exact)
