"""Reads a model of any kind through transformers: refuses incomplete weights, maps transformers' errors to ours.

Called by the loader of runners and by that of poolers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from attrs import evolve
from torch import nn
from transformers import AutoConfig

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError, MissingDependency, ModelLoadError
from enginehouse_backendkit.model_folder import describe_failure
from enginehouse_hf.attention import UnsupportedAttention
from enginehouse_hf.backend import HfOptions
from enginehouse_hf.packed import (
    Packed,
    PackedExperts,
    PackedLinear,
    are_experts,
    has_tensor_cores_of_8_bits,
    quantized,
    quantized_experts,
    quantized_head,
    unpacked,
)
from enginehouse_hf.stored import METHOD, Stored, find_stored, pack_stored, projections
from enginehouse_hf.tokenizer import ModelFiles

__all__ = ["load_weights", "mapped_errors"]


@contextmanager
def mapped_errors(source: ModelSource) -> Iterator[None]:
    """Raise transformers' errors as MissingDependency or ModelLoadError."""
    try:
        yield
    except EnginehouseError:
        raise
    except ImportError as error:
        if error.name is None:  # the library's own message names the package
            raise ModelLoadError(f"{source.text}: transformers cannot open it: {error}") from error
        raise MissingDependency(error.name, "hf") from error
    except UnsupportedAttention as error:
        raise ModelLoadError(
            f"{source.text}: this model uses {error}, which the hf backend does not support"
        ) from error
    except Exception as error:
        raise ModelLoadError(f"{source.text}: transformers cannot open it: {describe_failure(error)}") from error


def load_weights(
    kind: Any,
    files: ModelFiles,
    options: HfOptions,
    *,
    attention: str | None = None,
    unused: str = "",
    keeps_packed: bool = False,
) -> Any:
    """Return a transformers model in evaluation mode, on its device.

    Args:
        kind: the class with ``from_pretrained``, such as ``AutoModelForCausalLM``.
        options: resolved.
        attention: name of the attention function; None is the model's default.
        unused: beginning of the names of tensors that may be missing, because nothing reads them.
        keeps_packed: quantised weights stay as they are, in modules of ``packed.py``; otherwise they are unpacked.

    Raises:
        MissingDependency: quantisation needs a package that is not installed.
        ModelLoadError: tensors are missing or have another shape, there is no such device, or no kernel for quantised
            weights of this kind.
    """
    assert options.dtype is not None
    form: dict[str, Any] = {"dtype": getattr(torch, options.dtype)}
    if attention is not None:
        form["attn_implementation"] = attention
    # A folder may contain pickles next to its safetensors; transformers would fall back to them.
    safe: dict[str, Any] = {"use_safetensors": True} if not options.trust_remote_code else {}
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(f"device = {options.device!r}: torch {torch.__version__} finds no CUDA device")
    if options.quantize is not None and options.quantization is not None:
        raise ModelLoadError(
            f"quantize = {options.quantize!r} and quantization = {options.quantization!r}: only one can be set"
        )
    config, stored = _stored(files, options)
    if options.random_weights:
        maker = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        with torch.device(options.device):
            model: Any = maker(config, **form)
    elif options.device_map is not None or options.quantization is not None:
        placed = options.device_map or options.device
        model = _read_weights(kind, files, unused, **form, **safe, device_map=placed, **_quantized(options))
    else:
        given = {} if stored is None else {"config": config}
        model = _read_weights(kind, files, unused, **form, **safe, **given).to(options.device)
    if stored is not None or options.quantize is not None:
        _pack(model, options, keeps_packed)
    return model.eval()


def _stored(files: ModelFiles, options: HfOptions) -> tuple[Any, Stored | None]:
    """Return the model's configuration, and how its files are quantised; the configuration names our placeholders."""
    if files.gguf_file is not None:
        return None, None
    config = AutoConfig.from_pretrained(**files.arguments)
    owner = next((one for one in (config, config.get_text_config()) if hasattr(one, "quantization_config")), config)
    stored = find_stored(files.folder, owner)
    if stored is None:
        return config, None
    chosen = [name for name in ("quantize", "quantization", "device_map") if getattr(options, name) is not None]
    if chosen:
        raise ModelLoadError(f"{files.folder}: its weights are quantised already, so {chosen[0]} cannot be set")
    del owner.quantization_config
    if options.random_weights:
        return config, None
    config.quantization_config = {"quant_method": METHOD, "stored": stored}
    return config, stored


def _pack(model: Any, options: HfOptions, keeps_packed: bool) -> None:
    """Bring quantised weights of the files to our form, and quantise the layers if the options say so."""
    assert options.dtype is not None
    dtype = getattr(torch, options.dtype)

    def make(packed: Packed) -> nn.Module:
        return PackedLinear(packed) if keeps_packed else _dense(packed, dtype)

    def make_experts(experts: PackedExperts) -> nn.Module:
        return experts if keeps_packed else _dense_experts(experts, dtype)

    pack_stored(model, make, make_experts)
    kept = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for name, parameter in model.named_parameters():  # transformers 5.17 does not convert tensors that it renames
        if parameter.is_floating_point() and parameter.dtype != dtype and not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)
    if options.quantize is None:
        return
    layers = model.get_decoder().layers
    for owner, name, full_name, module in projections(layers):
        try:
            if isinstance(module, nn.Linear):
                found = quantized(module.weight.detach(), options.quantize)
                bias = None if module.bias is None else module.bias.detach()
                setattr(owner, name, make(evolve(found, bias=bias)))
            elif are_experts(module):
                setattr(owner, name, make_experts(quantized_experts(module, options.quantize)))
            elif not isinstance(module, nn.Conv1d) and any(
                part.dim() == 3 for part in module.parameters(recurse=False)
            ):
                raise ValueError(f"the weights of a {type(module).__name__} have no kernel in hf")
        except ValueError as error:
            raise ModelLoadError(f"quantize = {options.quantize!r}: {full_name}: {error}") from error
    output = model.get_output_embeddings()
    if isinstance(output, nn.Linear) and keeps_packed and has_tensor_cores_of_8_bits(output.weight):
        bias = None if output.bias is None else output.bias.detach()
        model.set_output_embeddings(PackedLinear(evolve(quantized_head(output.weight.detach()), bias=bias)))


def _dense(packed: Packed, dtype: torch.dtype) -> nn.Linear:
    linear = nn.Linear(packed.width, packed.num_rows, bias=False, device="meta")
    linear.weight = nn.Parameter(unpacked(packed, dtype), requires_grad=False)
    if packed.bias is not None:
        linear.bias = nn.Parameter(packed.bias.to(dtype), requires_grad=False)
    return linear


def _dense_experts(experts: PackedExperts, dtype: torch.dtype) -> nn.Module:
    plain = experts.plain
    for name, part in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
        indices = range(experts.num_experts)
        weight = torch.stack([unpacked(experts.expert(part, index), dtype) for index in indices])
        if getattr(plain, "is_transposed", False):
            weight = weight.transpose(1, 2).contiguous()
        setattr(plain, name, nn.Parameter(weight, requires_grad=False))
        if part.bias is not None:
            bias = part.bias.to(dtype).view(experts.num_experts, -1)
            setattr(plain, f"{name}_bias", nn.Parameter(bias, requires_grad=False))
    return plain


def _read_weights(kind: Any, files: ModelFiles, unused: str, **arguments: Any) -> Any:
    """Load a model; weights that its files lack are an error, where transformers draws them at random."""
    model, report = kind.from_pretrained(
        **files.arguments, **arguments, output_loading_info=True, ignore_mismatched_sizes=True
    )
    missing = sorted(name for name in report["missing_keys"] if not (unused and name.startswith(unused)))
    if missing:
        raise ModelLoadError(
            f"{files.folder}: its files lack {len(missing)} tensors of a {type(model).__name__} ({_first(missing)})"
        )
    wrong = sorted(f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in report["mismatched_keys"])
    if wrong:
        raise ModelLoadError(f"{files.folder}: config.json and weights do not fit together: {_first(wrong)}")
    return model


def _first(texts: Sequence[str]) -> str:
    return ", ".join(texts[:3]) + (", ..." if len(texts) > 3 else "")


def _quantized(options: HfOptions) -> dict[str, Any]:
    """Return the transformers arguments that quantise the weights."""
    if options.quantization is None:
        return {}
    package = options.quantization.split("-")[0]
    if find_spec(package) is None:
        message = f"quantization = {options.quantization!r} needs the package {package}; run: pip install {package}"
        raise ModelLoadError(message)
    if options.quantization == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig  # noqa: PLC0415 - an optional library

        return {"quantization_config": transformers.TorchAoConfig(Int8WeightOnlyConfig())}
    bits = {"load_in_8bit": True} if options.quantization == "bitsandbytes-8bit" else {"load_in_4bit": True}
    return {"quantization_config": transformers.BitsAndBytesConfig(**bits)}
