"""Quantised checkpoints, read as they are: FP8 and int4 of several kinds, MXFP4.

transformers builds the model, with placeholders for the projections whose weights the files hold in few bits, and reads
the files into them; :func:`pack_stored` brings these to the form of ``packed.py``. The weights of experts, which files
hold one by one and transformers all in one, are read by this module. The names of the tensors decide which weights are
quantised. A tensor of factors that belongs to none of the model's is an error: without it they would be wrong.

Sources: the classes ``FineGrainedFP8Config``, ``AwqConfig`` and ``GPTQConfig`` of transformers for the settings; the
README of compressed-tensors for its formats; AutoAWQ's ``packing_utils.py`` for the order of four-bit codes;
``integrations/mxfp4.py`` of transformers for the tensors of gpt-oss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from enginehouse.contract.errors import ModelLoadError
from enginehouse_hf.packed import Packed, PackedExperts, are_experts, joined, pack_codes

__all__ = ["METHOD", "Stored", "find_stored", "pack_stored", "pack_tensors", "projections"]

METHOD = "enginehouse_stored"
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in an int32, in units of four bits, of each of eight neighbouring outputs."""

_SUFFIXES = {
    "fp8": ("weight", "weight_scale_inv"),
    "float": ("weight", "weight_scale"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point"),
    "awq": ("qweight", "scales", "qzeros"),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "mxfp4": ("blocks", "scales"),
}
"""Tensors of a projection by format; the second is there for every quantised one."""

_EXPERT_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Projections of an expert in files that have each by itself."""

_LARGEST_EXPONENT = 128
"""Of the factors of MXFP4, plus 127: kernels multiply with up to 2."""


@frozen
class Stored:
    """Format of the projections of a checkpoint.

    Attributes:
        form: a key of ``_SUFFIXES``.
        names: prefix of the tensors of each quantised projection, in the files.
        shapes: shape and data type of every tensor, by name.
        files: the file of every tensor.
        is_off_by_one: GPTQ zeros are stored minus one.
    """

    form: str
    names: frozenset[str]
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    files: Mapping[str, Path]
    is_off_by_one: bool = False

    def tensor_names(self, prefix: str) -> dict[str, str]:
        """Names in the files of the tensors of one projection, by their names in the format."""
        names = {suffix: f"{prefix}{_separator(self.form)}{suffix}" for suffix in _SUFFIXES[self.form]}
        return {suffix: name for suffix, name in names.items() if name in self.shapes}


def _separator(form: str) -> str:
    return "_" if form == "mxfp4" else "."


def find_stored(folder: Path, config: Any) -> Stored | None:
    """Return what the quantisation settings of a model and its files say; None for weights that are not quantised.

    Raises:
        ModelLoadError: there is no kernel for this format.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    form, is_off_by_one = _form(settings)
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    files: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                part = tensors.get_slice(name)
                shapes[name], files[name] = (tuple(part.get_shape()), part.get_dtype()), file
    ending = _separator(form) + _SUFFIXES[form][1]
    names = frozenset(name.removesuffix(ending) for name in shapes if name.endswith(ending))
    return Stored(form, names, shapes, files, is_off_by_one)


def _form(settings: Mapping[str, Any]) -> tuple[str, bool]:
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method in ("fp8", "mxfp4"):
        return method, False
    if method == "awq" and settings.get("bits", settings.get("w_bit", 4)) == 4:
        version = str(getattr(settings.get("version", "gemm"), "value", settings.get("version", "gemm"))).lower()
        if version == "gemm":
            return "awq", False
        raise ModelLoadError(f"AWQ weights in the layout {version!r} have no kernel in hf; known: 'gemm'")
    if method == "gptq" and settings.get("bits") == 4:
        if settings.get("desc_act"):
            raise ModelLoadError(
                "GPTQ weights with desc_act = true have no kernel in hf: their columns are not in order"
            )
        return "gptq", settings.get("checkpoint_format", "gptq") != "gptq_v2"
    if method == "compressed-tensors":
        kinds = {
            (weights.get("type"), weights.get("num_bits"))
            for group in (settings.get("config_groups") or {}).values()
            if (weights := group.get("weights"))
        }
        if kinds == {("float", 8)}:
            return "float", False
        if kinds == {("int", 4)} and settings.get("format") == "pack-quantized":
            return "packed", False
        found = ", ".join(f"{kind} of {bits} bits" for kind, bits in sorted(kinds, key=str)) or "none"
        raise ModelLoadError(
            f"compressed-tensors weights ({found}, format {settings.get('format')!r}) have no kernel in hf; known: "
            "float of 8 bits, int of 4 bits packed"
        )
    bits = settings.get("bits")
    raise ModelLoadError(
        f"weights quantised by {method!r}{f' with {bits} bits' if bits else ''} have no kernel in hf; known: FP8, "
        "MXFP4, AWQ and GPTQ of 4 bits, compressed-tensors of 8-bit floats and 4-bit integers"
    )


class _StoredLinear(nn.Module):
    """Placeholder of a projection: parameters with the names and types of the files."""

    def __init__(self, prefix: str, stored: Stored, has_bias: bool) -> None:
        super().__init__()
        self.stored = stored
        names = stored.tensor_names(prefix) | ({"bias": f"{prefix}.bias"} if has_bias else {})
        for suffix, name in names.items():
            if name not in stored.shapes:
                continue
            shape, kind = stored.shapes[name]
            dtype = None if suffix == "bias" else _DTYPES.get(kind)
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(suffix, nn.Parameter(tensor, requires_grad=False))

    def packed(self) -> Packed:
        """The weights in the form of ``packed.py``."""
        tensors = {name: tensor.detach() for name, tensor in self.named_parameters(recurse=False)}
        bias = tensors.pop("bias", None)
        found = pack_tensors(self.stored.form, tensors, is_off_by_one=self.stored.is_off_by_one)
        return Packed(found.codes, found.scales, found.zeros, bias)


class _StoredExperts(nn.Module):
    """Placeholder of experts: their biases; the weights are read by :meth:`packed`.

    Args:
        plain: transformers' module, whose weights are removed.
        gate_up: prefixes of the projections whose rows are those of the joint one, in order.
        down: the same for the other one.
    """

    def __init__(self, plain: nn.Module, stored: Stored, gate_up: Sequence[str], down: Sequence[str]) -> None:
        super().__init__()
        self._plain, self.stored, self._gate_up, self._down = (plain,), stored, gate_up, down
        self._num_experts = len(plain.get_parameter("down_proj"))
        del plain.gate_up_proj, plain.down_proj
        for name, parameter in plain.named_parameters(recurse=False):
            self.register_parameter(name, parameter)

    @property
    def names(self) -> frozenset[str]:
        """Prefixes of the projections in the files."""
        return frozenset([*self._gate_up, *self._down])

    def packed(self, files: _Files, device: torch.device) -> PackedExperts:
        """The weights in the form of ``packed.py``."""
        parts = []
        for name, prefixes in (("gate_up_proj", self._gate_up), ("down_proj", self._down)):
            whole = joined([one for prefix in prefixes for one in self._read(prefix, files, device)])
            bias = getattr(self, f"{name}_bias", None)
            parts.append(whole if bias is None else evolve(whole, bias=bias.detach().flatten()))
        return PackedExperts(self._plain[0], self._num_experts, *parts)

    def _read(self, prefix: str, files: _Files, device: torch.device) -> Iterator[Packed]:
        names = self.stored.tensor_names(prefix)
        tensors = {suffix: files.read(self.stored, name).to(device) for suffix, name in names.items()}
        if self.stored.form == "mxfp4":  # one tensor for all experts
            for blocks, scales in zip(tensors["blocks"], tensors["scales"], strict=True):
                yield pack_tensors("mxfp4", {"blocks": blocks, "scales": scales})
        else:
            yield pack_tensors(self.stored.form, tensors, is_off_by_one=self.stored.is_off_by_one)


class _Files:
    """Tensors of files, each of which is opened once."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}

    def read(self, stored: Stored, name: str) -> Tensor:
        """The tensor ``name``, in host memory."""
        path = stored.files[name]
        if path not in self._opened:
            self._opened[path] = safe_open(str(path), "pt")
        tensor: Tensor = self._opened[path].get_tensor(name)
        return tensor


def _find_experts(module: nn.Module, full_name: str, stored: Stored) -> _StoredExperts | None:
    """A placeholder for experts with quantised weights in the files; None for any other module.

    Raises:
        ModelLoadError: the files have only some of them.
    """
    if not are_experts(module):
        return None
    if f"{full_name}.gate_up_proj" in stored.names:
        found = [f"{full_name}.gate_up_proj"], [f"{full_name}.down_proj"]
    else:
        prefixes = full_name, full_name.replace(".mlp.", ".block_sparse_moe.")
        kinds = ((prefix, names) for prefix in prefixes for names in _EXPERT_NAMES)
        one = next(((prefix, names) for prefix, names in kinds if f"{prefix}.0.{names[0]}" in stored.names), None)
        if one is None:
            return None
        prefix, (gate, up, down) = one
        indices = range(len(module.get_parameter("down_proj")))
        gate_up = [f"{prefix}.{index}.{name}" for index in indices for name in (gate, up)]
        found = gate_up, [f"{prefix}.{index}.{down}" for index in indices]
        if not getattr(module, "is_concatenated", True):
            raise ModelLoadError(f"{full_name}: quantised experts whose gate and up alternate have no kernel in hf")
    if missing := {*found[0], *found[1]} - stored.names:
        raise ModelLoadError(f"{full_name}: only some of its experts have quantised weights, not {min(missing)}")
    return _StoredExperts(module, stored, *found)


_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def pack_tensors(form: str, tensors: Mapping[str, Tensor], *, is_off_by_one: bool = False) -> Packed:
    """Bring the tensors of one projection to the form of ``packed.py``.

    Args:
        form: ``fp8``, ``float``, ``packed``, ``awq``, ``gptq`` or ``mxfp4``.
        tensors: by the names of the format.

    Raises:
        ModelLoadError: the shapes do not fit together.
    """
    if form in ("fp8", "float"):
        weight, scales = tensors["weight"], tensors["weight_scale_inv" if form == "fp8" else "weight_scale"].float()
        if weight.dtype != torch.float8_e4m3fn:
            raise ModelLoadError(f"FP8 weights of the type {weight.dtype} have no kernel in hf; known: float8_e4m3fn")
        return Packed(weight, _by_row(scales, *weight.shape))
    if form == "mxfp4":
        blocks, exponents = tensors["blocks"], tensors["scales"]
        if blocks.shape != (*exponents.shape, 16) or int(exponents.max()) > _LARGEST_EXPONENT:
            raise ModelLoadError(
                f"MXFP4 weights of {list(blocks.shape)} with exponents of {list(exponents.shape)} up to "
                f"{int(exponents.max())} have no kernel in hf; known: 16 bytes to one, up to {_LARGEST_EXPONENT}"
            )
        columns = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)  # the lower bits come first
        return Packed(pack_codes(columns, 32), exponents.contiguous())
    if form == "packed":
        codes, scales = _nibbles(tensors["weight_packed"]), tensors["weight_scale"]
        stored = tensors.get("weight_zero_point")
        zeros = None if stored is None else _nibbles(stored.T).T[: len(codes)]
    else:
        order = _AWQ_ORDER if form == "awq" else tuple(range(8))
        scales, zeros = tensors["scales"].T, _nibbles(tensors["qzeros"], order).T
        codes = _nibbles(tensors["qweight"], order).T if form == "awq" else _nibbles(tensors["qweight"].T)
        if is_off_by_one:
            zeros = zeros + 1
    rows, width = codes.shape
    num_groups = scales.shape[1]
    if scales.shape[0] != rows or width % num_groups or width // num_groups % 32:
        raise ModelLoadError(
            f"4-bit weights of {rows} x {width} with factors of {list(scales.shape)} have no kernel in hf; groups must "
            "have a multiple of 32 columns"
        )
    if zeros is not None and bool((zeros == 8).all()):
        zeros = None
    found = None if zeros is None else zeros.to(torch.uint8).contiguous()
    return Packed(pack_codes(codes, width // num_groups), scales.contiguous(), found)


def _nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(rows, 8 * columns) uint8 of int32: for each the eight codes, from the bits at the places ``order``."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
    return ((words[:, :, None] >> shifts) & 15).to(torch.uint8).flatten(1)


def _by_row(scales: Tensor, rows: int, width: int) -> Tensor:
    """Factors for each row, or each row and block of columns, of factors per tensor, row or block."""
    if scales.numel() == 1:
        return scales.view(1, 1).expand(rows, 1).contiguous()
    if scales.dim() == 1 or (scales.shape[1] == 1 and scales.shape[0] == rows):
        return scales.view(rows, 1).contiguous()
    down, across = -(-rows // scales.shape[0]), width // scales.shape[1]
    down = 1 << (down - 1).bit_length()  # blocks have 128 rows, also where the last is smaller
    if width % scales.shape[1] or across % 16 or -(-rows // down) != scales.shape[0]:
        raise ModelLoadError(f"FP8 weights of {rows} x {width} with {list(scales.shape)} factors have no kernel in hf")
    repeats = across // math.gcd(across, 128) if scales.shape[1] > 1 else 1  # for the kernels' sizes
    return scales.repeat_interleave(down, 0)[:rows].repeat_interleave(repeats, 1).contiguous()


def projections(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Module]]:
    """Owner, name in it, full name, and the module, of every module that is part of another."""
    for prefix, owner in list(model.named_modules()):
        for name, module in list(owner.named_children()):
            yield owner, name, f"{prefix}.{name}" if prefix else name, module


def pack_stored(
    model: nn.Module, make: Callable[[Packed], nn.Module], make_experts: Callable[[PackedExperts], nn.Module]
) -> None:
    """Replace every placeholder by ``make(packed)``, or ``make_experts(packed)``."""
    files = _Files()
    device = next(model.parameters()).device
    for owner, name, _, module in projections(model):
        if isinstance(module, _StoredLinear):
            setattr(owner, name, make(module.packed()))
        elif isinstance(module, _StoredExperts):
            setattr(owner, name, make_experts(module.packed(files, device)))


@register_quantization_config(METHOD)
class _StoredConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Settings for transformers in place of those in the files."""

    def __init__(self, stored: Any = None, **_: Any) -> None:
        self.quant_method, self.stored = METHOD, stored

    def to_dict(self) -> dict[str, Any]:
        """The method alone."""
        return {"quant_method": self.quant_method}


@register_quantizer(METHOD)
class _Placeholders(HfQuantizer):  # type: ignore[misc]
    """Puts placeholders into a model before transformers reads its files."""

    requires_calibration = True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> None:
        stored: Stored = self.quantization_config.stored
        left = set(stored.names)
        for owner, name, full_name, module in projections(model):
            if isinstance(module, nn.Linear) and full_name in left:
                setattr(owner, name, _StoredLinear(full_name, stored, module.bias is not None))
                left.discard(full_name)
            elif (experts := _find_experts(module, full_name, stored)) is not None:
                setattr(owner, name, experts)
                left -= experts.names
                ignored = model._keys_to_ignore_on_load_unexpected or ()  # from_pretrained warns of other ones
                model._keys_to_ignore_on_load_unexpected = {*ignored, re.escape(f"{full_name}.")}
        if left:
            raise ModelLoadError(
                f"the files hold quantised weights that are not a projection of a {type(model).__name__}, such as "
                f"{min(left)}"
            )

    def is_serializable(self) -> bool:
        """False: the files exist already."""
        return False

    @property
    def is_trainable(self) -> bool:
        """False."""
        return False
