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
from transformers import AutoConfig

from enginehouse.contract.backend import ModelSource
from enginehouse.contract.errors import EnginehouseError, MissingDependency, ModelLoadError
from enginehouse_backendkit.model_folder import describe_failure
from enginehouse_hf.attention import UnsupportedAttention
from enginehouse_hf.backend import HfOptions
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
    kind: Any, files: ModelFiles, options: HfOptions, *, attention: str | None = None, unused: str = ""
) -> Any:
    """Return a transformers model in evaluation mode, on its device.

    Args:
        kind: the class with ``from_pretrained``, such as ``AutoModelForCausalLM``.
        options: resolved.
        attention: name of the attention function; None is the model's default.
        unused: beginning of the names of tensors that may be missing, because nothing reads them.

    Raises:
        MissingDependency: quantisation needs a package that is not installed.
        ModelLoadError: tensors are missing or have another shape, or there is no such device.
    """
    assert options.dtype is not None
    form: dict[str, Any] = {"dtype": getattr(torch, options.dtype)}
    if attention is not None:
        form["attn_implementation"] = attention
    # A folder may contain pickles next to its safetensors; transformers would fall back to them.
    safe: dict[str, Any] = {"use_safetensors": True} if not options.trust_remote_code else {}
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelLoadError(f"device = {options.device!r}: torch {torch.__version__} finds no CUDA device")
    if options.random_weights:
        config = AutoConfig.from_pretrained(**files.arguments)
        maker = kind.from_config if hasattr(kind, "from_config") else kind._from_config
        with torch.device(options.device):
            model: Any = maker(config, **form)
    elif options.device_map is not None or options.quantization is not None:
        placed = options.device_map or options.device
        model = _read_weights(kind, files, unused, **form, **safe, device_map=placed, **_quantized(options))
    else:
        model = _read_weights(kind, files, unused, **form, **safe).to(options.device)
    return model.eval()


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
