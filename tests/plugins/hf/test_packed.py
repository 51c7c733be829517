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
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from enginehouse.contract.backend import ModelSource, Span
from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.backend import HfBackend, HfOptions
from enginehouse_hf.packed import (
    E2M1,
    MAX_KEPT,
    MAX_KEPT_TILES,
    MAX_TILES,
    Packed,
    PackedLinear,
    has_tensor_cores_of_8_bits,
    num_packed,
    pack_codes,
    quantized,
    quantized_head,
    tiled,
    unpacked,
)
from enginehouse_hf.stored import pack_tensors
from enginehouse_hf.tokenizer import ModelFiles
from enginehouse_hf.weights import load_weights

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


def _mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of the weights of all experts, (experts, inputs, outputs), and what transformers reads in them."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor() - 2
    numbers = torch.tensor([*E2M1, *(-number for number in E2M1)])
    codes = (groups / exponents.exp2()[..., None]).unsqueeze(-1).sub(numbers).abs().argmin(-1).to(torch.uint8)
    blocks, scales = codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


_FORMATS: dict[str, dict[str, Any]] = {
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "fp8 rows": _compressed("float", 8, "float-quantized"),
    "fp8 tensor": _compressed("float", 8, "naive-quantized"),
    "packed": _compressed("int", 4, "pack-quantized"),
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "desc_act": False},
}
_MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
_ALL_FORMATS = _FORMATS | {"mxfp4": _MXFP4}


def _write(source: Path, folder: Path, settings: dict[str, Any] | None, form: str | None) -> Path:
    """A copy of a model: with quantised projections of its layers, or with what these stand for."""
    shutil.copytree(source, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if form == "mxfp4" and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored, exact = _mxfp4(tensor)
            tensors |= {name: exact} if settings is None else {f"{name}_{key}": value for key, value in stored.items()}
            continue
        if form in (None, "mxfp4") or not name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
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


@pytest.mark.parametrize("form", _FORMATS)
def test_experts_of_a_quantised_checkpoint_give_the_logits_of_their_weights(
    random_model: RandomModel, tmp_path: Path, form: str
) -> None:
    source = random_model("mixtral")
    stored = _logits(_write(source, tmp_path / "stored", _FORMATS[form], form))
    exact = _logits(_write(source, tmp_path / "exact", None, form))

    assert np.abs(stored - exact).max() < 1e-4 * np.abs(exact).max()
    assert np.abs(exact - _logits(source)).max() > 1e-3 * np.abs(exact).max(), "the weights were rounded"


def test_mxfp4_experts_of_gpt_oss_give_the_logits_of_their_weights(random_model: RandomModel, tmp_path: Path) -> None:
    """Four bits in files of gpt-oss, with biases and rows of gate and up in turn."""
    source = random_model("gpt_oss")
    stored = _logits(_write(source, tmp_path / "stored", _MXFP4, "mxfp4"))
    exact = _logits(_write(source, tmp_path / "exact", None, "mxfp4"))

    assert np.abs(stored - exact).max() < 1e-4 * np.abs(exact).max()
    assert np.abs(exact - _logits(source)).max() > 1e-3 * np.abs(exact).max(), "the weights were rounded"


@pytest.mark.parametrize(("name", "form"), [("qwen3_moe", "fp8 rows"), ("mixtral", "awq"), ("gpt_oss", "mxfp4")])
def test_packed_experts_compute_what_their_unpacked_weights_do(
    random_model: RandomModel, tmp_path: Path, name: str, form: str
) -> None:
    """The reference for the kernels, which the loader compares with the fused layers."""
    folder = _write(random_model(name), tmp_path / "model", _ALL_FORMATS[form], form)
    options = HfOptions(device="cpu", dtype="float32").resolved("cpu")
    models = [
        load_weights(AutoModelForCausalLM, ModelFiles(folder), options, keeps_packed=keeps) for keeps in (True, False)
    ]
    with torch.no_grad():
        packed, plain = (model(torch.arange(3, 33)[None]).logits for model in models)

    assert num_packed(models[0]) > 0 == num_packed(models[1])
    assert (packed - plain).abs().max() < 1e-4 * plain.abs().max()


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_experts_are_quantised_at_load_as_other_projections_are(
    random_model: RandomModel, tmp_path: Path, name: str, kind: Any
) -> None:
    source, folder = random_model(name), tmp_path / "rounded"
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            tensors[key] = unpacked(quantized(tensor, kind), torch.float32)
        elif tensor.dim() == 3:
            experts = [unpacked(quantized(expert.T, kind), torch.float32).T for expert in tensor]
            tensors[key] = torch.stack(experts).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    exact = _logits(folder)

    assert np.abs(_logits(source, quantize=kind) - exact).max() < 1e-4 * np.abs(exact).max()
    assert np.abs(_logits(source) - exact).max() > 1e-3 * np.abs(exact).max(), "the weights were rounded"


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
def test_tiles_of_four_bits_in_groups_of_any_size_are_what_the_words_were(group: int) -> None:
    generator = torch.Generator().manual_seed(group)
    codes = torch.randint(16, (5, 768), generator=generator)
    scales = torch.rand(5, 768 // group, generator=generator) + 0.1
    zeros = torch.randint(17, scales.shape, generator=generator)
    exact = ((codes.view(5, -1, group) - zeros[:, :, None]) * scales[:, :, None]).flatten(1)

    words = Packed(pack_codes(codes, group), scales, zeros.to(torch.uint8))
    tiles = tiled(words)
    assert torch.equal(unpacked(words, torch.float32), exact)
    assert (tiles.form, tiles.width, tiles.group) == ("tiles", 768, {384: 128, 96: 32}.get(group, group))
    torch.testing.assert_close(unpacked(tiles, torch.float32), exact, rtol=2**-16, atol=0)
    assert torch.equal(unpacked(tiled(Packed(words.codes, scales)), torch.float32) == 0, codes == 8)


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


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("nemotron_h", {}, "mixer.experts: the weights of a NemotronHExperts have no kernel"),
        ("qwen3", {"quantization": "torchao-int8"}, "only one can be set"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    random_model: RandomModel, name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=f"quantize = 'fp8'.*{reason}"):
        _logits(random_model(name), quantize="fp8", **options)


def test_experts_beside_a_recurrence_are_quantised_at_load(random_model: RandomModel) -> None:
    exact, rounded = _logits(random_model("lfm2_moe")), _logits(random_model("lfm2_moe"), quantize="fp8")
    assert np.abs(rounded - exact).max() > 1e-3 * np.abs(exact).max()


def test_experts_of_which_some_are_quantised_are_refused(random_model: RandomModel, tmp_path: Path) -> None:
    folder = _write(random_model("mixtral"), tmp_path / "model", _FORMATS["fp8 rows"], "fp8 rows")
    tensors = load_file(folder / "model.safetensors")
    del tensors[next(name for name in tensors if "experts.2.w3.weight_scale" in name)]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"only some of its experts have quantised weights, not .*experts\.2\.w3"):
        _logits(folder)


def test_mxfp4_factors_above_two_are_refused() -> None:
    tensors = {"blocks": torch.zeros(4, 2, 16, dtype=torch.uint8), "scales": torch.full((4, 2), 129, dtype=torch.uint8)}
    with pytest.raises(ModelLoadError, match=r"exponents of \[4, 2\] up to 129"):
        pack_tensors("mxfp4", tensors)


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
    """FP8 rounds the states of many tokens in bfloat16, too, unless the weights say that they are kept."""
    generator = torch.Generator("cuda").manual_seed(width)
    weight = torch.randn(num_rows, width, generator=generator, device="cuda") * 0.05
    bias = torch.randn(num_rows, generator=generator, device="cuda").to(getattr(torch, dtype))
    packed = PackedLinear(evolve(quantized(weight, kind), bias=bias)).packed
    for num_tokens in _NUM_TOKENS:
        least, most = (MAX_KEPT, 1 << 30) if kind == "fp8" else (MAX_KEPT_TILES, MAX_TILES)
        rounds = dtype == "bfloat16" and least < num_tokens <= most
        bound = 0.01 if dtype != "float32" else 3e-4

        assert _product_error(packed, num_tokens, bias.dtype) < (0.05 if rounds else bound), num_tokens


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "width"), [(48, 64), (251, 2560), (20480, 256)])
def test_kernels_give_the_products_of_the_projection_to_logits(dtype: torch.dtype, num_rows: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(width)
    weight = torch.randn(num_rows, width, generator=generator, device="cuda") * 0.05
    packed = evolve(quantized_head(weight), bias=torch.randn(num_rows, generator=generator, device="cuda").to(dtype))
    assert (unpacked(packed, torch.float32) - weight).norm() < 0.012 * weight.norm()
    for num_tokens in _NUM_TOKENS:
        assert _product_error(packed, num_tokens, dtype) < (3e-4 if dtype == torch.float32 else 0.01), num_tokens


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
    scales = torch.rand(size, generator=generator, device="cuda") * 0.01
    packed = tiled(Packed(pack_codes(codes, group), scales, zeros.to(torch.uint8)))
    for num_tokens in _NUM_TOKENS:
        rounds = dtype == torch.bfloat16 and MAX_KEPT_TILES < num_tokens <= MAX_TILES
        bound = 0.05 if rounds else 0.01 if dtype != torch.float32 else 3e-4

        assert _product_error(packed, num_tokens, dtype) < bound, num_tokens


@needs_gpu
@pytest.mark.parametrize("num_parts", [1, 2])
def test_states_are_the_sums_of_their_parts(num_parts: int) -> None:
    """Two parts of FP8 hold a state of bfloat16 exactly, unless it is far below the largest; one rounds it."""
    from enginehouse_hf.cuda.split_states import split_states

    x = torch.randn(5, 1536, generator=torch.Generator("cuda").manual_seed(0), device="cuda").bfloat16()
    if not has_tensor_cores_of_8_bits(x):
        pytest.skip("needs Hopper or later")
    x[:, 7] *= 50.0
    x[3] *= 1e-6
    states = split_states(x, 128, num_parts)
    parts = states.codes.float().view(5, num_parts, 1536)
    assert states.scales is not None
    whole = (
        torch.stack([part / 16**index for index, part in enumerate(parts.unbind(1))]).sum(0) * states.scales[:, None]
    )
    error, largest = (whole - x.float()).abs(), x.float().abs().amax(1, keepdim=True)

    assert torch.equal(states.sums, parts.view(5 * num_parts, 12, 128).sum(2).T)
    if num_parts == 1:
        assert (error <= x.float().abs() / 16 + largest * 2.0**-17).all() and (error > 0).any()
    else:
        assert (error <= largest * 2.0**-21).all() and (error[x.float().abs() >= largest * 2.0**-13] == 0).all()


@needs_gpu
@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_the_product_of_gate_and_up(kind: Any, dtype: torch.dtype, num_tokens: int) -> None:
    from enginehouse_hf.cuda.packed import project_packed

    generator = torch.Generator("cuda").manual_seed(0)
    packed = PackedLinear(quantized(torch.randn(2 * 205, 512, generator=generator, device="cuda") * 0.1, kind)).packed
    x = torch.randn(num_tokens, 512, generator=generator, device="cuda").to(dtype)
    gate, up = torch.nn.functional.linear(x.float(), unpacked(packed, torch.float32)).chunk(2, 1)
    expected = torch.nn.functional.silu(gate) * up

    found = project_packed(x, packed, "silu").float()
    assert (found - expected).norm() < (3e-4 if dtype == torch.float32 else 0.02) * expected.norm()


@needs_gpu
@pytest.mark.parametrize(
    ("name", "form"),
    [*(("qwen2", form) for form in _FORMATS), *(("mixtral", form) for form in _FORMATS), ("gpt_oss", "mxfp4")],
)
def test_fused_layers_run_a_quantised_checkpoint(
    random_model: RandomModel, tmp_path: Path, name: str, form: str
) -> None:
    folder = _write(random_model(name), tmp_path / "stored", _ALL_FORMATS[form], form)
    options = {"device": "cuda:0", "cache_tokens": 256, "slots": 2}
    exact = _logits(folder)
    assert np.linalg.norm(_logits(folder, **options) - exact) < 1e-3 * np.linalg.norm(exact)
    if name == "qwen2":  # rounding moves tokens of random models to other experts
        assert np.linalg.norm(_logits(folder, **options, dtype="bfloat16") - exact) < 0.3 * np.linalg.norm(exact)


@needs_gpu
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_fused_layers_run_experts_quantised_at_load(random_model: RandomModel, kind: str) -> None:
    options = {"quantize": kind, "cache_tokens": 256, "slots": 2}
    exact = _logits(random_model("mixtral"), quantize=kind)
    found = _logits(random_model("mixtral"), device="cuda:0", **options)
    assert np.linalg.norm(found - exact) < 1e-3 * np.linalg.norm(exact)
